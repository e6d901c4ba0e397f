"""KV connectors: tiers that keep KV beyond the device, each in a core half and a worker half."""

"""KV connectors: what keeps KV behind the device, in two halves."""

"""The scheduler and the KV accounting: plain Python, no torch, no I/O, no clock."""

"""A device: its memory, its threads, and its queue of launched work."""

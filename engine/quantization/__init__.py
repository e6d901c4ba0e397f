"""Checkpoints whose matrices have 8 or 4 bits: what their config says, and what their tensors mean."""

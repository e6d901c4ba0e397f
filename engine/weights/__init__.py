"""Reads checkpoints and proves that no tensor is missing or left over."""

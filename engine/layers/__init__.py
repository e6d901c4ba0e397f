"""The layers of native models."""

"""A width on which layouts in memory depend; without torch, so that descriptions of models can import it."""

LANES = 16
"""Channels of Mamba 1 in a unit of its state."""

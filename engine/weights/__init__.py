"""Reading checkpoints and proving that nothing is missing or left over."""

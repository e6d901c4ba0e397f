"""The open requests of one api process: what was sent to the engine, and what came back."""

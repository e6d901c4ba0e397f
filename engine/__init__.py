"""The engine: scheduling, text, and one step on one device."""

"""The engine without HTTP: its steps, its scheduler, its KV cache, and whole offline runs."""

"""Benchmarks of the engine without HTTP: steps, scheduler, KV cache, and whole offline runs."""

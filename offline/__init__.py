"""Generation in a Python program, without a server: `LLM`, `AsyncLLM` and their parameters."""

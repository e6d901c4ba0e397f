"""llama-server's own endpoints, and llama.cpp's names of sampling parameters, which Ollama shares."""

"""/api: Ollama's API, on top of chat, completions and embeddings."""

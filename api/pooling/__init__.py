"""/v1/embeddings, /v1/rerank and /v1/score: a vector or a score instead of text."""

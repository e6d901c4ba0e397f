"""Answers that are vectors or scores: embeddings, pooling, classify, rerank and score."""

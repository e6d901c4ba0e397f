"""Tensor parallelism: which rank holds which part of a model, and how the ranks exchange tensors."""

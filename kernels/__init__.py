"""Kernels: tensors only, no config and no model."""

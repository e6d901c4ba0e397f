"""Kernels for NVIDIA GPUs in Triton: one file an operation, and `compile.py`, which compiles them without a GPU."""

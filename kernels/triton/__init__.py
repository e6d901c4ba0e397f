"""Kernels for NVIDIA GPUs in Triton: one file an operation, `compile.py`, which compiles them without a GPU, and
`cubins.py`, which keeps what was compiled."""

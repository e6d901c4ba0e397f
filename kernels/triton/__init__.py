"""Triton kernels for NVIDIA GPUs: one file per operation, `compile.py`, which compiles them without a GPU, and
`cubins.py`, which ships the compiled kernels."""

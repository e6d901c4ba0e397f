"""The paged KV cache: layout, dtype, per-layer views."""

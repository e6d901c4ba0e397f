"""Benchmarks: `serve` over HTTP, `engine` without HTTP, `gpu`, and `peers` in comparison with other engines."""

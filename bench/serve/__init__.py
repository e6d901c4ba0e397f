"""Benchmarks of a server: `python -m pagewire.bench.serve` measures all of it, the other programs its parts."""

"""Benchmarks: `python -m pagewire.bench.offline`, `python -m pagewire.bench.serve`."""

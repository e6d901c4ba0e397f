"""A server and its processes: `python -m pagewire.bench.serve` measures all of it, the other programs its parts."""

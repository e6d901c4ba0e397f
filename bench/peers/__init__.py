"""pagewire compared with other engines: the same checkpoint files, the same requests, one table. `__main__` runs it.

A file `with_…` is a peer. `base` defines the protocol of peers, `work` the requests, `figures` the computed figures.
Files that also run in a peer's own environment (`child`, and the `with_…` that use it) import only the standard library
at the top level.
"""

"""pagewire beside other engines: the same checkpoint files, the same requests, one table. `__main__` runs it.

A file `with_…` is a peer. `base` says what a peer is, `work` what is sent, `figures` what is computed from it. Files
that also run inside a peer's own environment (`child`, and the `with_…` that use it) import the standard library only
until they start.
"""

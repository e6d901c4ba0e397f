"""The compiled C functions. Each computes what its namesake in `kernels.reference` specifies.

Activations are float32 and dense in their last dimension; weights and pages may be bfloat16, which is widened exactly.
Pointers are passed as integers. A call costs a few microseconds besides its work.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Call = Callable[..., None]
_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_ARGUMENTS: dict[str, Sequence[type]] = {
    "product": (_P, _P, _L, _P, _L, _L, _L),
    "product_greedy": (_P, _P, _L, _P, _P, _L),
    "pack": (_P, _P, _L, _L, _L, _I, _L, _L),
    "lookup": (_P, _P, _P, _L),
    "grouped_pack": (_P, _P, _L, _L, _L, _L, _L, _L, _L),
    "grouped_quantize": (_P, _I, _L, _L, _L, _L, _P, _P, _P),
    "fp8_pack": (_P, _P, _L, _L, _L, _L, _L),
    "superblocks_pack": (_P, _P, _L, _L, _L, _L),
    "attend": (_P, _P, _L, _P, _L, _P, _P, _P, _L),
    "rotary": (_P, _L, _P, _P, _F, _P, _P, _P, _L, _L, _L, _L),
    "route": (_P, _P, _L, _P, _P, _L),
    "place": (_P, _P, _P, _L),
    "experts": (_P, _P, _P, _P, _L, _P, _L, _L, _L),
    "program": (_P, _L, _P),
    "write_kv": (_P, _L, _P, _L, _P, _P, _P, _L, _L, _L, _L, _L, _I),
    "greedy": (_P, _P, _P, _L, _L),
    "conv": (_P, _P),
    "scan_delta": (_P, _P),
    "scan_mamba1": (_P, _P),
    "scan_mamba2": (_P, _P),
    "scan_lightning": (_P, _P),
    "gated_norm": (_P, _L),
    "absorb": (_P, _P, _L, _P, _L),
    "expand": (_P, _P, _P, _L, _L),
    "write_latent": (_P, _P, _P, _L, _P, _L, _P, _L),
}


class Kernels:
    """The compiled functions of a level, with the arguments of the C files."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """library: what `build.Library.load` returns."""
        self.name = Path(library._name).name  # has a digest of the sources, the flags and the CPU

        def function(name: str) -> Call:
            found = getattr(library, f"pagewire_{name}")
            found.argtypes, found.restype = _ARGUMENTS[name], None
            call: Call = found
            return call

        self._pool = library.pagewire_set_threads
        self._pool.argtypes, self._pool.restype = (_L,), _L
        self.product = function("product")
        self.product_greedy = function("product_greedy")
        self.pack = function("pack")
        self.lookup = function("lookup")
        self.grouped_pack = function("grouped_pack")
        self.grouped_quantize = function("grouped_quantize")
        self.fp8_pack = function("fp8_pack")
        self.superblocks_pack = function("superblocks_pack")
        self.attend = function("attend")
        self.rotary = function("rotary")
        self.route = function("route")
        self.place = function("place")
        self.experts = function("experts")
        self.program = function("program")
        self.write_kv = function("write_kv")
        self.greedy = function("greedy")
        self.conv = function("conv")
        self.scan_delta = function("scan_delta")
        self.scan_mamba1 = function("scan_mamba1")
        self.scan_mamba2 = function("scan_mamba2")
        self.scan_lightning = function("scan_lightning")
        self.gated_norm = function("gated_norm")
        self.absorb = function("absorb")
        self.expand = function("expand")
        self.write_latent = function("write_latent")
        self.threads()

    def threads(self) -> int:
        """Makes the functions use torch's number of threads when the calling thread calls them, or one that has not
        called them yet. Returns the number."""
        threads: int = self._pool(torch.get_num_threads())
        return threads

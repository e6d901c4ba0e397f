"""`sums.c`: what the ranks of one machine exchange through memory that they share."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

FLAG_BYTES = 128
"""Of a rank's `Flag` in sums.c."""
SLOT_BYTES = 1 << 18
"""Of a rank's slot, and so the most that one round exchanges: it stays in the cache of a core between the processes."""
Kind = Literal["copy", "float32", "bfloat16"]

_KINDS: dict[Kind, int] = {"copy": 0, "float32": 1, "bfloat16": 2}
_P, _L, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class _Ranks(ctypes.Structure):
    """`Ranks` of sums.c."""

    _fields_ = (
        *((name, _P) for name in ("flags", "slots")),
        *((name, _L) for name in ("rank", "size", "slot_bytes")),
        ("round", ctypes.c_uint32),
        ("sent_bytes", ctypes.c_int64),
    )


def memory_bytes(size: int) -> int:
    """Bytes that `size` ranks share, all zero at first."""
    return size * (FLAG_BYTES + 2 * SLOT_BYTES)


class SumFields(ctypes.Structure):
    """`Sum` of sums.h."""

    _fields_ = (("ranks", _P), ("gives_up", ctypes.CFUNCTYPE(_I)))


class Exchange:
    """This rank's side. All ranks call in the same order with tensors of one shape."""

    def __init__(self, library: ctypes.CDLL, address: int, *, rank: int, size: int) -> None:
        """library: of a level of the C kernels. address: of `memory_bytes(size)` bytes, aligned to 64."""
        self._call = library.pagewire_exchange
        self._call.argtypes, self._call.restype = (_P, _P, _P, _L, _L, _I, _I), _I
        self._ranks = _Ranks(address, address + size * FLAG_BYTES, rank, size, SLOT_BYTES, 0, 0)
        self._at = ctypes.addressof(self._ranks)
        self._leave, self._others_left, self._come_back = (
            library.pagewire_leave, library.pagewire_others_left, library.pagewire_come_back
        )  # fmt: skip
        for call in (self._leave, self._others_left, self._come_back):
            call.argtypes = (_P,)
        self._others_left.restype = _I
        self._all_to_all = library.pagewire_all_to_all
        self._all_to_all.argtypes, self._all_to_all.restype = (_P, _P, _P, _P, _P, _L), _I

    def round(self, x: int, out: int, num_bytes: int, stride: int, kind: Kind, *, is_begun: bool) -> bool:
        """`pagewire_exchange`: whether the round is done. If not, call again with `is_begun`."""
        return bool(self._call(self._at, x, out, num_bytes, stride, _KINDS[kind], is_begun))

    def all_to_all(self, fields: SumFields, x: int, sent: Sequence[int], out: int, most: int) -> list[int] | None:
        """`pagewire_all_to_all`: the bytes from each rank; None: `gives_up` of the fields said so."""
        counts, got = (_L * len(sent))(*sent), (_L * len(sent))()
        is_done = self._all_to_all(ctypes.addressof(fields), x, counts, out, got, most)
        return list(got) if is_done else None

    def leave(self) -> None:
        """Tells the other ranks that this one takes part in no further round."""
        self._leave(self._at)

    @property
    def others_left(self) -> bool:
        """Whether another rank takes part in no further round."""
        return bool(self._others_left(self._at))

    def come_back(self) -> None:
        """Begins again with round 0. All ranks have left, and none begins a round before all have come back."""
        self._come_back(self._at)

    @property
    def number(self) -> int:
        """Rounds that are done, modulo 2³²."""
        return int(self._ranks.round)

    @property
    def sent_bytes(self) -> int:
        """That the other ranks have read from this one, one after the other."""
        return int(self._ranks.sent_bytes)

    def in_c(self, gives_up: Callable[[], bool]) -> SumFields:
        """For the C program; valid as long as this object. gives_up: must not raise."""
        return SumFields(self._at, type(SumFields().gives_up)(gives_up))

"""Vectors in the formats of numbers that a client may ask for."""

import struct
import sys
from array import array
from collections.abc import Sequence

from .types import EmbedDtype, Endianness

_LARGEST_HALF = 65504.0


def floats(vector: bytes) -> list[float]:
    """The numbers of a `Chunk.vector`."""
    return array("f", vector).tolist()


def as_bytes(numbers: Sequence[float], dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """Numbers beyond a format's range become its largest."""
    order = sys.byteorder if endianness == "native" else endianness
    mark = "<" if order == "little" else ">"
    match dtype:
        case "float32":
            return struct.pack(f"{mark}{len(numbers)}f", *numbers)
        case "float16":
            bounded = [min(max(number, -_LARGEST_HALF), _LARGEST_HALF) for number in numbers]
            return struct.pack(f"{mark}{len(numbers)}e", *bounded)
        case "bfloat16":
            words = struct.unpack(f"<{len(numbers)}I", struct.pack(f"<{len(numbers)}f", *numbers))
            halves = [min(word + 0x7FFF + (word >> 16 & 1), 0xFFFFFFFF) >> 16 for word in words]  # to the nearest even
            return struct.pack(f"{mark}{len(numbers)}H", *halves)

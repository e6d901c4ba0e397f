"""Checks a safetensors file's header before the library maps the file.

The format (safetensors' README, "Format"): eight bytes with the header's length, the header, which is JSON, and the
tensors' bytes, each tensor one span of them, without overlaps or gaps. Nothing in the file is trusted; a
CheckpointError names the file and the tensor. Imports without torch.
"""

import json
import math
import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...config.model_files import opened
from ...errors import CheckpointError
from .files_digest import MAX_HEADER_BYTES

_MAX_DIMS = 8
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_Size = Annotated[int, Meta(ge=0, le=2**62)]


class _Tensor(Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR = msgspec.json.Decoder(_Tensor)
_METADATA = msgspec.json.Decoder(dict[str, str])


def check_header(path: Path) -> None:
    """Raises FileNotFoundError, and CheckpointError for a header that is damaged or does not fit the file."""
    with opened(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if file_size < 8 or length > file_size - 8:
            raise CheckpointError(f"{path} is damaged or cut short: its {file_size:,} bytes do not hold its header.")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} is damaged: its header has {length:,} bytes; {MAX_HEADER_BYTES:,} are allowed."
            )
        header = file.read(length)
    spans = sorted((*_read(path, name, raw), name) for name, raw in _entries(path, header))
    end = 0
    for first, last, name in spans:
        if first != end:
            what = "overlap those of another tensor" if first < end else f"leave a gap of {first - end:,} before them"
            raise CheckpointError(f"{path} is damaged: the bytes of {name} {what}.")
        end = last
    if (held := file_size - 8 - length) != end:
        raise CheckpointError(
            f"{path} is damaged or cut short: it holds {held:,} bytes of tensors, and its header names {end:,}."
        )


def _entries(path: Path, header: bytes) -> list[tuple[str, msgspec.Raw]]:
    """Name and description of each tensor."""
    try:
        entries = _HEADER.decode(header)
        if (metadata := entries.pop("__metadata__", None)) is not None:
            _METADATA.decode(metadata)
        # msgspec keeps the last of equal names. The header is known to be flat now, so json can list all names.
        names = json.loads(header, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header is no valid JSON: {error}.") from None
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(f"{path} is damaged: its header names {name} twice.")
        seen.add(name)
    return list(entries.items())


def _read(path: Path, name: str, raw: msgspec.Raw) -> tuple[int, int]:
    """The span of a tensor's bytes."""
    try:
        tensor = _TENSOR.decode(raw)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is damaged: its header describes {name} wrongly: {error}.") from None
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        raise CheckpointError(f"{path} has {name} in {tensor.dtype}, a type that pagewire does not read.")
    if len(tensor.shape) > _MAX_DIMS:
        raise CheckpointError(f"{path} is damaged: {name} has {len(tensor.shape)} dimensions.")
    first, last = tensor.data_offsets
    wanted = math.prod(tensor.shape) * bits // 8
    if last - first != wanted:
        raise CheckpointError(
            f"{path} is damaged: {name} is {tensor.dtype} {tensor.shape}, which takes {wanted:,} bytes, but has "
            f"{last - first:,}."
        )
    return first, last

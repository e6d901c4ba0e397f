"""Reads tensors from a checkpoint folder: model.safetensors, or the shards that model.safetensors.index.json names.
`open.py` chooses the reader.

No pickle formats: they can run code. A damaged, truncated or missing file raises a CheckpointError that names
it. Knows nothing of models; called by `loader.py`.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self, cast

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...config.model_files import read_json
from ...errors import CheckpointError, ConfigError
from ..checkpoint.header import check_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: slice | tuple[slice, slice]) -> Tensor: ...


class File(Protocol):
    """The part of safetensors' reader that is used here; the library has no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class CheckpointReader:
    """The tensors of one checkpoint by name. A context manager; tensors are read on demand and not kept."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, File] = {}
        for file, names in _files(folder).items():
            opened = self._open_file(file)
            present = opened.keys()
            absent = sorted((names or set()) - set(present))
            if absent:
                raise CheckpointError(f"{file} lacks {absent[0]}, which {_INDEX} says it holds.")
            # With an index, tensors that it does not name are not part of the checkpoint.
            self._file_of.update(dict.fromkeys(present if names is None else names, file))
        self._expert_of: dict[str, tuple[str, int]] = {}  # name → its tensor of all experts, and the expert
        self._divide_experts()

    def _divide_experts(self) -> None:
        """Gives MXFP4 weights of all experts, `experts.NAME_blocks` [experts, n, k / 32, 16] and `_scales` [experts, n,
        k / 32] of gpt-oss, the names and shapes that compressed-tensors has for each: `experts.E.NAME.weight_packed`
        [n, k / 2] and `.weight_scale` [n, k / 32]."""
        for blocks in [name for name in self._file_of if name.endswith("_blocks")]:
            module, scales = blocks.removesuffix("_blocks"), blocks.removesuffix("_blocks") + "_scales"
            shape = self.shape(blocks)
            if scales not in self._file_of or len(shape) != 4 or self.shape(scales) != shape[:3]:
                continue
            parent, _, leaf = module.rpartition(".")
            for stack, suffix in ((blocks, "weight_packed"), (scales, "weight_scale")):
                file = self._file_of.pop(stack)
                for expert in range(shape[0]):
                    name = f"{parent}.{expert}.{leaf}.{suffix}"
                    self._file_of[name], self._expert_of[name] = file, (stack, expert)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; no tensor can be read afterwards."""
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """All tensors of the checkpoint, file by file."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the file's header; reads no data."""
        stack, _ = self._expert_of.get(name, (name, 0))
        shape = tuple(self._open[self._file_of[name]].get_slice(stack).get_shape())
        return shape if stack == name else (shape[1], math.prod(shape[2:]))

    def dtype(self, name: str) -> str:
        """The safetensors name of the type, such as BF16 or F8_E4M3; from the file's header."""
        stack, _ = self._expert_of.get(name, (name, 0))
        return self._open[self._file_of[name]].get_slice(stack).get_dtype()

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape(name)) * _BYTES.get(self.dtype(name), 1)

    def tensor(self, name: str, part: slice | tuple[slice, slice] | None = None) -> Tensor:
        """The tensor on the CPU, in the file's dtype; with `part` only that is read. Raises CheckpointError."""
        try:
            file = self._open[self._file_of[name]]
            if name in self._expert_of:
                stack, expert = self._expert_of[name]
                whole = file.get_slice(stack)[expert : expert + 1].reshape(self.shape(name))
                return whole if part is None else whole[part]
            return file.get_tensor(name) if part is None else file.get_slice(name)[part]
        except (SafetensorError, OSError, RuntimeError) as e:
            raise CheckpointError(f"{name} cannot be read from {self._file_of[name]}: {e}.") from None

    def _open_file(self, file: Path) -> File:
        try:
            check_header(file)
            opened = cast(File, self._stack.enter_context(safe_open(file, framework="pt", device="cpu")))
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, although {_INDEX} names it.") from None
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{file} is damaged or cut short: {str(e).rstrip('.')}.") from None
        self._open[file] = opened
        return opened


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of the checkpoint, each with the tensors that the index names in it (None: no index)."""
    index = folder / _INDEX
    weight_map = _read_index(index)
    if weight_map is not None:
        files: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index} names {file!r}, which is not a safetensors file in its folder.")
            held = files.setdefault(folder / file, set())
            assert held is not None
            held.add(name)
        return files
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: None}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(f"{folder} holds its weights as pickle files only; convert them to safetensors.")
    raise CheckpointError(f"{folder} has no {_SINGLE} and no {_INDEX}.")


def _read_index(index: Path) -> dict[str, str] | None:
    """Tensor → file; None if there is no index."""
    try:
        return read_json(index, _Index).weight_map
    except FileNotFoundError:
        return None
    except ConfigError as e:
        raise CheckpointError(str(e)) from None

"""A checkpoint whose weights are changed by a LoRA adapter: W + scale · B·A, computed as the tensors are read.

The description is not touched, so every family, executor, rank and quantization at load has adapters. The files are
those of Hugging Face's PEFT: adapter_config.json, and adapter_model.safetensors with `MODULE.lora_A.weight` [r, k] and
`MODULE.lora_B.weight` [n, r] for the tensor `MODULE.weight` [n, k] of the checkpoint, and whole tensors of the modules
that were trained.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...config.model_files import read_json
from ...errors import CheckpointError, ConfigError
from ..checkpoint.header import check_header
from ..checkpoint.source import ADAPTER_CONFIG
from .reader import CheckpointReader, File

_WEIGHTS = "adapter_model.safetensors"
_ROOT = "base_model.model."
_WRAPPERS = ("", "model.", "language_model.", "model.language_model.")
_SIDES = (".lora_A.weight", ".lora_B.weight")
_FLOATS = ("F32", "F16", "BF16")


class _Config(msgspec.Struct, frozen=True):
    """adapter_config.json, as far as it changes what is computed."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def scale(self, module: str, rank: int) -> float:
        alpha = _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class _Change:
    """Of one tensor."""

    a: str  # tensors of the adapter
    b: str
    scale: float


class AdaptedReader(CheckpointReader):
    """The tensors of a checkpoint with an adapter. Raises CheckpointError and ConfigError for an adapter that does not
    fit it."""

    def __init__(self, folder: Path, adapter: Path) -> None:
        super().__init__(folder)
        try:
            self._config = _read_config(adapter)
            self._path = adapter / _WEIGHTS
            self._adapter = self._open_adapter()
            self._changes: dict[str, _Change] = {}
            self._replaced: dict[str, str] = {}
            for key in self._adapter.keys():  # noqa: SIM118 - safetensors' reader is no mapping
                self._take(key)
        except BaseException:
            self.close()
            raise

    def tensor(self, name: str, part: slice | tuple[slice, slice] | None = None) -> Tensor:
        base = super().tensor(name, part)
        if name in self._replaced:
            own = self._read(self._replaced[name], part)
            return own.to(base.dtype)
        if name not in self._changes:
            return base
        change = self._changes[name]
        rows, columns = part if isinstance(part, tuple) else (part or slice(None), slice(None))
        if self._config.fan_in_fan_out:
            rows, columns = columns, rows
        delta = self._read(change.b, rows).float() @ self._read(change.a, (slice(None), columns)).float()
        if self._config.fan_in_fan_out:
            delta = delta.t()
        return (base.float() + change.scale * delta).to(base.dtype)

    def _take(self, key: str) -> None:
        name = key.removeprefix(_ROOT)
        side = next((side for side in _SIDES if name.endswith(side)), None)
        if side is None:
            if ".lora_" in name or not name.endswith((".weight", ".bias")):
                raise ConfigError(f"{self._path} has {key}; pagewire reads LoRA's A and B of linear layers.")
            self._replaced[self._target(key, name, self._adapter.get_slice(key).get_shape())] = key
            return
        a, b = _SIDES
        other = key.removesuffix(side) + (b if side == a else a)
        if other not in self._adapter.keys():  # noqa: SIM118
            raise CheckpointError(f"{self._path} has {key}, but not {other}.")
        if side == b:
            return
        module = name.removesuffix(side)
        (rank, columns), (rows, rank_b) = (self._shape(each) for each in (key, other))
        if rank != rank_b or rank < 1:
            raise CheckpointError(f"{self._path}: {key} has the rank {rank}, and {other} {rank_b}.")
        shape = [columns, rows] if self._config.fan_in_fan_out else [rows, columns]
        scale = self._config.scale(module, rank)
        self._changes[self._target(key, module + ".weight", shape)] = _Change(key, other, scale)

    def _target(self, key: str, name: str, shape: list[int]) -> str:
        """The tensor of the checkpoint that `key` changes."""
        known = [name, *(wrapper + name for wrapper in _WRAPPERS)]
        known += [name.removeprefix(wrapper) for wrapper in _WRAPPERS if wrapper]
        found = next((each for each in known if each in self), None)
        if found is None:
            raise CheckpointError(f"{self._path} changes {name}, which the base model's checkpoint lacks.")
        if self.dtype(found) not in _FLOATS:
            raise ConfigError(f"{self._path} changes {found}, which is quantized; use an unquantized base model.")
        if list(self.shape(found)) != shape:
            raise CheckpointError(f"{self._path}: {key} changes {shape}, but {found} is {list(self.shape(found))}.")
        return found

    def _shape(self, key: str) -> tuple[int, int]:
        shape = self._adapter.get_slice(key).get_shape()
        if len(shape) != 2:
            raise ConfigError(
                f"{self._path}: {key} has {len(shape)} dimensions; pagewire reads those of linear layers."
            )
        return shape[0], shape[1]

    def _read(self, key: str, part: slice | tuple[slice, slice] | None) -> Tensor:
        try:
            return self._adapter.get_tensor(key) if part is None else self._adapter.get_slice(key)[part]
        except (SafetensorError, OSError, RuntimeError) as e:
            raise CheckpointError(f"{key} cannot be read from {self._path}: {e}.") from None

    def _open_adapter(self) -> File:
        try:
            check_header(self._path)
            return cast(File, self._stack.enter_context(safe_open(self._path, framework="pt", device="cpu")))
        except FileNotFoundError:
            raise CheckpointError(f"{self._path} is missing; save the adapter as safetensors.") from None
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{self._path} is damaged or cut short: {str(e).rstrip('.')}.") from None


def _read_config(adapter: Path) -> _Config:
    path = adapter / ADAPTER_CONFIG
    try:
        config = read_json(path, _Config)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing.") from None
    if config.peft_type != "LORA":
        raise ConfigError(f"{path} has the peft_type {config.peft_type}; pagewire serves LORA.")
    if config.use_dora or config.bias != "none":
        wanted = "use_dora" if config.use_dora else f"bias = {config.bias}"
        raise ConfigError(f"{path} has {wanted}; merge the adapter into the model with PEFT's merge_and_unload.")
    return config


def _matching(pattern: dict[str, float], module: str, default: float) -> float:
    """The value of the first entry that names the module: by its whole name, or its last parts. PEFT takes entries as
    regular expressions, which could take for ever; those that are more than names are refused."""
    for key, value in pattern.items():
        name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not name.replace(".", "").replace("_", "").isalnum():
            raise ConfigError(f"{ADAPTER_CONFIG} has the pattern {key}; pagewire reads the names of modules.")
        if module == name or module.endswith("." + name):
            return value
    return default

"""Lists of tensors in files, for tests with processes of their own."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def save_tensors(tensors: Sequence[Tensor], file: Path) -> None:
    save_file({str(i): tensor.contiguous().clone() for i, tensor in enumerate(tensors)}, file)


def load_tensors(file: Path) -> list[Tensor]:
    found = load_file(file)
    return [found[str(i)] for i in range(len(found))]

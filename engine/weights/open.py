"""Opens the tensors of a model: a folder of safetensors, with an adapter or without, or a GGUF file."""

from pathlib import Path

from ..checkpoint.gguf import is_gguf
from .adapter import AdaptedReader
from .gguf import GgufReader
from .reader import CheckpointReader

Reader = CheckpointReader | GgufReader


def open_checkpoint(path: Path, adapter: str = "") -> Reader:
    """A context manager. adapter: the folder of a LoRA adapter; not of a GGUF file. Raises CheckpointError, and
    ConfigError for an adapter that does not fit the model."""
    if is_gguf(path):
        return GgufReader(path)
    return AdaptedReader(path, Path(adapter)) if adapter else CheckpointReader(path)

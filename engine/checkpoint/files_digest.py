"""Tells whether two machines serve a model from equal files, in milliseconds and without reading all weights.

`spec.fingerprint` serves for what one machine keeps, and depends on times of modification, which copies do not share.
"""

import os
from hashlib import sha256
from pathlib import Path

from ...config.model_files import open_file, read_file
from ...errors import ConfigError
from .gguf import is_gguf, read_gguf
from .purpose import MODULES, SENTENCE_CONFIG, SENTENCE_LENGTH, part_configs
from .source import ADAPTER_CONFIG

VOCABULARIES = ("*.model", "vocab.json", "vocab.txt")
"""One of these makes a tokenizer where there is no tokenizer.json; transformers reads it, and what is beside it."""
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_CONFIGS = (
    "config.json", "generation_config.json", MODULES, SENTENCE_CONFIG, SENTENCE_LENGTH,
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    *VOCABULARIES, "merges.txt", "tiktoken*",
    "chat_template.json", "chat_template.jinja", MORE_TEMPLATES,
)  # fmt: skip
"""Patterns of the files beside the weights that change prompts or answers; parts of modules.json have one more each."""
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_NUM_SAMPLES = 64  # of all weights, evenly spaced: a fine-tune changes more than what lies between two of them
_SAMPLE_BYTES = 64


def weight_files(folder: Path, adapter: Path | None = None) -> list[tuple[Path, int]]:
    """The files of a checkpoint's weights and of its adapter's, each with the bytes of its header; 0: the file says
    them itself, as safetensors. Raises CheckpointError."""
    if is_gguf(folder):
        gguf = read_gguf(folder, has_vocabulary=False)
        files = [*zip(gguf.parts, gguf.header_bytes, strict=True)]
    else:
        files = [(path, 0) for path in sorted(folder.glob("*.safetensors"))]
    return files + ([] if adapter is None else [(path, 0) for path in sorted(adapter.glob("*.safetensors"))])


def files_digest(folder: Path, adapter: Path | None = None) -> str:
    """A hex SHA-256 over the configs, tokenizer and chat templates, and the size, header and samples of each file of
    weights; and the same of an adapter. Raises ConfigError for files that cannot be read."""
    digest = sha256()
    configs: list[tuple[str, Path]] = []
    if not is_gguf(folder):
        found = {path for pattern in _CONFIGS for path in folder.glob(pattern)} | {*part_configs(folder)}
        configs = [(os.path.relpath(path, folder), path) for path in sorted(found) if path.is_file()]
    if adapter is not None and (config := adapter / ADAPTER_CONFIG).exists():
        configs.append((config.name, config))
    try:
        for name, path in configs:
            data = read_file(path)
            digest.update(f"{name} {len(data)} ".encode() + data)
        files = weight_files(folder, adapter)
        sizes = [path.stat().st_size for path, _ in files]
        start, total = 0, sum(sizes)
        places = [total * (2 * i + 1) // (2 * _NUM_SAMPLES) for i in range(_NUM_SAMPLES)]
        for (path, header_bytes), size in zip(files, sizes, strict=True):
            with open(open_file(path), "rb") as file:
                length = header_bytes or int.from_bytes(file.read(8), "little")
                digest.update(f"{size} ".encode() + file.read(min(length, MAX_HEADER_BYTES)))
                for place in places:
                    if start <= place < start + size:
                        digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, place - start))
            start += size
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()

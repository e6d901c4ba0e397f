"""pagewire itself: `pagewire serve`, as anyone would start it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from .base import Load
from .openai_server import MODEL, Server


class Pagewire:
    """From this checkout, in this interpreter. `flags` are appended to its command line."""

    def __init__(self, flags: Sequence[str] = (), name: str = "pagewire") -> None:
        self.name = name
        self._flags = flags

    def missing(self) -> str:
        return ""

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> Server:
        return Server(lambda port: self.command(load, port), load.log)

    def command(self, load: Load, port: int) -> list[str]:
        """The command line."""
        return [
            *(sys.executable, "-m", "pagewire", "serve", str(load.folder)),
            *("--port", str(port), "--served-model-name", MODEL, "--device", "cpu"),
            *("--max-model-len", str(load.max_len), "--kv-cache-memory", str(load.kv_bytes)),
            *self._flags,
        ]

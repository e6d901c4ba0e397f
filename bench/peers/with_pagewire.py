"""pagewire itself: `pagewire serve`."""

from collections.abc import Sequence
from pathlib import Path

from ...tools.servers import PAGEWIRE
from .base import Load
from .openai_server import MODEL, OpenAiServer


class Pagewire:
    """This checkout, in this interpreter. `flags` are appended to its command line."""

    def __init__(self, flags: Sequence[str] = (), name: str = "pagewire") -> None:
        self.name = name
        self._flags = flags

    def missing(self) -> str:
        return ""

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> OpenAiServer:
        return OpenAiServer(self.command(load), load.log)

    def command(self, load: Load) -> list[str]:
        """The command line, to which a port is added."""
        return [
            *PAGEWIRE,
            "serve",
            str(load.folder),
            "--served-model-name",
            MODEL,
            "--device",
            "cpu",
            "--max-model-len",
            str(load.max_len),
            "--kv-cache-memory",
            str(load.kv_bytes),
            *self._flags,
        ]

"""pagewire itself: `pagewire serve`."""

from collections.abc import Sequence
from pathlib import Path

from ...tools.servers import PAGEWIRE
from .base import Load
from .gguf_file import GgufFile
from .openai_server import MODEL, OpenAiServer


class Pagewire:
    """This checkout, in this interpreter. `flags` are appended to its command line. file: serves the checkpoint as this
    GGUF file. device: cpu, or cuda, where `flags` say how much memory it takes."""

    def __init__(
        self, flags: Sequence[str] = (), name: str = "pagewire", file: GgufFile | None = None, device: str = "cpu"
    ) -> None:
        self.name = name
        self._device = device
        self._flags = flags
        self._file = file

    def missing(self) -> str:
        return "" if self._file is None else self._file.missing()

    def convert(self, folder: Path) -> Path:
        return folder if self._file is None else self._file.convert(folder)

    def start(self, load: Load) -> OpenAiServer:
        return OpenAiServer(self.command(load), load.log)

    def command(self, load: Load) -> list[str]:
        """The command line, to which a port is added."""
        return [
            *PAGEWIRE,
            "serve",
            str(load.converted),
            "--served-model-name",
            MODEL,
            "--device",
            self._device,
            "--max-model-len",
            str(load.max_len),
            *(["--kv-cache-memory", str(load.kv_bytes)] if self._device == "cpu" else []),
            *self._flags,
        ]

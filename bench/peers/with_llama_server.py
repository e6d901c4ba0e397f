"""llama.cpp's own server, on the checkpoint as a GGUF file in bfloat16. Written from its documentation; not yet run
here.

`--at llama-server=PROGRAM` when it is not on the path.
"""

import shutil
import sys
from pathlib import Path

from .base import Load
from .gguf_file import convert_to_gguf
from .in_child import has_modules
from .openai_server import MODEL, OpenAiServer


class LlamaServer:
    """The program `program`."""

    name = "llama-server"

    def __init__(self, program: str) -> None:
        self._program = program

    def missing(self) -> str:
        wanted = []
        if shutil.which(self._program) is None:
            wanted.append("get llama-server from https://github.com/ggml-org/llama.cpp/releases")
        if not has_modules(sys.executable, "gguf"):
            wanted.append("pip install gguf")
        return " and ".join(wanted)

    def convert(self, folder: Path) -> Path:
        return convert_to_gguf(folder)

    def start(self, load: Load) -> OpenAiServer:
        return OpenAiServer(self.command(load), load.log)

    def command(self, load: Load) -> list[str]:
        """The command line, to which a port is added."""
        context = load.num_streams * load.max_len  # it is divided by the number of slots
        return [
            self._program,
            "--model",
            str(load.converted),
            "--alias",
            MODEL,
            "--host",
            "127.0.0.1",
            "--ctx-size",
            str(context),
            "--parallel",
            str(load.num_streams),
        ]

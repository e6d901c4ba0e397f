"""llama.cpp's own server, on the checkpoint as a GGUF file. `--at llama-server=PROGRAM` if it is not on the path."""

import os
import shutil
from pathlib import Path

from .base import Load
from .gguf_file import GgufFile
from .openai_server import MODEL, OpenAiServer


class LlamaServer:
    """The program `program`."""

    def __init__(self, program: str, file: GgufFile, name: str = "llama-server") -> None:
        self.name = name
        self._program = program
        self._file = file

    def missing(self) -> str:
        if shutil.which(self._program) is None:
            return "get llama-server from https://github.com/ggml-org/llama.cpp/releases"
        return self._file.missing()

    def convert(self, folder: Path) -> Path:
        return self._file.convert(folder)

    def start(self, load: Load) -> OpenAiServer:
        return OpenAiServer(self.command(load), load.log)

    def command(self, load: Load) -> list[str]:
        """The command line, to which a port is added."""
        context = load.num_streams * load.max_len  # it is divided by the number of slots
        threads = str(len(os.sched_getaffinity(0)))  # by default it counts two threads of a core as one
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
            "--threads",
            threads,
            "--threads-batch",
            threads,
        ]

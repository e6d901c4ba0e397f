"""llama-cpp-python: llama.cpp from Python, on the checkpoint as a GGUF file in bfloat16. Written from its
documentation; not yet run here.

Its server accepts only text. Server and API run one request at a time; this module uses the API, so each stream waits
for those before it.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from .base import Load
from .child import Settings, serve
from .gguf_file import GgufFile
from .in_child import InChild, has_modules


class LlamaCppPython:
    """In the environment of `python`; the file is written with `gguf` in ours."""

    name = "llama-cpp-python"

    def __init__(self, python: str) -> None:
        self._python = python

    def missing(self) -> str:
        found = has_modules(self._python, "llama_cpp")
        return GgufFile().missing() if found else "pip install llama-cpp-python"

    def convert(self, folder: Path) -> Path:
        return GgufFile().convert(folder)

    def start(self, load: Load) -> InChild:
        return InChild(self._python, "with_llama_cpp_python", load)


class _Engine:
    def __init__(self, settings: Settings) -> None:
        import llama_cpp

        self._model = llama_cpp.Llama(model_path=str(settings.path), n_ctx=settings.max_len, verbose=False)

    def run(self, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        times = []
        for prompt, num_tokens in requests:
            tokens = self._model.generate(prompt, top_k=1, temp=0.0)  # without an end
            times.append([time.perf_counter() for _, _ in zip(range(num_tokens), tokens, strict=False)])
        return times


def child(arguments: Sequence[str]) -> None:
    serve(_Engine, arguments)

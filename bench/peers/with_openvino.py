"""OpenVINO GenAI: its continuous batching pipeline, through the Python API.

`optimum-cli` exports the checkpoint once for each precision of weights. OpenVINO chooses the precision of the
computation (bfloat16 where the CPU has it) and of the KV cache, often 8 bits for the latter.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from .base import CONVERT_TIMEOUT_S, Load, PeerError
from .child import Settings, serve
from .in_child import InChild, has_modules


class OpenVino:
    """weights: fp16, int8 or int4. exporter: the interpreter with optimum-intel."""

    def __init__(self, python: str, weights: str, *, exporter: str) -> None:
        self.name = "openvino" if weights == "fp16" else f"openvino-{weights}"
        self._weights = weights
        self._python, self._exporter = python, exporter

    def missing(self) -> str:
        if not has_modules(self._python, "openvino_genai", "openvino_tokenizers"):
            return "pip install openvino-genai openvino-tokenizers"
        return "" if has_modules(self._exporter, "optimum.intel") else "pip install 'optimum-intel[openvino]' nncf"

    def convert(self, folder: Path) -> Path:
        target = folder / self.name
        if not target.exists():
            unfinished = folder / f"{self.name}.unfinished"
            # The module of the command `optimum-cli`, which may not be on the path.
            export = [self._exporter, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
            export += ["--model", str(folder), "--task", "text-generation-with-past"]
            export += ["--weight-format", self._weights]
            if self._weights == "int4":  # of all layers; optimum leaves embedding and head at 8 bits
                hidden_size = json.loads((folder / "config.json").read_text())["hidden_size"]
                export += ["--group-size", "32" if hidden_size % 128 else "128", "--ratio", "1.0"]
            try:
                done = subprocess.run(
                    [*export, str(unfinished)], check=False, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S
                )
            except subprocess.TimeoutExpired:
                raise PeerError(f"the export took more than {CONVERT_TIMEOUT_S:g} s") from None
            if done.returncode:
                raise PeerError(f"the export failed: {done.stderr.strip()[-1000:]}")
            unfinished.rename(target)
        return target

    def start(self, load: Load) -> InChild:
        return InChild(self._python, "with_openvino", load)


class _Engine:
    def __init__(self, settings: Settings) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, settings.kv_bytes >> 30)  # GiB
        scheduler.max_num_seqs = settings.num_streams
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(settings.path), scheduler, "CPU")
        self._num_sent = 0

    def run(self, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        handles = []
        for prompt, num_tokens in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = num_tokens
            config.ignore_eos = True
            config.do_sample = False
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(self._num_sent, ids, config))
            self._num_sent += 1
        times: list[list[float]] = [[] for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for stream, handle in zip(times, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        stream += [now] * len(output.generated_ids)
        return times


def child(arguments: Sequence[str]) -> None:
    serve(_Engine, arguments)

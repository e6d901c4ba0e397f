"""The parts of the verification, the most valuable first: whether kernels are right, then whether they give the same
bits each time, then where the time of one row goes. Each is a separate process, so that a part
which breaks the device's context, hangs or runs out of memory does not affect the others:
`python -m pagewire.bench.gpu.parts NAME`.
"""

import argparse
import importlib
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .figures import Figure, SkippedError
from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part. `function` takes a `Setting` and yields figures."""

    name: str
    title: str
    module: str  # of this package
    seconds: float  # a generous estimate for an H200; with less time left the part is skipped
    function: str = "measure"
    model: str = ""
    needs: tuple[str, ...] = ()  # modules beyond torch, Triton, numpy and msgspec
    interprets: bool = True  # whether a smoke run needs Triton's interpreter


_TEXT = ("safetensors", "tokenizers", "jinja2", "huggingface_hub")
_HTTP = (*_TEXT, "zmq", "uvloop", "starlette", "httptools", "uvicorn", "prometheus_client", "setproctitle", "psutil")

PARTS = (
    Part(name="sanitizer", title="Kernels under compute-sanitizer", module="sanitize", seconds=100),
    Part(name="determinism", title="The same bits each time", module="determinism", seconds=30),
    Part(name="nodes-0.6b", title="One row of Qwen3-0.6B, kernel by kernel", module="steps", function="nodes",
         model="qwen3-0.6b", seconds=25, needs=_TEXT),
    Part(name="nodes-8b", title="One row of Llama-3.1-8B, kernel by kernel", module="steps", function="nodes",
         model="llama-3.1-8b", seconds=30, needs=_TEXT),
    Part(name="exactness", title="The worker against transformers", module="exactness", seconds=40,
         needs=("transformers", "safetensors")),
    Part(name="stages", title="Two stages against one rank", module="stages", seconds=60,
         needs=("transformers", "safetensors")),
    Part(name="domains", title="Two KV domains against one rank", module="domains", seconds=90,
         needs=("transformers", "safetensors")),
    Part(name="attention", title="Attention", module="attention", seconds=40),
    Part(name="steps-0.6b", title="Steps of Qwen3-0.6B", module="steps", model="qwen3-0.6b", seconds=30, needs=_TEXT),
    Part(name="steps-8b", title="Steps of Llama-3.1-8B", module="steps", model="llama-3.1-8b", seconds=45, needs=_TEXT),
    Part(name="tests", title="Tests of kernels and step", module="kernel_tests", seconds=120,
         needs=("pytest", "hypothesis", "transformers", *_HTTP), interprets=False),
    Part(name="products", title="Products", module="products", seconds=40),
    Part(name="offline-0.6b", title="Qwen3-0.6B without HTTP", module="throughput", model="qwen3-0.6b", seconds=45,
         needs=_TEXT, interprets=False),
    Part(name="offline-8b", title="Llama-3.1-8B without HTTP", module="throughput", model="llama-3.1-8b", seconds=75,
         needs=_TEXT, interprets=False),
    Part(name="http-8b", title="Llama-3.1-8B over HTTP", module="serving", model="llama-3.1-8b", seconds=90,
         needs=_HTTP, interprets=False),
    Part(name="deterministic", title="--deterministic", module="steps", function="probe", model="qwen3-0.6b",
         seconds=30, needs=_TEXT),
    Part(name="steps-30b", title="Steps of Qwen3-30B-A3B", module="steps", model="qwen3-30b-a3b", seconds=60,
         needs=_TEXT),
    Part(name="offline-30b", title="Qwen3-30B-A3B without HTTP", module="throughput", model="qwen3-30b-a3b",
         seconds=75, needs=_TEXT, interprets=False),
    Part(name="start-8b", title="The start of Llama-3.1-8B", module="serving", function="start", model="llama-3.1-8b",
         seconds=150, needs=(*_HTTP, "transformers"), interprets=False),
)  # fmt: skip


def lines(part: Part, setting: Setting) -> Iterator[dict[str, object]]:
    """The lines that a part writes: {"figure": …} for each figure, and {"skipped": reason} if it cannot run here."""
    from ...errors import ConfigError

    measure: Callable[[Setting], Iterator[Figure]]
    try:
        measure = getattr(importlib.import_module(f".{part.module}", __package__), part.function)
        for figure in measure(setting):
            yield {"figure": asdict(figure)}
    except (SkippedError, ConfigError) as error:
        yield {"skipped": str(error)}


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("name", choices=[part.name for part in PARTS])
    flags.add_argument("--lines", type=Path, required=True, help="file for its results")
    flags.add_argument("--scratch", type=Path, required=True, help="folder for temporary files")
    flags.add_argument("--smoke", action="store_true")
    given = flags.parse_args(argv)
    part = next(part for part in PARTS if part.name == given.name)
    if given.smoke and part.interprets:
        import numpy as np

        from ...tools.triton_interpreter import interpret

        interpret()
        np.seterr(all="ignore")  # warnings about masked lanes
    signal.signal(signal.SIGTERM, _end)  # otherwise a server of this part would not be ended
    with given.lines.open("w") as output:
        for line in lines(part, Setting(smoke=given.smoke, scratch=given.scratch, model=part.model)):
            print(json.dumps(line), file=output, flush=True)  # at once, so that results are kept if the part dies


if __name__ == "__main__":
    main()

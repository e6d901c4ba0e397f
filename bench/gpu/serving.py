"""A server over HTTP: its rate as a share of the rate without HTTP, the time to first token, and the start-up time."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...config.flags import convert
from ...engine.runner.runner import Runner
from ...procs.prepare import prepare
from ...tools.make_checkpoint import make_checkpoint
from ...tools.servers import PAGEWIRE
from ..peers.openai_server import MODEL, OpenAiServer
from .figures import Figure, SkippedError
from .setting import Setting
from .throughput import offline_rate, requests

_LEAST_SHARE = 85  # % of the rate without HTTP
_MAX_TTFT_MS = 25
_MAX_READY_S, _MAX_WEIGHTS_S = 10, 3
_OUTAGE_S = 120  # that a request may wait for another worker
_ROOM = 20 << 30  # bytes that a checkpoint of 8 billion bfloat16 weights needs


@contextmanager
def serving(setting: Setting, folder: Path, *flags: str) -> Iterator[OpenAiServer]:
    """A server of this checkout; it may not be ready yet."""
    device = setting.choose("cuda", "cpu")
    command = [*PAGEWIRE, "serve", str(folder), "--served-model-name", MODEL]
    command += ["--device", device, "--dtype", "bfloat16", "--no-enable-prefix-caching", *flags]
    server = OpenAiServer(command, setting.scratch / "server.log")
    try:
        yield server
    finally:
        server.stop()


def measure(setting: Setting) -> Iterator[Figure]:
    """Ends the server before it starts the engine without HTTP, because each uses most of the device's memory."""
    streams, num_in, num_out = setting.choose((128, 512, 256), (4, 8, 16))
    max_len = setting.choose(2048, 64)
    batch = requests(setting, streams, (num_in, num_in), (num_out, num_out))
    prompts = requests(setting, 12, (setting.choose(1024, 40),) * 2, (1, 1))
    flags = ["--load-format", "dummy", "--max-model-len", str(max_len), "--max-num-seqs", str(streams)]
    flags += ["--max-num-batched-tokens", str(setting.choose(8192, 64))]
    with serving(setting, setting.model_folder(), *flags) as server:
        server.wait_ready()
        server.run(batch)  # warms up, as without HTTP
        found = server.run(batch)
        first_ms = []
        for prompt in prompts:
            [stream] = server.run([prompt])
            first_ms.append((stream.times[0] - stream.sent) * 1e3)
    seconds = max(stream.times[-1] for stream in found) - min(stream.sent for stream in found)
    rate = sum(stream.num_tokens for stream in found) / seconds
    name = f"{streams} streams of {num_in} in, {num_out} out"
    yield Figure(name=f"{name}, over HTTP", value=rate, unit="output tokens/s")
    # The first few warm up: a shape is recorded after three runs.
    ttft = statistics.median(first_ms[4:])
    name_of_prompt = f"first token of a prompt of {len(prompts[0].prompt)}, over HTTP"
    yield Figure(name=name_of_prompt, value=ttft, unit="ms", most=_MAX_TTFT_MS)
    offline = offline_rate(setting, batch, max_len=max_len, max_seqs=streams)
    yield Figure(name=f"{name}, without HTTP", value=offline, unit="output tokens/s")
    yield Figure(name=f"{name}, over HTTP, of that without", value=100 * rate / offline, unit="%", least=_LEAST_SHARE)


def start(setting: Setting) -> Iterator[Figure]:
    """Measures, with weights in files, the time from the command to the first answer, and of reading the files."""
    with tempfile.TemporaryDirectory(dir=_roomy(setting), prefix="pagewire-") as scratch:
        folder = Path(scratch)
        make_checkpoint(folder, setting.choose(setting.model, "qwen3-tiny"), weights=True)
        length = str(setting.choose(8192, 64))
        for title in ("first", "second"):  # the first one compiles the kernels that were not shipped
            started = time.perf_counter()
            with serving(setting, folder, "--max-model-len", length, "--outage-wait", str(_OUTAGE_S)) as server:
                server.wait_ready()
                taken = time.perf_counter() - started
                recoveries = list(_recoveries(setting, server)) if title == "second" else []
            most = _MAX_READY_S if title == "second" else None
            yield Figure(name=f"ready, {title} start", value=taken, unit="s", most=most)
            yield from recoveries
        flags = {**setting.flags(), "model": str(folder), "load_format": "auto", "max_model_len": int(length)}
        runner = Runner.load(prepare(convert(flags)))
        yield Figure(
            name="reading weights, a second time", value=runner.timings["weights"], unit="s", most=_MAX_WEIGHTS_S
        )


def _recoveries(setting: Setting, server: OpenAiServer) -> Iterator[Figure]:
    """The time from SIGKILL of the worker until the first token of a request that waits: with the weights that it left
    behind, and on a GPU without them, because their keeper was killed before."""
    batch = requests(setting, 1, (8, 8), (1, 1))
    server.run(batch)
    for title in ("maps", "reads"):
        if title == "reads":
            if not (keepers := server.of_kind("weight keeper")):
                return
            keepers[0].kill()
            keepers[0].wait()
        (worker,) = server.of_kind("worker")
        killed = time.perf_counter()
        worker.kill()
        worker.wait()
        [stream] = server.run(batch)
        name = f"first token after SIGKILL of the worker, the next one {title} the weights"
        yield Figure(name=name, value=stream.times[0] - killed, unit="s")


def _roomy(setting: Setting) -> Path:
    """A folder with enough space for the checkpoint, preferably in memory."""
    for place in (Path("/dev/shm"), setting.scratch):
        if place.is_dir() and os.access(place, os.W_OK) and shutil.disk_usage(place).free >= setting.choose(_ROOM, 0):
            return place
    raise SkippedError(
        f"a checkpoint of 8 billion weights needs {_ROOM >> 30} GiB in /dev/shm or the folder for scratch."
    )

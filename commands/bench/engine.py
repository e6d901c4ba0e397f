"""Measures an engine without HTTP: throughput of many requests, latency of one batch, and time to start."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...config.flags import SETTINGS, add_flags, get_setting, read_flags
from ...errors import ConfigError, PagewireError, StartError
from ...procs import interpreter
from . import datasets
from .figures import percentile
from .serve import load_encoder

_PERCENTS = (10, 25, 50, 75, 90, 99)
_READY_TIMEOUT_S = 600.0


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    datasets.add_flags(parser)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="outputs of each prompt (default: 1)")
    parser.add_argument("--num-warmups", type=int, default=0, metavar="N", help="prompts before those that count")
    parser.add_argument("--disable-detokenize", action="store_true", help="outputs are token ids only")
    _add_common(parser)


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("--input-len", 32, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each output"),
        ("--batch-size", 8, "prompts at once"),
        ("--n", 1, "outputs of each prompt"),
        ("--num-iters-warmup", 10, "batches before those that count"),
        ("--num-iters", 30, "batches that count"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--disable-detokenize", action="store_true", help="outputs are token ids only")
    _add_common(parser)


def add_startup_flags(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("--num-iters-cold", 1, "starts with an empty cache of compiled kernels"),
        ("--num-iters-warmup", 1, "starts that do not count"),
        ("--num-iters-warm", 3, "starts that count"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="instead of the positional MODEL")
    add_flags(parser, groups=("model", "engine"))
    parser.set_defaults(enable_prefix_caching=False)


def throughput(arguments: argparse.Namespace) -> int:
    """Prints requests and tokens per second. Raises PagewireError."""
    from ...offline.sampling_params import SamplingParams

    with _llm(arguments) as llm:
        encode = load_encoder(arguments.tokenizer) or (lambda text: llm.get_tokenizer().encode(text, True))
        samples = datasets.samples(arguments, encode)
        params = [
            SamplingParams(
                n=arguments.n, max_tokens=one.num_output, ignore_eos=True, detokenize=not arguments.disable_detokenize
            )
            for one in samples
        ]
        prompts = [one.prompt for one in samples]
        if num := min(arguments.num_warmups, len(prompts)):
            llm.generate(prompts[:num], params[:num], use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not arguments.disable_tqdm)
        elapsed = time.perf_counter() - started
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    total = num_prompt + num_output
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}\nTotal num output tokens:  {num_output}")
    _write(
        arguments,
        {
            "elapsed_time": elapsed,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": total / elapsed,
        },
    )
    return 0


def latency(arguments: argparse.Namespace) -> int:
    """Prints the seconds of one batch. Raises PagewireError."""
    import random

    from ...offline.sampling_params import SamplingParams

    if min(arguments.input_len, arguments.output_len, arguments.batch_size, arguments.num_iters) < 1:
        raise ConfigError("Lengths and numbers must be at least 1.")
    with _llm(arguments) as llm:
        draw = random.Random(0)
        vocab = min(10_000, llm._config.model.vocab_size)
        prompts = [[draw.randrange(vocab) for _ in range(arguments.input_len)] for _ in range(arguments.batch_size)]
        params = SamplingParams(
            n=arguments.n,
            max_tokens=arguments.output_len,
            ignore_eos=True,
            detokenize=not arguments.disable_detokenize,
        )

        def batch() -> float:
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - started

        _repeat(arguments, "warming up", arguments.num_iters_warmup, batch)
        seconds = _repeat(arguments, "measuring", arguments.num_iters, batch)
    percents = {f"{percent}": percentile(seconds, percent) for percent in _PERCENTS}
    print(f"Avg latency: {statistics.fmean(seconds)} seconds")
    for percent, value in percents.items():
        print(f"{percent}% percentile latency: {value} seconds")
    _write(arguments, {"avg_latency": statistics.fmean(seconds), "latencies": seconds, "percentiles": percents})
    return 0


def startup(arguments: argparse.Namespace) -> int:
    """Prints the seconds from the command to the first answer of a server. Raises PagewireError."""
    import tempfile

    config = _config(arguments)
    flags = [*_as_flags(config)]
    found: dict[str, object] = {}
    for kind, num in (("cold", arguments.num_iters_cold), ("warm", arguments.num_iters_warm)):
        if kind == "warm":
            _repeat(arguments, "warming up", arguments.num_iters_warmup, lambda: _start(flags, None))

        def once(kind: str = kind) -> float:
            with tempfile.TemporaryDirectory() as cache:
                return _start(flags, cache if kind == "cold" else None)

        seconds = _repeat(arguments, f"{kind} starts", num, once)
        if seconds:
            print(f"Avg {kind} startup time: {statistics.fmean(seconds):.2f} seconds")
            found |= {f"avg_{kind}_startup_time": statistics.fmean(seconds), f"{kind}_startup_times": seconds}
            found[f"{kind}_startup_percentiles"] = {f"{one}": percentile(seconds, one) for one in _PERCENTS}
    _write(arguments, found)
    return 0


def _start(flags: list[str], cache: str | None) -> float:
    """Seconds from the start of a server to its first healthy answer; ends it. `cache`: a folder in the place of the
    user's, or None. Raises StartError."""
    import socket
    import tempfile

    from ..client import RemoteServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = interpreter.environment(interpreter.SECRETS)
    if cache is not None:
        environment = {**environment, "XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    command = [*interpreter.COMMAND, "pagewire", "serve", *flags, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
        try:
            server = RemoteServer(f"http://127.0.0.1:{port}", None)
            while not server.answers():
                if process.poll() is not None or time.perf_counter() - started > _READY_TIMEOUT_S:
                    log.seek(0)
                    raise StartError(log.read().strip().rpartition("\n")[2] or "The server did not start.")
                time.sleep(0.01)
            return time.perf_counter() - started
        finally:
            process.terminate()
            process.wait()


def _repeat(arguments: argparse.Namespace, doing: str, num: int, work: Callable[[], float]) -> list[float]:
    from tqdm import tqdm

    return [work() for _ in tqdm(range(num), desc=doing, disable=arguments.disable_tqdm, file=sys.stderr)]


def _config(arguments: argparse.Namespace) -> Any:
    if arguments.model_flag is not None:
        arguments.model = arguments.model_flag
    return read_flags(arguments)


def _as_flags(config: Any) -> Iterator[str]:
    """The flags of `serve` for what differs from the defaults."""
    for name, setting in SETTINGS.items():
        value = get_setting(config, name)
        if setting.group not in ("model", "engine") or value == setting.default:
            continue
        if name == "model":
            yield str(value)
        elif isinstance(value, bool):
            yield setting.flag if value else f"--no-{setting.flag.removeprefix('--')}"
        elif isinstance(value, tuple):
            yield from (setting.flag, *map(str, value))
        else:
            yield f"{setting.flag}={json.dumps(value) if isinstance(value, dict) else value}"


@contextmanager
def _llm(arguments: argparse.Namespace) -> Iterator[Any]:
    """The engine of the flags, in this process."""
    from ...offline.llm import LLM

    config = _config(arguments)
    options: dict[str, Any] = {
        name: get_setting(config, name)
        for name, setting in SETTINGS.items()
        if setting.group in ("model", "engine") and get_setting(config, name) != setting.default
    }
    with LLM(**options) as llm:
        yield llm


def _write(arguments: argparse.Namespace, figures: dict[str, object]) -> None:
    if arguments.output_json is None:
        return
    model = arguments.model or "demo"
    try:
        Path(arguments.output_json).write_text(json.dumps({"model_id": model, **figures}, indent=1) + "\n")
    except OSError as error:
        raise PagewireError(f"{arguments.output_json} cannot be written: {error.strerror}.") from error

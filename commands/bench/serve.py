"""Measures a running OpenAI-compatible server: latencies and throughput under a given load.

The server may be pagewire, vLLM or any other. Figures have vLLM's names.
"""

import argparse
import asyncio
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ConfigError, PagewireError
from ..client import RemoteServer
from . import datasets
from .figures import METRICS, measure, parse_goodput, table
from .load import Outcome, Sample, Target, arrival_times, run, wait_ready

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def add_flags(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend",
        choices=("openai", "vllm", "openai-chat"),
        default="openai",
        help="openai and vllm: /v1/completions; openai-chat: /v1/chat/completions (default: openai)",
    )
    server.add_argument("--base-url", metavar="URL", help="the server's address (default: --host and --port)")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="(default: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="(default: that of the backend)")
    server.add_argument("--model", metavar="NAME", help="name for requests (default: the first that the server lists)")
    server.add_argument("--served-model-name", metavar="NAME", help="name for requests, instead of --model")
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of requests")
    server.add_argument("--insecure", action="store_true", help="do not verify certificates")
    server.add_argument(
        "--ready-check-timeout-sec", type=int, default=0, metavar="S", help="how long to wait for a first answer"
    )
    datasets.add_flags(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="RPS",
        help="requests per second (default: all at once)",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="of the pauses; 1: Poisson, less: bursts (default: 1)",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at once")
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before those that count")
    load.add_argument("--ignore-eos", action="store_true", help="outputs have exactly the length that is asked for")
    load.add_argument("--extra-body", metavar="JSON", help="further fields of requests")
    load.add_argument("--logprobs", type=int, metavar="N", help="ask for candidates of each token")
    load.add_argument("--request-id-prefix", default="bench-", metavar="TEXT", help="of x-request-id")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        load.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="of requests")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="of ttft, tpot, itl, e2el (default: ttft,tpot,itl)",
    )
    results.add_argument("--metric-percentiles", default="99", metavar="P,P", help="such as 50,90,99 (default: 99)")
    results.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that meet all of these, such as ttft:200",
    )
    results.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    results.add_argument("--save-detailed", action="store_true", help="also each request's times and text")
    results.add_argument("--result-dir", metavar="FOLDER", help="(default: here)")
    results.add_argument("--result-filename", metavar="FILE", help="(default: made of backend, rate, model and time)")
    results.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="goes into the JSON")
    results.add_argument("--label", metavar="TEXT", help="goes into the JSON")
    results.add_argument("--plot-timeline", action="store_true", help="write a picture beside the JSON")
    results.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a request failed. Raises PagewireError."""
    percents = _numbers(arguments.metric_percentiles)
    metrics = arguments.percentile_metrics.split(",")
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics: {unknown[0]} is not one of {', '.join(METRICS)}.")
    if arguments.request_rate <= 0 or arguments.burstiness <= 0:
        raise ConfigError("--request-rate and --burstiness must be more than 0.")
    goodput = parse_goodput(arguments.goodput)
    target = _target(arguments)
    found = datasets.samples(arguments, load_encoder(arguments.tokenizer))
    outcomes, duration = asyncio.run(_measure(arguments, target, found))
    rate = "inf" if arguments.request_rate == float("inf") else arguments.request_rate
    result: dict[str, object] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": target.model,
        "tokenizer_id": arguments.tokenizer,
        "num_prompts": arguments.num_prompts,
        **_pairs("--metadata", arguments.metadata),
        "request_rate": rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **measure(outcomes, duration, percents=percents, goodput=goodput),
    }
    print(table(result, metrics, percents))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        print(f"The first of {len(errors)} failures: {errors[0]}", file=sys.stderr)
    _save(arguments, result, outcomes)
    return 1 if errors else 0


def load_encoder(name: str | None) -> datasets.Encode | None:
    """What turns a text into ids; None without a tokenizer. Raises ConfigError."""
    if name is None:
        return None
    from ...engine.checkpoint.source import locate
    from ...engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(locate(name, None)[0])
    return lambda text: tokenizer.encode(text, False)


async def _measure(
    arguments: argparse.Namespace, target: Target, samples: Sequence[Sample]
) -> tuple[list[Outcome], float]:
    """The outcomes of the load, and the seconds that it took."""
    from tqdm import tqdm

    if arguments.ready_check_timeout_sec > 0:
        await wait_ready(target, samples[0], arguments.ready_check_timeout_sec)
    if arguments.num_warmups:
        warm = [samples[i % len(samples)] for i in range(arguments.num_warmups)]
        await run(target, warm, [0.0] * len(warm), max_concurrency=arguments.max_concurrency, on_end=lambda one: None)
    times = arrival_times(len(samples), arguments.request_rate, arguments.burstiness, arguments.seed)
    with tqdm(total=len(samples), unit="request", disable=arguments.disable_tqdm, file=sys.stderr) as bar:
        started = time.perf_counter()
        outcomes = await run(
            target, samples, times, max_concurrency=arguments.max_concurrency, on_end=lambda one: bar.update()
        )
        return outcomes, time.perf_counter() - started


def _target(arguments: argparse.Namespace) -> Target:
    """Raises PagewireError."""
    base = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/")
    if urlsplit(base).scheme not in ("http", "https"):
        raise ConfigError(f"--base-url {base} is not an address such as http://host:port.")
    headers = {"Content-Type": "application/json", "x-request-id": f"{arguments.request_id_prefix}0"}
    if key := os.environ.get("OPENAI_API_KEY") or os.environ.get("PAGEWIRE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    headers |= {name: str(value) for name, value in _pairs("--header", arguments.header).items()}
    is_chat = arguments.backend == "openai-chat"
    endpoint = arguments.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
    key = headers.get("Authorization", "").removeprefix("Bearer ") or None
    model = arguments.served_model_name or arguments.model or RemoteServer(base, key).model()
    fields: dict[str, object] = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    if arguments.logprobs is not None:
        fields |= (
            {"logprobs": True, "top_logprobs": arguments.logprobs} if is_chat else {"logprobs": arguments.logprobs}
        )
    if arguments.extra_body:
        try:
            fields |= json.loads(arguments.extra_body)
        except (ValueError, TypeError) as error:
            raise ConfigError("--extra-body must be a JSON object.") from error
    return Target(
        url=base.removesuffix("/v1") + endpoint,
        is_chat=is_chat,
        model=model,
        fields=fields,
        headers=headers,
        verifies=not arguments.insecure,
    )


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"{flag} {text}: write KEY=VALUE.")
        found[name] = value
    return found


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles {text}: write numbers such as 50,99.") from error
    if not all(0 <= percent <= 100 for percent in found):
        raise ConfigError(f"--metric-percentiles {text}: percentiles are from 0 to 100.")
    return found


def _save(arguments: argparse.Namespace, result: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    if not (arguments.save_result or arguments.save_detailed or arguments.plot_timeline):
        return
    model = str(result["model_id"]).rpartition("/")[2]
    name = arguments.result_filename or f"{arguments.backend}-{result['request_rate']}qps-{model}-{result['date']}.json"
    path = Path(arguments.result_dir or ".") / name
    if arguments.save_detailed:
        details = [asdict(outcome) for outcome in outcomes]
        columns = {"ttfts": "ttft", "itls": "itl", "input_lens": "num_prompt", "output_lens": "num_output"}
        columns |= {"generated_texts": "text", "errors": "error", "start_times": "start", "latencies": "latency"}
        result = result | {column: [one[field] for one in details] for column, field in columns.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if arguments.save_result or arguments.save_detailed:
            path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise PagewireError(f"{path} cannot be written: {error.strerror}.") from error
    if arguments.plot_timeline:
        from .picture import draw

        draw(path.with_suffix(".png"), f"{result['model_id']}, {len(outcomes)} requests", outcomes)

"""The cost of a token outside of the worker: the real processes with a null worker and many streams over HTTP.

`python -m pagewire.bench.serve.frontend` starts api, tokenizer, core and detokenizer with `null_worker` in the worker's
place, reads chat completions with `cheap_client`, checks every text, and prints tokens per second and CPU time per
token by process. In one case the worker takes no time, so that messages queue before the slowest process; in another
each step takes a few ms, so that every token is an event, a write and a packet. `frontend_stages` adds the times of
the stages within the processes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from ...engine.checkpoint.source import locate
from ...engine.text.tokenizer import Tokenizer, load_tokenizer
from ...tools.servers import Server
from ..report import Row, machine, print_table, write_json
from .cheap_client import chat_body
from .frontend_stages import measure as measure_stages

ACTORS = ("api", "tokenizer", "core", "grammar", "detokenizer")


def plain_ids(tokenizer: Tokenizer) -> range:
    """The longest run of ids that are plain ASCII text, so that each of them makes an event."""
    longest = range(0)
    start = 0
    for id in range(tokenizer.vocab_size + 1):
        data = tokenizer.token_bytes(id)  # empty for the id after the last
        if not data or not data.isascii() or id in tokenizer.special_ids:
            longest = max(longest, range(start, id), key=len)
            start = id + 1
    return longest


class Engine:
    """A running front end."""

    def __init__(self, url: str, processes: dict[str, psutil.Process]) -> None:
        self.url = url
        self.processes = processes

    def cpu_s(self) -> dict[str, tuple[float, float]]:
        """Seconds in user and kernel mode so far, by process."""
        return {name: process.cpu_times()[:2] for name, process in self.processes.items()}


@contextmanager
def serving(folder: Path, ids: range, *, num_streams: int, step_ms: float) -> Iterator[Engine]:
    """A front end with a null worker that takes `step_ms` for a step."""
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as run:
        places = {name: f"ipc://{run}/{name}" for name in ("worker", "core")}
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pagewire.bench.serve.null_worker",
                *places.values(),
                str(ids.start),
                str(len(ids)),
                str(step_ms),
            ]
        )
        launch = (sys.executable, "-m", "pagewire.procs.launch", str(folder), "--actors", ",".join(ACTORS))
        flags = ("--max-num-seqs", str(num_streams), "--address", *(f"{name}={at}" for name, at in places.items()))
        try:
            with Server(None, *flags, command=launch) as front:
                processes = front.children()
                actors = {name: processes[name] for name in ACTORS}
                yield Engine(front.url, actors | {"null worker": psutil.Process(worker.pid)})
        finally:
            worker.terminate()
            worker.wait()


def stream(engine: Engine, row: Row, *, num_streams: int, num_tokens: int, text: str) -> None:
    """Runs one repetition, and checks that every stream yields `text` in `num_tokens` pieces."""
    host, port = engine.url.removeprefix("http://").split(":")
    before = engine.cpu_s()
    client = subprocess.run(
        [sys.executable, "-m", "pagewire.bench.serve.cheap_client", host, port, str(num_streams)],
        input=chat_body(num_tokens),
        stdout=subprocess.PIPE,
        check=True,
    )
    after = engine.cpu_s()
    answer = json.loads(client.stdout)
    if wrong := [found for found in answer["streams"] if found != [num_tokens, text]]:
        raise SystemExit(f"{len(wrong)} of {num_streams} streams are wrong, the first: {str(wrong[0])[:300]}")
    num = num_streams * num_tokens
    micros = {name: [1e6 * (b - a) / num for a, b in zip(before[name], after[name], strict=True)] for name in before}
    row.add(
        **{"tokens/s": num / answer["seconds"], "server µs": sum(sum(micros[name]) for name in ACTORS)},
        **{f"{name} µs": sum(spent) for name, spent in micros.items()},
        **{"api kernel µs": micros["api"][1], "client µs": 1e6 * answer["cpu_s"] / num},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or Hub name; empty: the demo model")
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 4.0], help="of the null worker")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/frontend.json"), help="where to write")
    arguments = parser.parse_args(argv)
    folder, name = locate(arguments.model, None)
    facts = machine()
    tokenizer = load_tokenizer(folder)
    ids = plain_ids(tokenizer)
    num_streams, num_tokens = arguments.streams, arguments.tokens
    text = tokenizer.decode([ids[i % len(ids)] for i in range(num_tokens)])
    work = {"num_streams": num_streams, "num_tokens": num_tokens}
    engines: list[tuple[Row, Engine]] = []
    stages: dict[str, Row] = {}
    with ExitStack() as stack:
        for step_ms in arguments.step_ms:
            row = Row(f"steps of {step_ms:g} ms" if step_ms else "steps that take no time")
            engines.append((row, stack.enter_context(serving(folder, ids, num_streams=num_streams, step_ms=step_ms))))
            stream(engines[-1][1], Row("warm up"), text=text, **work)
        for _ in range(arguments.repeat):
            for row, engine in engines:
                stream(engine, row, text=text, **work)
            for stage, micros in measure_stages(folder, ids, **work).items():
                stages.setdefault(stage, Row(stage)).add(**{"µs": micros})
    rows = [row for row, _ in engines]
    print(f"{name}, {num_streams} streams of {num_tokens} tokens; µs are CPU time a token")
    print_table(rows)
    print_table(list(stages.values()))
    settings = {"model": name, "streams": num_streams, "tokens": num_tokens, "repeat": arguments.repeat}
    write_json(arguments.json, "the front end", [*rows, *stages.values()], facts, settings)


if __name__ == "__main__":
    main()

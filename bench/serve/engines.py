"""The cost of a token with several engines behind one api, and what the death of one does to the streams of others.

`python -m pagewire.bench.serve.engines` starts one engine and then two, with null workers, and reads the same streams:
CPU time per token of all processes but the workers. Then it kills all processes of one of two engines during streams,
and shows the gaps between the tokens of the other one's streams, beside those of a run without a kill.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...engine.checkpoint.source import locate
from ...engine.text.tokenizer import load_tokenizer
from ...tools.servers import Server
from ..report import Row, machine, percentile, print_table, write_json
from .cheap_client import Streams, chat_body, read_events, read_streams
from .frontend import plain_ids

_STEPS = "pagewire:step_time_seconds_count"
_REPORTED_S = 1.5  # until the cores have reported their last step
KINDS = ("api", "tokenizer", "core", "grammar", "detokenizer")


class Setting:
    """The model, and what its null workers say."""

    def __init__(self, *, step_ms: float, num_streams: int, num_tokens: int) -> None:
        """`num_streams`: of each engine, at most."""
        self.folder, _ = locate("", None)
        tokenizer = load_tokenizer(self.folder)
        ids = plain_ids(tokenizer)
        num_ids = len(ids) - 1
        self.num_streams, self.num_tokens = num_streams, num_tokens
        self.texts = [
            tokenizer.decode([ids[engine + i % num_ids] for i in range(num_tokens)]) for engine in range(2)
        ]  # by engine
        self.environment = {"FIRST_ID": str(ids.start), "NUM_IDS": str(num_ids), "STEP_MS": str(step_ms)}

    @contextmanager
    def serving(self, num_engines: int) -> Iterator[Server]:
        command = (sys.executable, "-m", "pagewire.bench.serve.engines_server", str(self.folder))
        flags = ("--data-parallel-size", str(num_engines), "--max-num-seqs", str(2 * self.num_streams))
        with Server(None, *flags, "--no-access-log", command=command, environment=self.environment) as server:
            yield server


def cost(setting: Setting, server: Server, row: Row, num_streams: int) -> None:
    """Runs one repetition, and checks every text."""
    host, port = server.url.removeprefix("http://").split(":")
    before, steps = _cpu_s(server), server.metric(_STEPS)
    client = subprocess.run(
        [sys.executable, "-m", "pagewire.bench.serve.cheap_client", host, port, str(num_streams)],
        input=chat_body(setting.num_tokens),
        stdout=subprocess.PIPE,
        check=True,
    )
    after = _cpu_s(server)
    answer = json.loads(client.stdout)
    wrong = [found for found in answer["streams"] if found[0] != setting.num_tokens or found[1] not in setting.texts]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {num_streams} streams are wrong, the first: {str(wrong[0])[:300]}")
    num = num_streams * setting.num_tokens
    micros = {kind: 1e6 * (after[kind] - before[kind]) / num for kind in KINDS}
    time.sleep(_REPORTED_S)
    row.add(**{"tokens/s": num / answer["seconds"], "tokens/step": num / (server.metric(_STEPS) - steps)})
    row.add(**{"server µs": sum(micros.values())})
    row.add(**{f"{kind} µs": spent for kind, spent in micros.items()})


def _cpu_s(server: Server) -> dict[str, float]:
    """CPU seconds so far, by kind of actor."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, process in server.children().items():
        if (kind := name.partition(" ")[0].partition("-")[0]) in found:
            found[kind] += sum(process.cpu_times()[:2])
    return found


def gaps(setting: Setting, row: Row, *, kills: bool) -> None:
    """Reads streams of two engines and adds the gaps between their tokens, in ms. `kills`: engine 1 is killed after a
    third of them."""
    with setting.serving(2) as server:
        read = _read(server, setting, kills=kills)
        resumed = server.metric("pagewire:requests_resumed_total")
    by_engine: list[list[list[float]]] = [[], []]
    for gaps_ms, answer in zip(read.gaps_ms, read.answers, strict=True):
        num, text = read_events(answer)
        common = [_num_common(text, told) for told in setting.texts]
        engine = 0 if common[0] > common[1] else 1  # that began it
        if num != setting.num_tokens or not max(common):
            raise SystemExit(f"a stream is wrong: {num} tokens, {text[:200]}")
        by_engine[engine].append(gaps_ms)
    own = [gap for stream in by_engine[0] for gap in stream]
    row.add(**{"p50 ms": percentile(own, 50), "p99 ms": percentile(own, 99), "longest ms": max(own)})
    if kills:
        paused = [max(stream) for stream in by_engine[1]]
        row.add(**{"moved streams": resumed, "their pause ms": percentile(paused, 50)})


def _num_common(text: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def _read(server: Server, setting: Setting, *, kills: bool) -> Streams:
    """Reads as many streams as both engines have. `kills`: engine 1 is killed after a third of their tokens."""
    host, port = server.url.removeprefix("http://").split(":")
    victims = [
        process
        for name, process in server.children().items()
        if name.endswith("of engine 1") or ("null_worker" in name and name.split()[-2] == "1")
    ]
    num_streams = 2 * setting.num_streams
    reads = itertools.count(1)
    fatal = num_streams * setting.num_tokens // 3

    def on_read() -> None:
        if next(reads) == fatal and kills:
            for process in victims:
                process.kill()

    body = chat_body(setting.num_tokens)
    return read_streams([(host, int(port))], body, num_streams, poll_s=0.0, on_read=on_read)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="at once, of each engine")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of the comparison")
    parser.add_argument("--kills", type=int, default=3, help="repetitions with and without a killed engine")
    parser.add_argument("--step-ms", type=float, default=4.0, help="of the null workers")
    parser.add_argument("--slow-step-ms", type=float, default=20.0, help="the same, where an engine is killed")
    parser.add_argument("--json", type=Path, default=Path("bench/results/engines.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    sizes = {"num_streams": arguments.streams, "num_tokens": arguments.tokens}
    setting = Setting(step_ms=arguments.step_ms, **sizes)
    one = Row("one engine")
    two, halves = Row("two engines, as many streams each"), Row("two engines, half as many each")
    with setting.serving(1) as single, setting.serving(2) as pair:
        for i in range(arguments.repeat + 1):
            for row, server, factor in ((one, single, 1), (two, pair, 2), (halves, pair, 1)):
                cost(setting, server, row if i else Row("warm up"), factor * arguments.streams)
    for row in (two, halves):
        row.add(**{"of one": row.median("server µs") / one.median("server µs")})
    print_table([one, two, halves])
    slow = Setting(
        step_ms=arguments.slow_step_ms, num_streams=max(1, arguments.streams // 8), num_tokens=arguments.tokens
    )
    calm, killed = Row("streams of engine 0"), Row("the same, engine 1 killed")
    for _ in range(arguments.kills):
        gaps(slow, calm, kills=False)
        gaps(slow, killed, kills=True)
    print_table([calm, killed])
    settings = {name: getattr(arguments, name) for name in ("streams", "tokens", "repeat", "kills", "step_ms")}
    write_json(arguments.json, "several engines", [one, two, halves, calm, killed], facts, settings)


if __name__ == "__main__":
    main()

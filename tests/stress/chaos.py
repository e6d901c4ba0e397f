"""Kills and stops the processes of a server during open streams, and compares every stream with an undisturbed run.

`python -m pagewire.tests.stress.chaos` records the results of its streams when nothing happens. Then, for each kind of
process and each signal, it repeatedly opens the same streams, signals one process of that kind when all of them have
begun, and checks three things: whether every stream ends as before (ids, text, log-probabilities, finish reasons,
usage; for a server with `batch_invariance: none`, whether it ends without an error and counts correctly), how long it
takes until every stream continues and `/ready` is 200 again, and the answers to new requests meanwhile (a result, or
503 with Retry-After). After a SIGSTOP, times count from the hang limit. The streams of an api process die with it, so
only new requests and the engine's own counts are checked then.

It prints a table, writes JSON, draws a figure, and ends with exit code 1 if anything was lost, changed or wrong.
"""

import argparse
import asyncio
import json
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ...bench.plots import dots
from ...bench.report import Row, machine, write_json
from ...tools.servers import HOST, Server
from .chaos_streams import Answer, Choice, Request, ask, longest_pause, read, requests

KINDS = ("tokenizer", "detokenizer", "core", "grammar", "worker", "api")
NOTHING = "nothing"  # a control round without a signal
_MAX_DEATHS = 5  # of one server: more in a minute would end it
_NUM_TRIES = 10  # to have open streams; all may end while the client does not run
_PAUSE_S = 0.25  # a shorter time without a token does not count as an interruption
_NEWCOMER_S = 0.2  # between newcomers
_NEWCOMER_LIMIT_S = 40.0
_READY_S = 0.05  # between checks of /ready
_REACTION_S = 0.5  # after a death, within which its effects begin
_API_LIMIT_S = 3.0  # after the death of an api process, until connections must work again
_LONGEST_GAP_S = 0.3  # between checks of /ready that show every outage
_NEWCOMER = {"prompt": "Count from 1 to 3\n", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@dataclass
class Outage:
    """The observations of a client around one signal. A newcomer is a request that was sent after it."""

    began: float  # the signal; after a SIGSTOP, the time at which the process counts as hung
    unready: list[float] = field(default_factory=list)  # when /ready was not 200
    ready_at: float | None = None  # when it was 200 again; None: it always was
    longest_gap_s: float = 0.0  # between checks of /ready, of which the client sends none while it does not run
    waits_s: list[float] = field(default_factory=list)  # of newcomers that were served
    num_refused: int = 0  # newcomers that got 503 with Retry-After
    wrong: list[str] = field(default_factory=list)  # other answers to newcomers
    first_answer_at: float | None = None  # of a newcomer


async def watch_ready(server: Server, outage: Outage) -> None:
    """Checks /ready until cancelled."""
    last_sent = time.monotonic()
    while True:
        sent = time.monotonic()
        outage.longest_gap_s = max(outage.longest_gap_s, sent - last_sent)
        last_sent = sent
        status, _, _ = await ask(HOST, server.port, "GET", "/ready", None, 1.0)
        if status != 200:
            outage.unready.append(sent)
            outage.ready_at = None
        elif outage.unready and outage.ready_at is None:
            outage.ready_at = time.monotonic()
        await asyncio.sleep(_READY_S)


async def send_newcomers(server: Server, outage: Outage, expected: bytes | None, forgiven_until: float) -> None:
    """Sends short requests until cancelled, then waits for their answers. Before `forgiven_until` and the
    first answer, broken connections are not errors. `expected`: the right answer, if it is known."""

    async def one() -> None:
        sent = time.monotonic()
        status, head, body = await ask(HOST, server.port, "POST", "/v1/completions", _NEWCOMER, _NEWCOMER_LIMIT_S)
        now = time.monotonic()
        if status == 200 and expected in (None, text_of(body)):
            outage.waits_s.append(now - sent)
            outage.first_answer_at = min(now, outage.first_answer_at or now)
        elif status == 503 and b"\nretry-after:" in head:
            outage.num_refused += 1
        elif status != 0 or sent > min(forgiven_until, outage.first_answer_at or forgiven_until):
            outage.wrong.append(f"{status} after {now - sent:.1f} s: {body[:300].decode(errors='replace')}")

    tasks = []
    try:
        while True:
            tasks.append(asyncio.ensure_future(one()))
            await asyncio.sleep(_NEWCOMER_S)
    finally:
        await asyncio.gather(*tasks)


def text_of(body: bytes) -> bytes:
    """The choices of an answer, without ids and times."""
    return body.partition(b'"choices":')[2].partition(b'"usage":')[0]


@dataclass
class Experiment:
    """The state that all rounds share."""

    requests: list[Request]
    hang_timeout_s: float
    num_tokens: int
    rng: random.Random
    expected: list[Answer] = field(default_factory=list)  # of the undisturbed run
    newcomer: bytes | None = None  # a new request's text; None: tokens may depend on what else is served
    complaints: list[str] = field(default_factory=list)
    api_limit_s: float = _API_LIMIT_S

    def open_streams(self, server: Server) -> tuple[list[Answer], list[asyncio.Task[None]]]:
        """Opens all streams at once."""
        answers = [Answer(request.body.get("n", 1)) for request in self.requests]
        reads = [
            asyncio.ensure_future(read(HOST, server.port, request, answer))
            for request, answer in zip(self.requests, answers, strict=True)
        ]
        return answers, reads

    async def undisturbed(self, server: Server) -> None:
        """Records the results of the streams and of a newcomer. Raises SystemExit if one fails."""
        self.expected, reads = self.open_streams(server)
        await asyncio.gather(*reads)
        if failures := [answer.failure for answer in self.expected if answer.failure]:
            raise SystemExit(f"{len(failures)} streams failed undisturbed, the first: {failures[0]}")
        _, _, body = await ask(HOST, server.port, "GET", "/v1/models", None, _NEWCOMER_LIMIT_S)
        if json.loads(body)["data"][0]["batch_invariance"] == "none":
            return
        _, _, body = await ask(HOST, server.port, "POST", "/v1/completions", _NEWCOMER, _NEWCOMER_LIMIT_S)
        self.newcomer = text_of(body)

    async def round(self, server: Server, kind: str, signum: signal.Signals) -> dict[str, float]:
        """Sends one signal during open streams. Returns the figures."""
        enough = self.rng.randint(3, max(3, self.num_tokens * 2 // 3))
        for _ in range(_NUM_TRIES):
            answers, reads = self.open_streams(server)
            while any(not answer.ended for answer in answers):
                lengths = [len(choice.ids) for answer in answers for choice in answer.choices]
                if max(lengths) >= enough and min(lengths) > 0:
                    break
                await asyncio.sleep(0.002)
            if sequences := [choice for answer in answers for choice in answer.open_choices()]:
                break
            await asyncio.gather(*reads)
        signalled = time.monotonic()
        limit_s = self.hang_timeout_s if signum == signal.SIGSTOP else 0.0
        outage = Outage(signalled + limit_s)
        victim = None
        if kind != NOTHING:
            victim = server.of_kind(kind)[0]
            victim.send_signal(signum)
        forgiven_until = outage.began + self.api_limit_s if kind == "api" else 0.0
        watches = [
            asyncio.ensure_future(watch_ready(server, outage)),
            asyncio.ensure_future(send_newcomers(server, outage, self.newcomer, forgiven_until)),
        ]
        await asyncio.gather(*reads)
        if victim is not None:
            await self._wait_until_back(server, outage)
        for task in watches:
            task.cancel()
        for result in await asyncio.gather(*watches, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        if kind == "api" and outage.first_answer_at is not None:  # its /ready may hang
            outage.ready_at = max(outage.first_answer_at, outage.ready_at or 0.0)
        figures = self._figures(outage, signalled, sequences) | await self._verdict(server, kind, answers, outage)
        if victim is not None and victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
            self.complain(f"{kind} {signum.name}: the process was not replaced")
            victim.kill()
        return figures

    async def _wait_until_back(self, server: Server, outage: Outage) -> None:
        """Waits until newcomers are served and /ready is 200 again, if it was not within the reaction time."""
        deadline = time.monotonic() + _NEWCOMER_LIMIT_S
        while server.process.poll() is None and time.monotonic() < deadline:
            is_late = time.monotonic() > outage.began + _REACTION_S
            is_ready = outage.ready_at is not None or (is_late and not outage.unready)
            if is_ready and outage.first_answer_at is not None:
                return
            await asyncio.sleep(_READY_S)

    def _figures(self, outage: Outage, signalled: float, sequences: list[Choice]) -> dict[str, float]:
        """Times, in seconds after the outage began."""
        until = max(outage.began, outage.unready[-1] if outage.unready else 0.0) + _REACTION_S
        pauses = [longest_pause(choice.times, signalled, until) for choice in sequences]
        back = [end - outage.began for begin, end in pauses if end - begin >= _PAUSE_S]
        ready_s = 0.0 if outage.ready_at is None else outage.ready_at - outage.began
        return {
            "open": len(sequences),
            "first stream s": max(0.0, min(back, default=0.0)),
            "all streams s": max(0.0, max(back, default=0.0)),
            "ready s": max(0.0, ready_s),
            "recovery s": max(0.0, ready_s, *back),
            "longest pause s": max((end - begin for begin, end in pauses), default=0.0),
            "newcomers": len(outage.waits_s),
            "newcomer's wait s": max(outage.waits_s, default=0.0),
            "newcomers refused": outage.num_refused,
        }

    async def _verdict(self, server: Server, kind: str, answers: list[Answer], outage: Outage) -> dict[str, float]:
        """Counts, and reports, streams that failed or differ and other errors."""
        failures: list[str] = []
        differences: list[str] = []
        if kind != "api":
            failures = [answer.failure for answer in answers if answer.failure]
            differences = [
                found
                for answer, expected in zip(answers, self.expected, strict=True)
                if not answer.failure
                and (found := answer.contradiction() if self.newcomer is None else answer.difference(expected))
            ]
        wrong = list(outage.wrong)
        if kind not in (NOTHING, "api") and not outage.unready and outage.longest_gap_s < _LONGEST_GAP_S:
            wrong.append("/ready was always 200")
        if kind == "api" and (outage.first_answer_at or 1e9) > outage.began + self.api_limit_s:
            wrong.append(f"no new connection was served within {self.api_limit_s:g} s")
        if (left := await num_running(server)) != 0:
            wrong.append("the server does not answer" if left is None else f"{left:g} sequences still run")
        for what, problems in (("failed", failures), ("differ", differences), ("wrong", wrong)):
            if problems:
                self.complain(f"{kind}: {what}: {len(problems)}, the first: {problems[0]}")
        return {"failed": len(failures), "differing": len(differences), "wrong": len(wrong)}

    def complain(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)
        self.complaints.append(what)


async def num_running(server: Server) -> float | None:
    """Sequences that run or wait after half a minute to become idle. None: no answer."""
    total = None
    for _ in range(300):
        _, _, body = await ask(HOST, server.port, "GET", "/metrics", None, 30.0)
        lines = [line for line in body.decode().splitlines() if line.startswith("pagewire:num_requests_")]
        total = sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None
        if total == 0:
            break
        await asyncio.sleep(0.1)
    return total


def print_rows(rows: Sequence[Row]) -> None:
    """Prints the sums of failures and differences, and medians and maxima of times."""
    sums = ("open", "failed", "differing", "wrong", "newcomers", "newcomers refused")
    times = ("first stream s", "recovery s", "longest pause s", "newcomer's wait s")
    print(f"{'':16}{'rounds':>8}" + "".join(f"{name:>{len(name) + 2}}" for name in (*sums, *times)))
    for row in rows:
        cells = [f"{len(row.figures['open']):8}", *(f"{sum(row.figures[name]):{len(name) + 2}g}" for name in sums)]
        for name in times:
            values = row.figures[name]
            cells.append(f"{f'{statistics.median(values):.2f}/{max(values):.2f}':>{len(name) + 2}}")
        print(f"{row.name:16}" + "".join(cells), flush=True)


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--rounds", type=int, default=20, help="rounds of each kind and signal")
    flags.add_argument("--kinds", default=",".join(KINDS), help=f"kinds of processes; {NOTHING}: no signal")
    flags.add_argument("--signals", default="KILL,STOP", help="signals to send")
    flags.add_argument("--streams", type=int, default=64, help="open streams")
    flags.add_argument("--tokens", type=int, default=256, help="tokens of each sequence")
    flags.add_argument("--hang-timeout", type=float, default=2.0, help="the server's --hang-timeout-s in STOP rounds")
    flags.add_argument("--seed", type=int, default=0, help="seed of the times of signals")
    flags.add_argument("--serve", default="", help="more flags of the server, as one string")
    flags.add_argument(
        "--json", type=Path, default=Path("tests/stress/results/chaos.json"), help="where to write the results"
    )
    flags.add_argument("--plots", type=Path, default=Path("docs/images"), help="folder for the figure")
    arguments = flags.parse_args(argv)
    facts = machine()
    common = shlex.split(arguments.serve)
    streams = requests(arguments.streams, arguments.tokens)
    experiment = Experiment(streams, arguments.hang_timeout, arguments.tokens, random.Random(arguments.seed))
    control = Row(NOTHING)
    with Server(None, "--no-access-log", *common) as server:
        asyncio.run(experiment.undisturbed(server))
        control.add(**asyncio.run(experiment.round(server, NOTHING, signal.SIGKILL)))
    rows = [control]
    for kind in arguments.kinds.split(","):
        for name in arguments.signals.split(","):
            signum = signal.Signals[f"SIG{name}"]
            row = Row(f"{kind} {name}")
            rows.append(row)
            hang = ["--hang-timeout-s", f"{arguments.hang_timeout:g}"] if signum == signal.SIGSTOP else []
            while (num_left := arguments.rounds - len(row.figures.get("failed", ()))) > 0:
                with closing(Server(None, "--no-access-log", *common, *hang)) as server:
                    server.wait_ready()
                    for _ in range(min(num_left, _MAX_DEATHS)):
                        if server.process.poll() is None:
                            row.add(**asyncio.run(experiment.round(server, kind, signum)))
                    if code := server.stop():
                        experiment.complain(f"{row.name}: the server ended with {code}")
            print_rows([row])
    print_rows(rows)
    settings = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    title = f"signals during {arguments.streams} open streams"
    write_json(arguments.json, title, rows, facts, settings | {"complaints": experiment.complaints})
    recoveries = {row.name: row.figures["recovery s"] for row in rows[1:]}
    dots(arguments.plots / "chaos.png", f"{title}: time to recover", "s", recoveries, marks={"3 s": 3.0})
    if experiment.complaints:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

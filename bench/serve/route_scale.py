"""What one router process carries with many engines behind it, for `route`.

The engines are those of `small_engines`, one process each, on the same machine. A client in this process reads the
same streams directly from the engines and through the router. First the steps are so short that the router is the
slowest part, which shows what it carries; then they are longer, which shows the delay that it adds.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from msgspec import Struct

from ...tools.servers import HOST, ROUTE, Server
from ..plots import panels
from ..report import Row, percentile
from .cheap_client import Streams, ask_again, chat_body, read_events, read_streams
from .route_streams import wait_until_all_ready
from .small_engines import small_engines

_CALM = 5  # times longer steps where the delay is measured
_IDLE_S = 5.0  # in which the cost of an idle router is measured
_DIRECT, _ROUTED = "directly", "router"


class Load(Struct, frozen=True, kw_only=True):
    """What the client asks for."""

    folder: Path  # of the model
    ids: range  # what null workers say
    text: str  # `num_tokens` of them
    num_streams: int  # at once, of all engines
    num_tokens: int  # of each stream
    num_requests: int  # for one token, with `num_streams` of them open

    def read(self, ports: Sequence[int], *, poll_s: float) -> Streams:
        """Reads all streams from these servers in turn. Raises SystemExit if a text is wrong."""
        addresses = [(HOST, port) for port in ports]
        streams = read_streams(addresses, chat_body(self.num_tokens), self.num_streams, poll_s=poll_s)
        told = [read_events(answer) for answer in streams.answers]
        if wrong := [found for found in told if found != (self.num_tokens, self.text)]:
            raise SystemExit(f"{len(wrong)} of {len(told)} streams are wrong, the first: {str(wrong[0])[:300]}")
        return streams


def scale(load: Load, num_engines: int, *, step_ms: float, repeat: int) -> Row:
    """Measures a router with so many engines behind it."""
    row = Row(f"{num_engines} engines")
    with _fleet(load, num_engines, step_ms) as (ports, router):
        for i in range(repeat + 1):
            used = row if i else Row("warm up")
            _carry(load, ports, router, used)
            _answer(load, router, used)
        _rest(ports, router, row)
    with _fleet(load, num_engines, _CALM * step_ms) as (ports, router):
        for i in range(repeat + 1):
            _delay(load, ports, router, row if i else Row("warm up"))
    return row


def draw(path: Path, nums: Sequence[int], rows: Sequence[Row]) -> None:
    """The figure. `rows`: of `scale`, one for each number of engines."""
    columns = ("tokens/s", "router µs a token", "requests/s", "ITL p50 ms, router", "ITL p99 ms, router", "idle CPU %")
    panels(path, "One router process, engines on the same machine", "engines", nums, {"router": rows}, columns)


@contextmanager
def _fleet(load: Load, num_engines: int, step_ms: float) -> Iterator[tuple[list[int], Server]]:
    """The engines' ports and the router that knows all of them to be ready."""
    with small_engines(load.folder, load.ids, num_engines, step_ms=step_ms, max_num_seqs=load.num_streams) as ports:
        urls = ",".join(f"http://{HOST}:{port}" for port in ports)
        with Server(None, "--engines", urls, "--no-access-log", command=ROUTE) as router:
            wait_until_all_ready(router, num_engines)
            yield ports, router


def _carry(load: Load, ports: Sequence[int], router: Server, row: Row) -> None:
    """Streams at full load."""
    num = load.num_streams * load.num_tokens
    before = _cpu_s(router)
    streams = load.read([router.port], poll_s=0.01)
    row.add(**{"tokens/s": num / streams.seconds, "router µs a token": 1e6 * (_cpu_s(router) - before) / num})
    row.add(**{"tokens/s directly": num / load.read(ports, poll_s=0.01).seconds})


def _answer(load: Load, router: Server, row: Row) -> None:
    """Requests for one token, as many at once as there were streams."""
    body = chat_body(1, stream=False)
    before, sent_before = _cpu_s(router), _sent(router)
    seconds = ask_again([(HOST, router.port)], body, num_open=load.num_streams, num_requests=load.num_requests)
    spent = _cpu_s(router) - before
    sent = [now - earlier for now, earlier in zip(_sent(router), sent_before, strict=True)]
    row.add(**{"requests/s": load.num_requests / seconds, "router µs a request": 1e6 * spent / load.num_requests})
    row.add(**{"most of one engine / mean": max(sent) * len(sent) / sum(sent)})


def _delay(load: Load, ports: Sequence[int], router: Server, row: Row) -> None:
    """The gaps in streams at a part of the load."""
    for name, where in ((_DIRECT, ports), (_ROUTED, [router.port])):
        gaps = [gap for stream in load.read(where, poll_s=0.0).gaps_ms for gap in stream]
        row.add(**{f"ITL p{p} ms, {name}": percentile(gaps, p) for p in (50, 99)})


def _rest(ports: Sequence[int], router: Server, row: Row) -> None:
    """The router without requests, which asks the engines for their state, and the memory of all processes."""
    before, started = _cpu_s(router), time.perf_counter()
    time.sleep(_IDLE_S)
    row.add(**{"idle CPU %": 100 * (_cpu_s(router) - before) / (time.perf_counter() - started)})
    row.add(**{"router MB": router.supervisor.memory_full_info().uss / 1e6})
    owners = {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    sizes = [psutil.Process(owners[port]).memory_full_info().uss / 1e6 for port in ports]
    row.add(**{"MB an engine": sum(sizes) / len(sizes)})


def _cpu_s(router: Server) -> float:
    spent: float = sum(router.supervisor.cpu_times()[:2])
    return spent


def _sent(router: Server) -> list[float]:
    """The requests that each engine was sent."""
    name = "pagewire_router_engine_requests_total{"
    return [float(line.rpartition(" ")[2]) for line in router.get("/metrics").splitlines() if line.startswith(name)]

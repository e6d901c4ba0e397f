"""CPU time per token of each stage in core, detokenizer and api, run one after another in one process.

The processes of `frontend` take longer than these stages because of wake-ups, mailboxes, colder caches, and the
beginnings and ends of requests.
"""

import asyncio
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from ...api.admin.endpoints import Sleeper
from ...api.app import Served, create_app
from ...api.gateway.gateway import Gateway
from ...api.http.server import BoundedHttp, HttpServer, UvicornConfig
from ...config.config import EngineConfig, HttpConfig, ListenOptions
from ...config.flags import make_config
from ...ipc import messages as m
from ...ipc.codec import Decoder, encode
from ...procs.core import CoreActor
from ...procs.detokenizer import DetokenizerActor
from ...procs.prepare import prepare
from .cheap_client import chat_body
from .null_worker import NUM_BLOCKS, NullWorker

_PROMPT_LEN = 30
_POLL_S = 0.002  # between steps, for the server's other tasks and the client
_WRITTEN, _UNWRITTEN = "steps that are written", "steps that are not"


class Stages:
    """CPU seconds of this thread, by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Adds the time inside to `stage`."""
        started = time.thread_time()
        yield
        self.spent[stage] = self.spent.get(stage, 0.0) + time.thread_time() - started


def measure(folder: Path, ids: range, *, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Microseconds of CPU a token, by stage."""
    config = prepare(make_config(model=str(folder), max_num_seqs=num_streams))
    stages = Stages()
    batches = _core(config, ids, stages, num_streams, num_tokens)
    texts = _detokenizer(config, batches, stages)
    uvloop.run(_api(config, texts, stages, num_streams))
    return {stage: 1e6 * spent / (num_streams * num_tokens) for stage, spent in stages.spent.items()}


def _core(config: EngineConfig, ids: range, stages: Stages, num_streams: int, num_tokens: int) -> list[bytes]:
    """The messages of the core to the detokenizer."""
    plans: deque[bytes] = deque()
    sent: list[bytes] = []
    mailboxes = {"worker": plans, "detokenizer": sent, "api": []}
    core = CoreActor(config)
    core.start(lambda receiver, message: mailboxes[receiver].append(encode(message)))
    core.handle([m.CacheOffer(0, NUM_BLOCKS)])
    plans.clear()
    worker = NullWorker(first_id=ids.start, num_ids=len(ids))
    prompt = m.ids_to_bytes(list(ids[:_PROMPT_LEN]))
    for rid in range(num_streams):
        core.handle([m.Enqueue(rid, prompt, m.Sampling(), m.Limits(num_tokens, (), True), m.TextSpec())])
    read_plan, read = Decoder[m.StepPlan](m.ToWorker), Decoder[m.ToCore](m.ToCore)
    while plans:
        result = encode(worker.run(read_plan.decode(plans.popleft())))
        with stages.of("core: decode, apply, plan, encode"):
            core.handle([read.decode(result)])
    return sent


def _detokenizer(config: EngineConfig, batches: list[bytes], stages: Stages) -> list[bytes]:
    """The messages of the detokenizer to the api."""
    sent: list[bytes] = []
    actor = DetokenizerActor(config)
    actor.start(lambda receiver, message: sent.append(encode(message)))
    read = Decoder[m.ToDetokenizer](m.ToDetokenizer)
    for batch in batches:
        with stages.of("detokenizer: decode, text, encode"):
            actor.handle([read.decode(batch)])
    return sent


class _HalfMute(BoundedHttp):
    """Writes only while it is enabled: the difference is what writing costs."""

    is_writing = True

    def write_parts(self, parts: Sequence[bytes]) -> None:
        if self.is_writing:
            super().write_parts(parts)


async def _api(config: EngineConfig, texts: list[bytes], stages: Stages, num_streams: int) -> None:
    """The real server with clients in another process, which have the rids that the core was given."""
    submits: list[m.Submit] = []
    gateway = Gateway(lambda message: submits.append(message) if isinstance(message, m.Submit) else None)
    http = HttpConfig(listen=ListenOptions())
    served = Served(gateway, config, Sleeper(lambda message: None), lambda: None)
    app = create_app([served], http, version="")
    settings = UvicornConfig(app, http)
    settings.http = _HalfMute
    server = HttpServer(settings)
    server_socket = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    serving = asyncio.ensure_future(server.serve(sockets=[server_socket]))
    port = server_socket.getsockname()[1]
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pagewire.bench.serve.cheap_client",
        "127.0.0.1",
        str(port),
        str(num_streams),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    reading = asyncio.ensure_future(client.communicate(chat_body(1)))
    while len(submits) < num_streams:
        await asyncio.sleep(_POLL_S)
    gateway.handle([m.Accepted(order.rid, _PROMPT_LEN) for order in submits])
    read = Decoder[m.TextBatch](m.ToApi)
    for i, text in enumerate(texts):
        await asyncio.sleep(_POLL_S)
        _HalfMute.is_writing = i % 2 == 0
        with stages.of(_WRITTEN if _HalfMute.is_writing else _UNWRITTEN):
            gateway.handle([read.decode(text)])
    await reading
    server.should_exit = True
    await serving
    written, unwritten = (2 * stages.spent.pop(stage) for stage in (_WRITTEN, _UNWRITTEN))
    stages.spent |= {"api: decode, count, render": unwritten, "api: frame, write": written - unwritten}

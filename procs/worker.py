"""The worker process: the only one that touches a device.

A plain loop instead of an event loop, because it waits for a device and not for sockets: take the next plan, run it,
answer. On a CPU a launched step is done when `launch` returns.
"""

import time
from collections.abc import Callable
from typing import assert_never

from ..config import EngineConfig
from ..ipc.actor import Post
from ..ipc.channel import Inbox
from ..ipc.messages import CacheOffer, Facts, OpenCache, Ping, StepPlan, Stop, ToWorker

_IDLE_WAIT_S = 1.0


class Worker:
    """One rank. `handle` is the whole of it; `run` feeds it from a mailbox."""

    def __init__(self, config: EngineConfig, *, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress` is told the bytes of weights that were read, and of all."""
        self._config = config
        self._progress = progress

    def start(self, post: Post) -> None:
        """Loads the model and offers the core what memory is left for KV. Raises a PagewireError."""
        started = time.perf_counter()
        import torch  # the one process that does

        self._timings = {f"torch {torch.__version__}": time.perf_counter() - started}
        from ..engine.runner.runner import Runner

        self._post = post
        self._runner = Runner.load(self._config, progress=self._progress)
        post("core", CacheOffer(0, self._runner.offer()))

    def open(self, message: OpenCache) -> Facts:
        """Allocates the KV cache."""
        self._runner.open_cache(message.num_blocks)
        return Facts(self._timings | self._runner.timings, self._runner.notes)

    def step(self, plan: StepPlan) -> None:
        """Runs a plan and answers the core."""
        self._runner.launch(plan)
        self._post("core", self._runner.collect())


def run(
    worker: Worker, inbox: Inbox[ToWorker], post: Post, on_ready: Callable[[Facts], None], on_ping: Callable[[], None]
) -> None:
    """Serves the mailbox until told to stop."""
    worker.start(post)
    while True:
        inbox.wait(_IDLE_WAIT_S)
        for message in inbox.drain():
            match message:
                case StepPlan():
                    worker.step(message)
                case OpenCache():
                    on_ready(worker.open(message))
                case Ping():
                    on_ping()
                case Stop():
                    return
                case _:
                    assert_never(message)

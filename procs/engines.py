"""Several engines behind one port: `pagewire serve --data-parallel-size N`.

Each engine has its own processes, its own epochs and its own supervisor, so that a death in one does not disturb the
others. The api processes belong to none of them: they submit each request to one engine, and what an engine has lost to
another (`api/gateway/gateway.py`). All supervisors are objects of one process.

SIGHUP restarts the engines one after another. An engine that cannot be healed is started again.
"""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from ..config.config import EngineConfig, ServerConfig
from ..config.machine import machine_facts
from ..errors import ConfigError
from ..ipc.messages import Change, Reset, Settings, Swap, Swapped
from ..ipc.zmq_channel import make_run_folder, remove_run_folder
from .child import EngineMailboxes, shown_engine
from .listening import Listening
from .live_settings import LiveSettings
from .shared_apis import SharedApis
from .supervisor import Supervisor
from .template import Templates
from .topology import kind
from .weight_memory import close_segments, keeps_on_device, new_segments

MAX_FAILURES = 3  # of engines within FAILURES_WINDOW_S; one more ends the launch
FAILURES_WINDOW_S = 60.0


def _nothing() -> None:
    pass


class EnginePart(Supervisor):
    """One of the engines: all actors but the api. `run` is called once."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        folder: Path,
        apis: dict[str, str],
        epochs: tuple[int, int],
        weight_fds: Sequence[int],
        templates: Templates | None = None,
        on_loading: Callable[[], None] = _nothing,
        settings: LiveSettings | None = None,
    ) -> None:
        """`config`: of this engine. `folder`: for its mailboxes. `apis`: the addresses of the api processes. `epochs`:
        in which it begins, of the chain and of the device; unless they are 1, the api processes wait for it.
        `templates`, `settings`: as of `Supervisor`. `on_loading`: called when `loaded_share` has changed."""
        super().__init__(config, quiet=True, weight_fds=weight_fds, templates=templates, settings=settings)
        self._on_loading = on_loading
        self._actors = [name for name in self._names if kind(name) != "api"]
        self._is_owned = True
        self._shown = f"{shown_engine(config.engine)}: "
        self._given_folder = folder
        self._other_apis = apis
        self._epoch, self._device_epoch = epochs
        self._restored = 1
        self._lost_apis: dict[str, None] = {}
        self._why_lost = ""

    @property
    def epochs(self) -> tuple[int, int]:
        """Of the chain and of the device."""
        return self._epoch, self._device_epoch

    @property
    def loaded_share(self) -> float:
        """Of the weights, in the range 0–1."""
        loaded = [child.loading for child in self._children.values() if child.loading is not None]
        return sum(each.bytes_read for each in loaded) / max(1, sum(each.bytes for each in loaded))

    def _on_progress(self) -> None:
        self._on_loading()

    def lose_apis(self, lost: Sequence[str], reason: str) -> None:
        """Forgets the requests of all api processes; those that live submit theirs again."""
        self._lost_apis |= dict.fromkeys(lost)
        self._why_lost = reason
        self._woken.set()

    async def _look_elsewhere(self) -> None:
        """Begins an epoch if api processes were lost."""
        if self._lost_apis and self.is_ready.is_set():
            lost, self._lost_apis = tuple(self._lost_apis), {}
            self._epoch += 1
            self._tell_reset(lost, self._why_lost)


class Engines:
    """The engines of one launch and its api processes. `run` is called once; the other methods are those of a
    supervisor."""

    make_part = EnginePart

    def __init__(
        self,
        config: ServerConfig,
        *,
        listening: Listening,
        on_swap: Callable[[Swap], None] | None = None,
        weight_fds: Sequence[int] = (),
        settings: LiveSettings | None = None,
    ) -> None:
        """`weight_fds`, `settings`: as of `Supervisor`; all engines share them. Raises ConfigError for settings that
        only a single engine can have."""
        engine = config.engine
        alone = {"--client-address": engine.client_address, "--record-trace": engine.record_trace}
        asked = [flag for flag, value in alone.items() if value]
        asked += [f"--kv-connector {spec}" for spec in engine.kv_connector if spec.startswith(("disk", "p2p"))]
        if asked:
            raise ConfigError(f"{asked[0]} is for a single engine; leave it or --data-parallel-size out.")
        self._config = config
        self._listening = listening
        self._on_swap = on_swap
        self._weight_fds = list(weight_fds)
        self._service = config.http.service
        self.settings = LiveSettings(config) if settings is None else settings
        self._answering: set[asyncio.Task[None]] = set()  # a task for each `Change`
        self._num = engine.data_parallel_size
        self.is_ready = asyncio.Event()  # every process is ready
        self.failure: str | None = None  # why it ended, unless it was stopped
        self._parts: list[EnginePart] = []
        self._running: dict[Supervisor, asyncio.Task[int]] = {}
        self._epochs: list[tuple[int, int]] = [(1, 1)] * self._num  # in which each engine began, or will begin
        self._why_lost = ["It has ended."] * self._num  # a sentence: why each engine was lost last
        self._restarting: asyncio.Task[None] | None = None
        self._in_restart: int | None = None  # the engine that ends or starts because of SIGHUP
        self._failures: deque[tuple[float, int]] = deque()  # when an engine ended by itself, and which
        self._given_up: set[int] = set()  # engines that are not started again
        self._may_serve = asyncio.Event()
        self._is_open = False  # clients can connect
        self._is_stopping = False
        self._num_signals = 0
        self._woken = asyncio.Event()

    # ── as of a supervisor ───────────────────────────────────────────────────────────────────────────────────────────

    def weights_for(self, config: EngineConfig) -> list[int]:
        """New descriptors of the packed weights, if another engine's are the same; else none. Those of a part are
        closed when it has ended."""
        can_share = config.weights_key == self._config.engine.weights_key and not keeps_on_device(config)
        return [os.dup(fd) for fd in self._weight_fds] if can_share else []

    def serve(self) -> None:
        """Has the api listen as soon as every process is ready."""
        self._may_serve.set()

    def retire(self) -> None:
        """Stops accepting connections, which another engine does now, and ends when the open ones have ended."""
        self._apis.retire()

    def answer(self, name: str, answer: Swapped) -> None:
        """Answers the `Swap` of an api process."""
        self._apis.answer(name, answer)

    def on_signal(self, signum: signal.Signals) -> None:
        """The first signal stops in order, a second one at once."""
        self._num_signals += 1
        self._apis.on_signal(signum)
        if self._is_stopping:
            for part in self._parts:
                part.on_signal(signum)

    async def apply(self, settings: Settings) -> None:
        """Tells every process, and those that start later. Returns when the settings hold in all engines."""
        assert settings.http is not None, "all is told"
        self._service = settings.http.service
        parts = [part for part in self._parts if not self._running[part].done()]
        await asyncio.gather(self._apis.apply(settings), *(part.apply(settings) for part in parts))

    def _on_change(self, change: Change) -> None:
        """An api process asks for changed settings."""
        task = asyncio.ensure_future(self._answer_change(change))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_change(self, change: Change) -> None:
        self.answer(change.name, await self.settings.answer(change, self.apply))

    def on_hangup(self) -> None:
        """Restarts the engines one after another."""
        if self._is_open and not self._is_stopping and (self._restarting is None or self._restarting.done()):
            self._restarting = asyncio.ensure_future(self._restart_in_turn())

    async def run(self) -> int:
        """From start to stop. The exit code."""
        folders: list[Path] = []
        opening: asyncio.Task[None] | None = None
        self._weight_fds = self._weight_fds or new_segments(self._config.engine)
        try:
            folders += [make_run_folder() for _ in range(self._num + 1)]
            self._folders = folders[1:]
            self._apis = SharedApis(
                self._config,
                folder=folders[0],
                listening=self._listening,
                engines=self._mailboxes,
                on_lost=self._on_lost_apis,
                on_swap=self._on_swap,
                notes=self._notes,
                on_change=self._on_change,
                settings=self.settings,
            )
            for number in range(self._num):
                self._parts.append(self._begin(number))
            self._run(self._apis)
            opening = asyncio.ensure_future(self._open())
            return await self._watch()
        finally:
            for task in (opening, self._restarting):
                if task is not None:
                    task.cancel()
            for running in self._running.values():
                running.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            close_segments(self._weight_fds)
            for folder in folders:
                remove_run_folder(folder)

    # ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, number: int) -> EnginePart:
        """Starts an engine in its next epoch."""
        part = self.make_part(
            replace(self._config, engine=of_engine(self._config.engine, number)),
            folder=self._folders[number],
            apis=self._apis.addresses,
            epochs=self._epochs[number],
            weight_fds=[os.dup(fd) for fd in self._weight_fds],
            settings=self.settings,
        )
        self._run(part)
        return part

    def _run(self, part: Supervisor) -> None:
        task = self._running[part] = asyncio.ensure_future(part.run())
        task.add_done_callback(lambda _: self._woken.set())

    def _mailboxes(self) -> tuple[EngineMailboxes, ...]:
        """The engines, for an api process that starts now."""
        return tuple(
            EngineMailboxes(
                {name: f"ipc://{folder}/{name}" for name in ("tokenizer", "core")},
                *max(part.epochs, self._epochs[number]),
                reason="" if self._takes_requests(number) else self._why_lost[number],
            )
            for number, (part, folder) in enumerate(zip(self._parts, self._folders, strict=True))
        )

    def _takes_requests(self, number: int) -> bool:
        """False from the loss of an engine until it is ready again. All are, once clients can connect."""
        part = self._parts[number]
        is_lost = self._epochs[number] > part.epochs or self._running[part].done()
        return not self._is_open or (part.is_ready.is_set() and not is_lost)

    def _notes(self) -> list[str]:
        return [f"{self._num} engines", *dict.fromkeys(note for part in self._parts for note in part.notes)]

    def _on_lost_apis(self, lost: Sequence[str], reason: str) -> None:
        for part in self._parts:
            part.lose_apis(lost, reason)

    async def _open(self) -> None:
        """Has the api listen when all processes are ready."""
        for part in (*self._parts, self._apis):
            await part.is_ready.wait()
        self.is_ready.set()
        await self._may_serve.wait()
        self._is_open = True
        self._apis.serve()

    async def _watch(self) -> int:
        """Until the api processes have ended. The exit code."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._running[self._apis].done():
                return await self._stop(await self._running[self._apis])
            for number, part in enumerate(self._parts):
                if not self._running[part].done() or number in (*self._given_up, self._in_restart):
                    continue
                code = await self._running[part]
                self._note_end(number, part.failure or f"It ended with exit code {code}.")
                if not self._is_open or len(self._given_up) == self._num:
                    self.failure = part.failure
                    await self._apis.fail()
                    await asyncio.wait([self._running[self._apis]])
                    return await self._stop(code)

    def _note_end(self, number: int, why: str) -> None:
        """An engine has ended by itself: starts it again, or gives it up."""
        self._lose(number, why)
        if not self._is_open or self._num_signals:
            self._given_up.add(number)
            return
        now = time.monotonic()
        self._failures.append((now, number))
        while self._failures[0][0] < now - FAILURES_WINDOW_S:
            self._failures.popleft()
        if sum(failed == number for _, failed in self._failures) > MAX_FAILURES:
            self._given_up.add(number)
            self._print(f"engine {number} is given up, because it has failed so often. SIGHUP starts it again.")
            return
        self._print(f"engine {number} has failed and is started again.")
        self._parts[number] = self._begin(number)

    def _lose(self, number: int, why: str) -> None:
        """Has the api processes send its requests to the others."""
        chain, device = max(self._parts[number].epochs, self._epochs[number])
        self._epochs[number] = chain + 1, device + 1
        self._why_lost[number] = why
        self._apis.tell(Reset(chain + 1, device + 1, (), why, number))

    async def _restart_in_turn(self) -> None:
        """Each engine gets no new requests, finishes its own or leaves them to the others, and starts. They share new
        memory for their weights, since the checkpoint may be a new one."""
        before, self._weight_fds = self._weight_fds, new_segments(self._config.engine)
        close_segments(before)
        for number in range(self._num):
            if number not in self._given_up:
                await self._apis.vacate(number, self._service.drain_timeout)
            self._in_restart = number
            if number not in self._given_up:
                part = self._parts[number]  # not the one from before, if that has failed meanwhile
                self._lose(number, "It is restarted.")
                part.on_signal(signal.SIGTERM)
                await asyncio.wait([self._running[part]])
            self._given_up.discard(number)
            part = self._parts[number] = self._begin(number)
            self._in_restart = None
            ready = asyncio.ensure_future(part.is_ready.wait())
            await asyncio.wait((ready, self._running[part]), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ready.cancel()
                self._print(f"engine {number} did not start; the others are not restarted.")
                return
        self._print("every engine was restarted.")

    async def _stop(self, code: int) -> int:
        """Stops the engines; the api processes have ended, with this exit code. The exit code."""
        self._is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        self.failure = self.failure or self._apis.failure
        for part in self._parts:
            for _ in range(max(1, self._num_signals)):
                part.on_signal(signal.SIGTERM)
        codes = [await self._running[part] for part in self._parts]
        return code or (0 if self._is_open else max(codes))

    def _print(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)


def of_engine(engine: EngineConfig, number: int) -> EngineConfig:
    """What the engine of this number is given."""
    size = engine.num_ranks
    has_gpu = engine.device != "cpu" and machine_facts().has_gpu
    return replace(
        engine,
        engine_number=number,
        device="cuda" if has_gpu else engine.device,
        gpu_ids=_gpus(engine)[number * size : (number + 1) * size] if has_gpu else (),
        cpu_sets=engine.cpu_sets[number * size : (number + 1) * size],
        kv_events=_beside(engine.kv_events, number),
        kv_events_replay=_beside(engine.kv_events_replay, number),
    )


def _gpus(engine: EngineConfig) -> tuple[str, ...]:
    """Those of all engines."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return engine.gpu_ids or (tuple(visible.split(",")) if visible else tuple(map(str, range(1024))))


def _beside(address: str | None, number: int) -> str | None:
    """The address of this engine's socket, from that of the first engine's: the next ports, or files beside it."""
    if not address or not number:
        return address
    base, colon, port = address.rpartition(":")
    return f"{base}:{int(port) + number}" if colon and port.isdigit() else f"{address}.{number}"

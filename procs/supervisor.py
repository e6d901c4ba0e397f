"""The supervisor: starts the actors, waits until all are ready, watches them, and stops them all in order.

It is the process that a person starts and that a service manager watches. It does no work of its own: children are
reaped by the loop, messages are few, and nothing here can block on a device or a client.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..config import EngineConfig
from ..errors import StartError
from ..ipc.messages import (
    SCHEMA_VERSION,
    Facts,
    Fault,
    Ping,
    Pong,
    Ready,
    Serve,
    Serving,
    Stop,
    ToSupervisor,
)
from ..ipc.zmq_channel import Keys, ZmqContext, ZmqInbox, check_address, make_run_folder, remove_run_folder
from .child import Launch, process_age_s
from .listening import Listening
from .topology import RENDEZVOUS, kind, names, rank

PING_INTERVAL_S = 0.5
STOP_GRACE_S = 5.0  # for each actor, on top of what open requests are given
FAULT_WAIT_S = 1.0  # how long a dead child's last words are waited for
START_REPORT_S = 30.0  # a start that takes longer says now and then for whom it waits


class Child:
    """One actor's process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.facts: Facts | None = None  # once ready
        self.exited = asyncio.ensure_future(process.wait())


class Supervisor:
    """All actors of one launch on this machine. `run` is called once."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        actors: Sequence[str] | None = None,
        addresses: dict[str, str] | None = None,
        keys: Keys | None = None,
        quiet: bool = False,
    ) -> None:
        """`actors`: those to start here (default: all). `addresses`: mailboxes that are not in this launch's own run
        folder, and `ranks`, where the ranks of a tensor-parallel group meet. `quiet`: no timeline, no banner."""
        self._config = config
        self._names = names(config.tensor_parallel_size)
        self._actors = [name for name in self._names if actors is None or name in actors]
        self._elsewhere = addresses or {}
        self._keys = keys
        self._quiet = quiet
        self._children: dict[str, Child] = {}
        self._dead: list[Child] = []  # in the order of their ends: who died first may have taken others along
        self._inbox: ZmqInbox[ToSupervisor] | None = None
        self._http: Listening | None = None
        self._faults: dict[str, Fault] = {}
        self._url: str | None = None
        self._woken = asyncio.Event()
        self._signals: list[signal.Signals] = []
        self._marks: list[tuple[str, float]] = []  # phase of the start → when it ended

    async def run(self) -> int:
        """From start to stop. The exit code: 0 after a signal, 2 for what the user can mend, else 1."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        self._mark("configuration")
        run_folder = make_run_folder()
        context = ZmqContext(self._keys)
        lifeline, self._lifeline_held = os.pipe()
        try:
            for address in self._elsewhere.values():
                check_address(address, self._keys)
            self._addresses = {
                name: self._elsewhere.get(name, f"ipc://{run_folder}/{name}")
                for name in (*self._names, "supervisor")
                if name in self._elsewhere or name in (*self._actors, "supervisor")
            }
            self._inbox = context.inbox(self._addresses["supervisor"], ToSupervisor)
            self._inbox.subscribe(loop, self._woken.set)
            self._outboxes = {name: context.outbox(self._addresses[name]) for name in self._actors}
            if "api" in self._actors:
                self._http = Listening(self._config)
            await self._spawn(run_folder, lifeline)
            return await self._supervise()
        except StartError as error:
            print(f"pagewire: {error}", file=sys.stderr)
            return max((fault.exit_code for fault in self._faults.values()), default=1)
        finally:
            await self._kill()
            if self._http is not None:
                self._http.close()
            os.close(lifeline)
            os.close(self._lifeline_held)
            if self._inbox is not None:
                self._inbox.close()
            context.close()
            remove_run_folder(run_folder)

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _spawn(self, run_folder: Path, lifeline: int) -> None:
        """Starts every actor at once: the slowest decides, and the others cost nothing meanwhile."""
        http_fd = self._http.fd if self._http is not None else -1
        launch = Launch(
            config=self._config,
            addresses=self._addresses,
            keys=self._keys,
            supervisor_pid=os.getpid(),
            lifeline_fd=lifeline,
            http_fd=http_fd,
            progress=not self._quiet and sys.stderr.isatty(),
            ranks_here=tuple(rank(name) for name in self._actors if kind(name) == "worker"),
            rendezvous=self._elsewhere.get(RENDEZVOUS, f"file://{run_folder}/{RENDEZVOUS}"),
        )
        launch_file = run_folder / "launch.json"
        with os.fdopen(os.open(launch_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(launch))
        for name in self._actors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pagewire.procs.child",
                name,
                str(launch_file),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(lifeline, http_fd) if name == "api" else (lifeline,),
                env=_environment(name, self._config, ranks_are_here=RENDEZVOUS not in self._elsewhere),
            )
            child = self._children[name] = Child(name, process)
            child.exited.add_done_callback(partial(self._on_exit, child))
        self._mark("start of processes")

    async def _supervise(self) -> int:
        """Waits for everyone, opens the door, then watches until someone or something ends it."""
        await self._wait_ready()
        if self._signals:
            return await self._stop("stopped while starting")
        slowest = max(self._children.values(), key=lambda child: sum((child.facts or Facts()).timings.values()))
        self._mark(f"{slowest.name} ready")
        if self._http is not None:
            self._outboxes["api"].send(Serve())
            await self._until(lambda: self._url is not None, "the api did not open its port")
            self._mark("port open")
        self._announce(slowest)
        next_ping = 0.0
        while not self._signals:
            died = self._first_dead()
            if died is not None:
                await self._last_words(died)
                print(f"pagewire: {self._cause(died)} Stopping.", file=sys.stderr)
                await self._stop(f"{died.name} has died", grace_s=0.0)
                return max(1, self._faults[died.name].exit_code if died.name in self._faults else 1)
            await self._next_event(PING_INTERVAL_S)
            if time.monotonic() >= next_ping:  # an answer is an event, too
                next_ping = time.monotonic() + PING_INTERVAL_S
                for name in self._actors:
                    self._outboxes[name].send(Ping())
        return await self._stop(f"{self._signals[0].name}", grace_s=self._config.shutdown_timeout_s)

    async def _wait_ready(self) -> None:
        await self._until(
            lambda: all(child.facts is not None for child in self._children.values()),
            "not ready in time",
            name_the_late=True,
        )

    async def _until(self, condition: Callable[[], bool], what: str, *, name_the_late: bool = False) -> None:
        """Handles events until `condition()`. Raises StartError if a child dies or the deadline passes."""
        started = time.monotonic()
        next_report = started + START_REPORT_S
        while not condition() and not self._signals:
            died = self._first_dead()
            if died is not None:
                await self._last_words(died)
                raise StartError(self._cause(died))
            await self._next_event(0.5)
            now = time.monotonic()
            late = ", ".join(child.name for child in self._children.values() if child.facts is None)
            if now > started + self._config.start_timeout_s:
                names = f"{late}: " if name_the_late and late else ""
                raise StartError(f"{names}{what} ({self._config.start_timeout_s:g} s; see --start-timeout-s).")
            if now > next_report and late:
                next_report = now + START_REPORT_S
                print(f"pagewire: still waiting for {late} after {now - started:.0f} s", file=sys.stderr)

    # ── watch ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        self._woken.set()

    def _on_exit(self, child: Child, _: object) -> None:
        self._dead.append(child)

    def _first_dead(self) -> Child | None:
        return self._dead[0] if self._dead else None

    async def _next_event(self, timeout_s: float) -> None:
        """Returns after a message, a signal, a death, or the time."""
        waiting = asyncio.ensure_future(self._woken.wait())
        exits = [child.exited for child in self._children.values() if not child.exited.done()]
        await asyncio.wait([waiting, *exits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._woken.clear()
        for message in self._inbox.drain() if self._inbox is not None else ():
            match message:
                case Ready():
                    if message.schema != SCHEMA_VERSION:
                        raise StartError(f"{message.name} speaks schema {message.schema}, not {SCHEMA_VERSION}.")
                    self._children[message.name].facts = message.facts
                case Serving():
                    self._url = message.url
                case Fault():
                    self._faults[message.name] = message
                case Pong():
                    pass

    async def _last_words(self, child: Child) -> None:
        """A child that ended by itself has said why; its message may still be on the way."""
        deadline = time.monotonic() + FAULT_WAIT_S
        while child.name not in self._faults and time.monotonic() < deadline and child.process.returncode:
            if child.process.returncode < 0:
                return  # killed: it could say nothing
            await self._next_event(0.05)

    def _cause(self, child: Child) -> str:
        fault = self._faults.get(child.name)
        if fault is not None:
            if fault.trace:
                print(fault.trace, file=sys.stderr, end="")
                return f"{child.name} failed: {fault.summary}."
            return fault.summary
        code = child.process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{child.name} {how}."

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stop(self, reason: str, grace_s: float = 0.0) -> int:
        """Stops the actors from the door inwards, each with a deadline. A second SIGINT ends it at once."""
        num_signals = len(self._signals)
        for name in reversed(self._actors):
            child = self._children[name]
            if child.exited.done():
                continue
            grace = grace_s if name == "api" else 0.0
            self._outboxes[name].send(Stop(grace, reason))
            deadline = time.monotonic() + grace + STOP_GRACE_S
            while not child.exited.done() and time.monotonic() < deadline:
                if signal.SIGINT in self._signals[num_signals:]:
                    print("pagewire: stopped at once", file=sys.stderr)
                    return 130
                await self._next_event(0.2)
        return 0

    async def _kill(self) -> None:
        """Whoever is left."""
        for child in self._children.values():
            if not child.exited.done():
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
        for child in self._children.values():
            await child.exited

    # ── tell ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, process_age_s()))

    def _announce(self, slowest: Child) -> None:
        if self._quiet:
            return
        config = self._config
        lines = [
            f"pagewire serves {config.served_model_names[0]} ({config.dtype}, context {config.max_model_len:,} tokens)"
        ]
        for child in self._children.values():
            lines += [f"  {note}" for note in (child.facts or Facts()).notes]
        lines.append("start")
        before = 0.0
        for phase, at in self._marks:
            detail = ""
            if phase == f"{slowest.name} ready":
                timings = (slowest.facts or Facts()).timings
                detail = "  (" + ", ".join(f"{part} {seconds:.2f}" for part, seconds in timings.items()) + ")"
            lines.append(f"  {at - before:6.2f} s  {phase}{detail}")
            before = at
        lines.append(f"  {before:6.2f} s  total")
        if self._url is not None:
            model = config.served_model_names[0]
            key = ' -H "Authorization: Bearer $PAGEWIRE_API_KEY"' if config.api_keys else ""
            is_file = self._url.startswith("unix:")
            base = f"--unix-socket {self._url.removeprefix('unix:')} http://localhost" if is_file else self._url
            lines += [
                f"listening on {self._url} — try:",
                f"  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json'{key} "
                f"""-d '{{"model": "{model}", "stream": true, """
                """"messages": [{"role": "user", "content": "Count from 1 to 10"}]}'""",
            ]
        print("\n".join(lines), file=sys.stderr, flush=True)


def _environment(name: str, config: EngineConfig, *, ranks_are_here: bool) -> dict[str, str]:
    """What glibc and OpenMP read only when a process starts.

    The worker's threads wait for each other between two products of a step and would otherwise spin the other processes
    off their cores, or sleep and be woken a hundred times a step: they spin for about a tenth of a millisecond. The
    malloc settings keep large buffers mapped, whose page faults would otherwise cost more than the copies into them.
    """
    environment = dict(os.environ)
    if kind(name) == "worker":
        defaults = {
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "3000",
            "OMP_NUM_THREADS": str(config.num_threads),
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**33),
        }
        if ranks_are_here:  # else gloo listens where the machine's name leads, and NCCL on the first network it finds
            defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        environment |= {key: value for key, value in defaults.items() if key not in environment}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment

"""Several engines of one launch behind a router: `pagewire serve --data-parallel-size N`.

The launcher is the router's process. It starts each engine, which is a supervisor with its actors like any other, on a
Unix socket in its run folder, opens the port when all are ready, replaces an engine that has died, and stops them all.
SIGHUP restarts every engine in turn.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..config.access import ApiKey
from ..config.config import ListenOptions, ServerConfig
from ..config.machine import machine_facts
from ..errors import ConfigError, StartError
from ..ipc.zmq_channel import make_run_folder, remove_run_folder
from ..procs import interpreter
from ..procs.launch import run as run_supervisor
from ..procs.lifeline import tie_life_to
from ..procs.listening import Listening
from ..procs.supervisor import Supervisor
from .config import RouteConfig
from .serve import Door, Signals

MAX_DEATHS = 5  # within DEATHS_WINDOW_S; one more ends the service
DEATHS_WINDOW_S = 60.0
STOP_GRACE_S = 30.0  # for an engine, on top of what open requests are given


class Launch(Struct, frozen=True):
    """What the launcher tells an engine's process, in a file that only their user can read."""

    config: ServerConfig
    launcher_pid: int
    lifeline_fd: int  # read end of a pipe whose other end only the launcher holds


class Replica:
    """One engine of the launch."""

    def __init__(self, index: int, config: ServerConfig, folder: Path, lifeline_fd: int) -> None:
        self.index = index
        self.url = f"unix:{config.http.listen.uds}"
        self.is_stopping = False
        self.process: asyncio.subprocess.Process
        self._lifeline_fd = lifeline_fd
        self._config = config.engine
        self._file = folder / f"engine-{index}.json"
        launch = Launch(config, os.getpid(), lifeline_fd)
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(launch))

    async def start(self) -> None:
        environment = interpreter.environment(interpreter.COLLECTOR_HEADERS)
        if self._config.device == "cuda":
            visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(1024)))
            size = self._config.tensor_parallel_size
            own = visible.split(",")[self.index * size : (self.index + 1) * size]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        self.is_stopping = False
        self.process = await asyncio.create_subprocess_exec(
            *(*interpreter.COMMAND, "pagewire.route.replicas", str(self._file)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lifeline_fd,),
            env=environment,
            start_new_session=True,  # Ctrl-C is for the launcher, which stops engines when their streams have ended
        )

    async def stop(self, grace_s: float) -> None:
        """In good form, or by force when the time is over."""
        self.is_stopping = True
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.process.wait()
        self.kill()
        await self.process.wait()

    def kill(self) -> None:
        self.is_stopping = True
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()  # its actors end with it


class Replicas:
    """One launch of several engines. `run` is called once."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError if it asks for what only one engine can have."""
        engine = config.engine
        alone = {
            "--client-address": engine.client_address,
            "--kv-events": engine.kv_events,
            "--record-trace": engine.record_trace,
            "--enable-sleep-mode": config.http.admin.enable_sleep_mode,
            "--enable-model-swap": config.http.admin.enable_model_swap,
        }
        asked = [flag for flag, value in alone.items() if value]
        asked += [f"--kv-connector {spec}" for spec in engine.kv_connector if spec.startswith(("disk", "p2p"))]
        if asked:
            raise ConfigError(f"{asked[0]} is one engine's own; leave it or --data-parallel-size out.")
        self._config = config
        self._service = config.http.service
        self._replicas: list[Replica] = []
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        self._failed: asyncio.Future[int]  # the exit code, when it cannot go on
        self._restarting: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """From start to stop. The exit code."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        signals = Signals()
        listening = Listening(self._config.http.listen)
        folder = make_run_folder()
        lifeline, lifeline_held = os.pipe()
        try:
            self._replicas = [
                Replica(i, _of_replica(self._config, i, folder), folder, lifeline)
                for i in range(self._config.engine.data_parallel_size)
            ]
            self._door = Door(_of_router(self._config, self._replicas), listening)
            for replica in self._replicas:
                await self._start(replica)
            self._door.start()
            if not await self._until_ready(signals):
                return await self._stop(signals, 0.0)
            await self._door.open()
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
            self._announce()
            first = asyncio.ensure_future(signals.first())
            await asyncio.wait((first, self._failed), return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if self._failed.done():
                await self._stop(signals, 0.0)
                return self._failed.result()
            return await self._stop(signals, self._service.drain_timeout)
        except StartError as error:
            print(f"pagewire: {error}", file=sys.stderr)
            return 1
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()
            for replica in self._watchers:
                replica.kill()
                await replica.process.wait()
            listening.close()
            os.close(lifeline)
            os.close(lifeline_held)
            remove_run_folder(folder)

    async def _start(self, replica: Replica) -> None:
        await replica.start()
        self._watchers[replica] = asyncio.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        """Replaces it when it dies."""
        code = await replica.process.wait()
        if replica.is_stopping or self._failed.done():
            return
        now = time.monotonic()
        self._deaths.append(now)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        too_many = len(self._deaths) > MAX_DEATHS and now - self._deaths[0] < DEATHS_WINDOW_S
        if too_many or not self._door.is_open:
            why = f" {len(self._deaths)} engines have died in {now - self._deaths[0]:.0f} s." if too_many else ""
            print(f"pagewire: engine {replica.index} {how}.{why} Stopping.", file=sys.stderr, flush=True)
            self._failed.set_result(max(1, code))
            return
        print(f"pagewire: engine {replica.index} {how}; another one is started.", file=sys.stderr, flush=True)
        await self._start(replica)

    async def _until_ready(self, signals: Signals) -> bool:
        """False: a signal came first, or a start failed."""
        deadline = time.monotonic() + self._service.start_timeout_s
        while not all(engine.is_able for engine in self._door.fleet.engines):
            if signals.num or self._failed.done():
                return False
            if time.monotonic() > deadline:
                raise StartError(f"The engines are not ready in time ({self._service.start_timeout_s:g} s).")
            await self._door.fleet.news(asyncio.get_running_loop().time() + 0.5)
        return True

    def _on_hangup(self) -> None:
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart_in_turn())

    async def _restart_in_turn(self) -> None:
        """Each engine gets nothing new, ends what it has or leaves it to the others, and starts again."""
        for replica in self._replicas:
            engine = self._door.fleet.find(replica.url)
            assert engine is not None, replica.url
            engine.is_leaving = True
            await replica.stop(self._service.drain_timeout + STOP_GRACE_S)
            engine.lost("It starts again.")
            engine.is_leaving = False
            await self._start(replica)
            deadline = asyncio.get_running_loop().time() + self._service.start_timeout_s
            while not engine.is_able and await self._door.fleet.news(deadline):
                pass
        print("pagewire: every engine was started again.", file=sys.stderr, flush=True)

    async def _stop(self, signals: Signals, grace_s: float) -> int:
        """The door first, then the engines. The exit code."""

        async def stop() -> None:
            if self._restarting is not None:
                self._restarting.cancel()
            await self._door.close(grace_s)
            await asyncio.gather(*(replica.stop(STOP_GRACE_S) for replica in self._watchers))

        if not await signals.unless_again(stop()):
            return 130
        return 0 if not self._failed.done() else self._failed.result()

    def _announce(self) -> None:
        names, num = self._config.engine.served_model_names, len(self._replicas)
        print(
            f"pagewire serves {names[0]} with {num} engines\nlistening on {self._door.url}", file=sys.stderr, flush=True
        )


def _of_replica(config: ServerConfig, index: int, folder: Path) -> ServerConfig:
    """What one engine is given: its clients come through the router, which has the rates and the access log."""
    engine, http = config.engine, config.http
    has_gpu = engine.device != "cpu" and machine_facts().has_gpu
    reports = http.reports if index == 0 else replace(http.reports, batch_folder=None)  # batches are the first engine's
    http = replace(
        http,
        listen=ListenOptions(uds=f"{folder}/engine-{index}"),
        clients=replace(http.clients, requests_per_minute=None, tokens_per_minute=None, access_log=False),
        reports=reports,
        api_keys=tuple(ApiKey(key.key) for key in http.api_keys),
    )
    return ServerConfig(engine=replace(engine, device="cuda" if has_gpu else engine.device), http=http)


def _of_router(config: ServerConfig, replicas: list[Replica]) -> RouteConfig:
    return RouteConfig(http=config.http, engines=tuple(replica.url for replica in replicas))


def main(launch_file: str) -> int:
    """An engine's process. The exit code."""
    launch = msgspec.json.decode(Path(launch_file).read_bytes(), type=Launch)
    tie_life_to(launch.launcher_pid, launch.lifeline_fd)
    return run_supervisor(Supervisor(launch.config, quiet=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

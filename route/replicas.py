"""Several engines of one launch behind a router: `pagewire serve --data-parallel-size N`.

The launcher is the router's process. It starts each engine, a supervisor with its actors, on a Unix socket in its run
folder, listens when all engines are ready, replaces engines that die, and stops them all. SIGHUP restarts the engines
one after another.
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
from ..procs.weight_memory import close_segments, new_segments
from .config import RouteConfig
from .serve import RouterServer, Signals

MAX_DEATHS = 5  # of engines within DEATHS_WINDOW_S; one more ends the launch
DEATHS_WINDOW_S = 60.0
STOP_GRACE_S = 30.0  # for an engine, on top of what open requests are given


class Launch(Struct, frozen=True):
    """What the launcher gives an engine's process, in a file that only their user can read and that process removes."""

    config: ServerConfig
    launcher_pid: int
    lifeline_fd: int  # read end of a pipe whose other end only the launcher holds
    weight_fds: tuple[int, ...] = ()  # shared memory for packed weights, one for each rank


class Replica:
    """One engine of the launch."""

    def __init__(
        self, index: int, config: ServerConfig, folder: Path, lifeline_fd: int, weight_fds: tuple[int, ...]
    ) -> None:
        self.index = index
        self.url = f"unix:{config.http.listen.uds}"
        self.is_stopping = False
        self.process: asyncio.subprocess.Process
        self._lifeline_fd = lifeline_fd
        self.weight_fds = weight_fds
        self._config = config
        self._file = folder / f"engine-{index}.json"

    async def start(self) -> None:
        environment = interpreter.environment(interpreter.COLLECTOR_HEADERS)
        engine = self._config.engine
        if engine.device == "cuda":
            visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(1024)))
            size = engine.tensor_parallel_size * engine.pipeline_parallel_size
            own = visible.split(",")[self.index * size : (self.index + 1) * size]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        launch = Launch(self._config, os.getpid(), self._lifeline_fd, self.weight_fds)
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(launch))
        self.is_stopping = False
        self.process = await asyncio.create_subprocess_exec(
            *interpreter.COMMAND,
            "pagewire.route.replicas",
            str(self._file),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lifeline_fd, *self.weight_fds),
            env=environment,
            start_new_session=True,  # Ctrl-C is for the launcher, which stops engines when their streams have ended
        )

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and kills the engine if it has not ended after `grace_s`."""
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
                self.process.kill()  # its actors end as well


class Replicas:
    """One launch of several engines. `run` is called once."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for settings that only a single engine can have."""
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
            raise ConfigError(f"{asked[0]} is for a single engine; leave it or --data-parallel-size out.")
        self._config = config
        self._service = config.http.service
        self._replicas: list[Replica] = []
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        self._failed: asyncio.Future[int]  # the exit code of a launch that has failed
        self._restarting: asyncio.Task[None] | None = None
        self._weight_fds: tuple[int, ...] = ()

    async def run(self) -> int:
        """From start to stop. The exit code."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        signals = Signals()
        listening = Listening(self._config.http.listen)
        folder = make_run_folder()
        lifeline, lifeline_held = os.pipe()
        self._weight_fds = tuple(new_segments(self._config.engine))  # the engines share one copy
        try:
            self._replicas = [
                Replica(i, _of_replica(self._config, i, folder), folder, lifeline, self._weight_fds)
                for i in range(self._config.engine.data_parallel_size)
            ]
            self._router = RouterServer(_of_router(self._config, self._replicas), listening)
            for replica in self._replicas:
                await self._start(replica)
            self._router.start()
            if not await self._until_ready(signals):
                return await self._stop(signals, 0.0)
            await self._router.open()
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
            close_segments(self._weight_fds)
            remove_run_folder(folder)

    async def _start(self, replica: Replica) -> None:
        await replica.start()
        self._watchers[replica] = asyncio.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        """Replaces the engine when it dies."""
        code = await replica.process.wait()
        if replica.is_stopping or self._failed.done():
            return
        now = time.monotonic()
        self._deaths.append(now)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        too_many = len(self._deaths) > MAX_DEATHS and now - self._deaths[0] < DEATHS_WINDOW_S
        if too_many or not self._router.is_open:
            why = f" {len(self._deaths)} engines have died in {now - self._deaths[0]:.0f} s." if too_many else ""
            print(f"pagewire: engine {replica.index} {how}.{why} Stopping.", file=sys.stderr, flush=True)
            self._failed.set_result(max(1, code))
            return
        print(f"pagewire: engine {replica.index} {how} and is replaced.", file=sys.stderr, flush=True)
        await self._start(replica)

    async def _until_ready(self, signals: Signals) -> bool:
        """Whether all engines are ready; False if a signal or the end of an engine came first. Raises StartError."""
        deadline = time.monotonic() + self._service.start_timeout_s
        while not all(engine.is_able for engine in self._router.fleet.engines):
            if signals.num or self._failed.done():
                return False
            if time.monotonic() > deadline:
                raise StartError(f"The engines are not ready in time ({self._service.start_timeout_s:g} s).")
            await self._router.fleet.news(asyncio.get_running_loop().time() + 0.5)
        return True

    def _on_hangup(self) -> None:
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart_in_turn())

    async def _restart_in_turn(self) -> None:
        """Restarts each engine: it gets no new requests, finishes its own or leaves them to the others, and starts.
        They share new memory for their weights, since the checkpoint may be a new one."""
        close_segments(self._weight_fds)
        self._weight_fds = tuple(new_segments(self._config.engine))
        for replica in self._replicas:
            replica.weight_fds = self._weight_fds
        for replica in self._replicas:
            engine = self._router.fleet.find(replica.url)
            assert engine is not None, replica.url
            engine.leave()
            await replica.stop(self._service.drain_timeout + STOP_GRACE_S)
            engine.lost("It restarts.")
            engine.leave(False)
            await self._start(replica)
            deadline = asyncio.get_running_loop().time() + self._service.start_timeout_s
            while not engine.is_able and await self._router.fleet.news(deadline):
                pass
        print("pagewire: every engine was restarted.", file=sys.stderr, flush=True)

    async def _stop(self, signals: Signals, grace_s: float) -> int:
        """Stops the router first, then the engines. The exit code."""

        async def stop() -> None:
            if self._restarting is not None:
                self._restarting.cancel()
            await self._router.close(grace_s)
            await asyncio.gather(*(replica.stop(STOP_GRACE_S) for replica in self._watchers))

        if not await signals.unless_again(stop()):
            return 130
        return 0 if not self._failed.done() else self._failed.result()

    def _announce(self) -> None:
        names, num = self._config.engine.served_model_names, len(self._replicas)
        print(
            f"pagewire serves {names[0]} with {num} engines\nlistening on {self._router.url}",
            file=sys.stderr,
            flush=True,
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
    size = engine.tensor_parallel_size * engine.pipeline_parallel_size
    cpu_sets = engine.cpu_sets[index * size : (index + 1) * size]
    engine = replace(engine, device="cuda" if has_gpu else engine.device, cpu_sets=cpu_sets)
    return ServerConfig(engine=engine, http=http)


def _of_router(config: ServerConfig, replicas: list[Replica]) -> RouteConfig:
    return RouteConfig(http=config.http, engines=tuple(replica.url for replica in replicas))


def main(launch_file: str) -> int:
    """An engine's process. The exit code."""
    launch = msgspec.json.decode(Path(launch_file).read_bytes(), type=Launch)
    Path(launch_file).unlink()
    tie_life_to(launch.launcher_pid, launch.lifeline_fd)
    return run_supervisor(Supervisor(launch.config, quiet=True, weight_fds=launch.weight_fds))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

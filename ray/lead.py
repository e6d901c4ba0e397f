"""`pagewire serve --backend ray`: a lead whose followers Ray starts, and the broker that asks Ray for them.

The lead runs everything but the ranks. Which node has which part is Ray's decision; when a part counts as lost and what
is then replaced is decided as without Ray.
"""

import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq
from msgspec.structs import replace

from ..config.config import ServerConfig, num_machines
from ..config.resolve import note_on_folders
from ..errors import ConfigError, StartError
from ..ipc.zmq_channel import Keys, check_address, read_keys
from ..procs import interpreter
from ..procs.lead import Lead
from ..procs.machine import listen, unused_address
from .placing import (
    Connect,
    Connected,
    Ended,
    Failed,
    FollowerLaunch,
    FromBroker,
    Place,
    Refusal,
    Release,
    ToBroker,
    Waiting,
)

_CONNECT_S = 30.0
_RELEASE_S = 20.0
_AGAIN_S = 2.0  # until a broker that has ended is replaced
_ROOT = Path(__file__).resolve().parents[1]


async def serve(config: ServerConfig) -> int:
    """The exit code. Raises ConfigError, StartError."""
    engine, service = config.engine, config.http.service
    if engine.data_parallel_size > 1:
        raise ConfigError("--backend ray needs --data-parallel-size 1; Ray Serve starts several engines.")
    if service.key_file is not None:
        keys = read_keys(Path(service.key_file))
    else:
        keys = Keys(*(key.decode() for key in zmq.curve_keypair()))
    url = urlsplit(service.join_address or "")
    broker = Broker(Connect(f"pagewire-{secrets.token_hex(6)}", url.hostname))
    try:
        cluster = await broker.connect()
        if note := note_on_folders(engine, "--backend ray"):
            broker.say(note)
        address = f"tcp://{url.hostname}:{url.port}" if url.port else unused_address(url.hostname or cluster.host)
        check_address(address, keys)
        service = replace(service, join_address=address)
        http = replace(config.http, service=service)
        lead = RayLead(ServerConfig(engine=engine, http=http), keys=keys, broker=broker)
        return await lead.run()
    finally:
        await broker.end()


class RayLead(Lead):
    """`run` is called once."""

    def __init__(self, config: ServerConfig, *, keys: Keys, broker: "Broker") -> None:
        super().__init__(config, keys=keys, works=False)
        self._broker = broker
        num_parts = num_machines(self._service, self._num_stages)
        num_ranks = float(len(self._ranks) // num_parts)
        bundle = {"CPU": num_ranks} | ({"GPU": num_ranks} if self._config.kernels is None else {})
        secret = None if self._service.key_file else keys.secret
        launch = FollowerLaunch(self._join_address, keys.public, secret, self._service.key_file)
        host = urlsplit(self._join_address).hostname or ""
        self._life = listen(host)  # a port of its own: another lead may soon answer at a join address that is fixed
        self._place = Place(num_parts, bundle, launch, (host, self._life.getsockname()[1]))
        self._refusal = ""  # of a node, before the engine has begun

    async def run(self) -> int:
        """The exit code."""
        async with await asyncio.start_server(lambda _, writer: writer.close(), sock=self._life):
            self._broker.place(self._place)
            return await super().run()

    def _waits_for(self, waiting: str) -> str:
        return f"waiting for a node for {waiting}: {self._broker.waits_for or 'its follower joins soon'}"

    def _call_for(self, waiting: str) -> str:
        return f"{self._waits_for(waiting)}."

    def _ask_for_room(self, num_machines: int) -> bool:
        return True  # the broker sees nodes that are about to end itself

    def _check_followers(self) -> None:
        """Raises ConfigError if a node cannot take part and the engine has not begun: what is missing there is for the
        operator to correct. Later it is told, and the broker asks that node again after a while."""
        super()._check_followers()
        for reason in self._broker.take_refusals():
            self._refuse(reason)
        if self._refusal and not self._begun:
            raise ConfigError(self._refusal)

    def _refuse(self, reason: str) -> None:
        if self._begun:
            super()._refuse(reason)
        else:
            self._refusal = reason

    async def _stop(self, reason: str, grace_s: float = 0.0, *, hands_over: bool = False) -> int:
        self._broker.is_ending = True
        return await super()._stop(reason, grace_s, hands_over=hands_over)


class Broker:
    """The broker's process, as the lead has it: started again when it ends."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._place: Place | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_ending = False  # its news is of no interest any more
        self.waits_for = "Ray is asked for room"  # a clause; empty: for nothing of Ray
        self._refusals: list[str] = []

    async def connect(self) -> Connected:
        """Says which cluster it is. Raises StartError, ConfigError."""
        self._process = await self._start()
        try:
            async with asyncio.timeout(_CONNECT_S):
                message = await self._next()
        except TimeoutError:
            raise ConfigError(
                f"Ray does not answer ({_CONNECT_S:g} s); does `ray status` here, or does RAY_ADDRESS name a head node?"
            ) from None
        if isinstance(message, Failed):
            raise ConfigError(message.reason)
        if not isinstance(message, Connected):
            raise StartError("The process that asks Ray for room has ended; its lines above say why.")
        num = f"{message.num_nodes} node{'s' if message.num_nodes != 1 else ''}"
        resources = " and ".join(f"{message.resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        self.say(f"Ray's cluster at {message.head} has {num} with {resources}.")
        self._connect = replace(self._connect, head=message.head)  # another broker joins no other cluster
        return message

    def take_refusals(self) -> list[str]:
        """Why nodes cannot take part, since the last call: sentences."""
        taken, self._refusals = self._refusals, []
        return taken

    def place(self, place: Place) -> None:
        """Has it ask for this room until the end."""
        self._place = place
        self._task = asyncio.ensure_future(self._keep())

    async def end(self) -> None:
        """Gives all room back."""
        self.is_ending = True
        process = self._process
        if process is not None and process.returncode is None:
            self._send(Release())
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _keep(self) -> None:
        assert self._place is not None
        while True:
            self._send(self._place)
            while (message := await self._next()) is not None:
                self._heard(message)
            if self.is_ending:
                return
            self.say("the process that is connected to Ray has ended; what runs goes on. Starting another one.")
            while not self.is_ending:
                await asyncio.sleep(_AGAIN_S)
                self._process = await self._start()
                if isinstance(message := await self._next(), Connected):
                    break
                self.waits_for = message.reason if isinstance(message, Failed) else "Ray does not answer"

    def _heard(self, message: FromBroker) -> None:
        if isinstance(message, Waiting):
            self.waits_for = message.what
        elif isinstance(message, Refusal):
            self._refusals.append(message.reason)
        elif isinstance(message, Ended) and not self.is_ending:
            self.say(f"{message.what}.")

    async def _start(self) -> asyncio.subprocess.Process:
        environment = interpreter.environment()
        path = environment["PYTHONPATH"].split(os.pathsep)  # with the root of this package, `import ray` finds its room
        environment["PYTHONPATH"] = os.pathsep.join(one for one in path if Path(one).resolve() != _ROOT)
        process = await asyncio.create_subprocess_exec(
            *interpreter.COMMAND,
            "pagewire.ray.broker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",  # Ray adds the working folder to the path of every actor
            start_new_session=True,  # Ctrl-C is for the lead
        )
        self._process = process
        self._send(self._connect)
        return process

    def _send(self, message: ToBroker) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, which `_next` sees
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _next(self) -> FromBroker | None:
        """None: the process has ended."""
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            await self._process.wait()
            return None
        message: FromBroker = msgspec.json.decode(line, type=FromBroker)
        return message

    def say(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)

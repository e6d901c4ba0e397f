"""The configuration, secrets and environment that a child process gets, and what it answers to a ping."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from fakes import FakeWorker, enqueue
from harness import CONFIG, http_config
from msgspec.structs import replace
from waiting import until_async

from pagewire.config.access import ApiKey
from pagewire.config.config import ListenOptions
from pagewire.ipc.channel import Inbox
from pagewire.ipc.epochs import Epochs
from pagewire.ipc.messages import CacheOffer, Message, Ping, Pong, StepPlan, StepResult, Stop, ToCore
from pagewire.ipc.zmq_channel import ZmqContext
from pagewire.procs import interpreter
from pagewire.procs.child import Launch, make_actor, rank_hosts, run_actor, step_age_of
from pagewire.procs.environment import environment_of
from pagewire.procs.topology import kind, names

SECRETS = ("sk-user", "sk-admin", "/secret/tls.key", "collector-password")
LAUNCH = Launch(
    config=CONFIG,
    http=replace(
        http_config(otlp_traces_endpoint=f"http://user:{SECRETS[3]}@127.0.0.1:4318"),
        listen=ListenOptions(ssl_certfile="cert", ssl_keyfile=SECRETS[2]),
        api_keys=(ApiKey(SECRETS[0]),),
        admin_keys=(ApiKey(SECRETS[1]),),
    ),
    num_apis=2,
    addresses={},
    keys=None,
    supervisor_pid=1,
    lifeline_fd=3,
    http_fd=4,
    progress=False,
)


@pytest.mark.parametrize("name", names(2, 2))
def test_only_api_processes_get_secrets(name: str) -> None:
    message = msgspec.json.encode(LAUNCH.part_of(name))
    found = [secret for secret in SECRETS if secret.encode() in message]
    assert found == (list(SECRETS) if kind(name) == "api" else [])
    launch = msgspec.json.decode(message, type=Launch)
    assert launch.config == CONFIG and launch.num_apis == 2


@pytest.mark.parametrize("name", names(2, 2))
def test_environments_hold_only_the_secrets_that_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in interpreter.SECRETS:
        monkeypatch.setenv(variable, "secret")
    monkeypatch.setenv("NO_SECRET", "x")
    environment = environment_of(name, CONFIG, ranks_are_here=True)
    assert environment["NO_SECRET"] == "x"
    left = {variable for variable, value in environment.items() if value == "secret"}
    assert left == (set(interpreter.COLLECTOR_HEADERS) if kind(name) == "api" else set())


@pytest.mark.parametrize(
    ("addresses", "hosts"),
    [
        ({"worker": "ipc:///run/worker", "worker-1": "ipc:///run/worker-1"}, ()),
        ({"worker": "ipc:///run/worker", "worker-1": "tcp://10.0.0.2:4000"}, ("", "10.0.0.2")),
        ({"worker": "tcp://10.0.0.3:4000", "worker-1": "tcp://[fd00::2]:4000"}, ("10.0.0.3", "[fd00::2]")),
    ],
)
def test_where_ranks_are_is_known_by_their_mailboxes(addresses: dict[str, str], hosts: tuple[str, ...]) -> None:
    assert rank_hosts({**addresses, "core": "tcp://10.0.0.1:4000"}, 2) == hosts


def test_the_core_says_with_its_pong_for_how_long_it_has_waited_for_a_step(tmp_path: Path) -> None:
    worker = FakeWorker(num_blocks=100, block_size=CONFIG.block_size, max_num_seqs=8, max_num_batched_tokens=64)
    pongs: list[Pong] = []
    results: list[StepResult] = []

    def post(receiver: str, message: Message) -> None:
        if isinstance(message, Pong):
            pongs.append(message)
        elif isinstance(message, StepPlan):
            results.append(worker.run(message))

    async def scenario(context: ZmqContext) -> None:
        address = f"ipc://{tmp_path}/core"
        core = make_actor("core", LAUNCH)
        inbox: Inbox[object] = context.inbox(address, ToCore)
        outbox = context.outbox(address)
        age_s = step_age_of("core", core)
        running = asyncio.ensure_future(run_actor("core", core, Epochs(), inbox, post, lambda facts: None, 0, age_s))

        async def pong() -> Pong:
            outbox.send(Ping())
            await until_async(lambda: pongs, "it answers")
            return pongs.pop()

        assert (await pong()).step_age_s == 0.0
        outbox.send(CacheOffer(0, 100, block_bytes=64))
        outbox.send(enqueue(0, [1, 2, 3], max_tokens=2, seed=1, ignore_eos=True))
        age_s_before = (await pong()).step_age_s
        assert 0.0 < age_s_before < (await pong()).step_age_s
        while results:
            outbox.send(results.pop(0))
            last = await pong()
        assert last.step_age_s == 0.0
        outbox.send(Stop(0.0, "The test ends."))
        await running

    context = ZmqContext()
    try:
        asyncio.run(scenario(context))
    finally:
        context.close()
    assert step_age_of("api", None)() == 0.0

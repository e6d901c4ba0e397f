"""The configuration, secrets and environment that a child process gets."""

import msgspec
import pytest
from harness import CONFIG, http_config
from msgspec.structs import replace

from pagewire.config.access import ApiKey
from pagewire.config.config import ListenOptions
from pagewire.procs import interpreter
from pagewire.procs.child import Launch, rank_hosts
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

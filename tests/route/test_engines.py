"""What a router says of its engines, in its log and in /health: why they are not ready, and how they differ."""

import asyncio
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate, needs_openssl
from harness import FakeEngine
from msgspec.structs import replace
from waiting import until

from pagewire.ipc.messages import Snapshot, TierSnapshot
from pagewire.route import engines
from pagewire.route.load_report import MAX_KEYS
from pagewire.tools.servers import free_port

from .routed import Behind, Routed

PIECES = ["Hel", "lo"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def states(router: Routed) -> dict[str, dict[str, Any]]:
    """The engines in /health by URL."""
    return {state["url"]: state for state in router.ask("/health").json["engines"]}


def lines(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if about in record.getMessage()]


def lines_missing(caplog: pytest.LogCaptureFixture, *urls: str) -> list[str]:
    return [url for url in urls if not lines(caplog, url)]


def check_again(router: Routed) -> None:
    """Checks every engine twice more than the router does."""
    for engine in [*router.server.fleet.engines, *router.server.fleet.engines]:
        asyncio.run_coroutine_threadsafe(engine.check(), router.loop).result(100)


def resolve_as(monkeypatch: pytest.MonkeyPatch, name: str, address: str | None) -> None:
    """Resolves a name without DNS; None: it does not exist."""
    resolve = socket.getaddrinfo

    def resolve_here(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == name and address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(address if host == name else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)


def test_engines_that_were_never_reached_are_a_line_each(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_as(monkeypatch, "engine.invalid", None)
    refusing, unknown = f"http://127.0.0.1:{free_port()}", "http://engine.invalid:8000"
    absent = "unix:/nothing/is/here"
    whole = stack.enter_context(Behind(FakeEngine(PIECES)))
    router = stack.enter_context(Routed(whole, refusing, unknown, absent, wait=False))
    until(lambda: not lines_missing(caplog, refusing, unknown, absent), "each has its line")
    router.wait_ready(1)
    check_again(router)
    found = states(router)
    assert found[refusing]["trouble"] == "It cannot be reached: Connection refused."
    assert found[unknown]["trouble"].startswith("The name engine.invalid cannot be resolved: ")
    assert found[absent]["trouble"] == "It cannot be reached: No such file or directory."
    for url in (refusing, unknown, absent):
        assert lines(caplog, url) == [f"engine {url} is not ready: {found[url]['trouble']}"]
    assert lines(caplog, whole.address) == [f"engine {whole.address} is ready"]


def test_a_silent_engine_is_a_line(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CHECK_TIMEOUT_S", 0.1)
    silent = stack.enter_context(listener())
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    router = stack.enter_context(Routed(url, wait=False))
    until(lambda: lines(caplog, url), "it has its line")
    check_again(router)
    assert lines(caplog, url) == [f"engine {url} is not ready: It does not answer within 0.1 s."]


@needs_openssl
def test_tls_that_fails_is_told_from_other_faults(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    make_certificate(tmp_path, "authority")
    make_certificate(tmp_path, "server", "authority")
    tls: dict[str, Any] = {"ssl_certfile": str(tmp_path / "server.pem"), "ssl_keyfile": str(tmp_path / "server.key")}
    plain = stack.enter_context(Behind(FakeEngine(PIECES)))
    secret = stack.enter_context(Behind(FakeEngine(PIECES), **tls))
    https = {url: f"https://127.0.0.1:{url}" for url in (plain.port, secret.port)}
    router = stack.enter_context(Routed(https[plain.port], https[secret.port], secret.address, wait=False))
    until(lambda: not lines_missing(caplog, *https.values(), secret.address), "each has its line")
    found = {url: state["trouble"] for url, state in states(router).items()}
    assert found[https[plain.port]] == "TLS with it fails: wrong version number."
    assert found[https[secret.port]] == "Its certificate is not trusted: unable to get local issuer certificate."
    assert found[secret.address].endswith("if it uses TLS, write https:// in its address.")
    trusting = stack.enter_context(Routed(https[secret.port], cacert=str(tmp_path / "authority.pem")))
    assert trusting.complete().status == 200


def test_an_engine_that_refuses_the_key_is_not_ready_until_it_takes_it(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    refusing = Behind(FakeEngine(PIECES), listener(port), api_keys=("right",))
    router = stack.enter_context(Routed(refusing, wait=False, api_keys=("wrong",), outage_wait=0.05))
    sentence = "It refuses this router's API key (status 401); give both the same --api-key."
    try:
        until(lambda: lines(caplog, sentence), "the log has it")
        check_again(router)
        assert lines(caplog, refusing.address) == [f"engine {refusing.address} is not ready: {sentence}"]
        (state,) = states(router).values()
        assert (state["ready"], state["trouble"]) == (False, sentence)
        assert router.ask("/ready").status == 503 and router.ask("/health").json["status"] == "no engine"
        answer = router.complete()
        assert answer.status == 401, "the router itself asks for the key"
        assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key="wrong").code == "engine_unavailable"
    finally:
        refusing.stop()
    caplog.clear()
    stack.enter_context(Behind(FakeEngine(PIECES), listener(port), api_keys=("wrong",)))
    router.wait_ready(1)
    assert lines(caplog, refusing.address) == [f"engine {refusing.address} is ready"]
    assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key="wrong").status == 200


def test_an_engine_that_comes_back_with_another_key_gets_no_requests(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    first = Behind(FakeEngine(PIECES), listener(port), api_keys=("a",))
    router = stack.enter_context(Routed(first, api_keys=("a",)))
    first.stop()
    second = stack.enter_context(Behind(FakeEngine(PIECES), listener(port), api_keys=("b",)))
    until(lambda: lines(caplog, "It refuses this router's API key"), "the log has it")
    assert not states(router)[second.address]["ready"]


def test_an_engine_that_refuses_one_of_several_keys_has_a_warning(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    engine = stack.enter_context(Behind(FakeEngine(PIECES), api_keys=("b",)))
    router = stack.enter_context(Routed(engine, api_keys=("a", "b")))
    check_again(router)
    sentence = "It refuses 1 of this router's 2 API keys; give both the same keys."
    assert states(router)[engine.address]["warning"] == sentence
    assert lines(caplog, sentence) == [f"engine {engine.address}: {sentence}"]
    assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key="b").status == 200


def test_an_engine_that_has_only_a_key_that_is_not_tried_gets_requests(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tuple(f"{i}" for i in range(MAX_KEYS + 1))
    engine = stack.enter_context(Behind(FakeEngine(PIECES), api_keys=keys[-1:]))
    router = stack.enter_context(Routed(engine, wait=False, api_keys=keys))
    until(lambda: states(router)[engine.address]["ready"], "it is ready")
    check_again(router)
    state = states(router)[engine.address]
    assert state["warning"].startswith("It refuses the first 8 of this router's 9 API keys, so ")
    assert len(lines(caplog, state["warning"])) == 1
    assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key=keys[-1]).status == 200


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_an_engine_that_does_not_answer_to_this_name_says_so_itself(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    behind = stack.enter_context(Behind(FakeEngine(PIECES)))
    resolve_as(monkeypatch, "engine.example", "127.0.0.1")
    url = f"http://engine.example:{behind.port}"
    router = stack.enter_context(Routed(url, wait=False, api_keys=keys))
    until(lambda: lines(caplog, url), "it has its line")
    check_again(router)
    (line,) = lines(caplog, url)
    assert line.startswith(f"engine {url} is not ready: A server without keys that listens on loopback answers to ")


def test_a_ready_that_asks_for_a_key_has_its_own_sentence(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    foreign = stack.enter_context(Foreign())
    thread = threading.Thread(target=foreign.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stack.callback(foreign.shutdown)
    foreign.answers = {"/ready": (401, b'{"error": {"message": "Who is there?"}}'), "/load": (401, b"")}
    router = stack.enter_context(Routed(foreign.url, wait=False, api_keys=("a",)))
    until(lambda: lines(caplog, foreign.url), "it has its line")
    check_again(router)
    assert lines(caplog, foreign.url) == [f"engine {foreign.url} is not ready: Who is there?"]


def test_a_router_without_a_key_passes_on_those_of_its_clients(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    engine = stack.enter_context(Behind(FakeEngine(PIECES), api_keys=("a",)))
    router = stack.enter_context(Routed(engine))
    check_again(router)
    warning = states(router)[engine.address]["warning"]
    assert warning == "It asks for an API key, and this router has none, so its load and its models are unknown."
    assert len(lines(caplog, warning)) == 1
    assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key="a").status == 200


class Foreign(ThreadingHTTPServer):
    """A server that is no engine. Answers by path; any other one gets 502, as from a proxy whose server is away."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, Foreign)
            status, body = self.server.answers.get(self.path, (502, b""))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""


@pytest.mark.usefixtures("no_own_checks")
def test_a_load_that_cannot_be_read_is_a_warning_until_it_can(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = stack.enter_context(Foreign())
    thread = threading.Thread(target=foreign.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stack.callback(foreign.shutdown)
    router = stack.enter_context(Routed(foreign.url, wait=False))
    until(lambda: lines(caplog, foreign.url), "it has its line")
    check_again(router)
    assert lines(caplog, foreign.url) == [f"engine {foreign.url} is not ready: It is not ready (status 502)."]
    assert states(router)[foreign.url]["warning"] is None, "its /load is not the trouble"
    foreign.answers["/ready"] = 200, b"{}"
    check_again(router)
    warning = "Its /load cannot be read (status 502), so its load and its models are unknown."
    assert states(router)[foreign.url]["warning"] == warning
    foreign.answers["/load"] = 200, b'{"server_load": 1}'
    check_again(router)
    assert states(router)[foreign.url]["warning"] is None
    assert lines(caplog, foreign.url)[1:] == [
        f"engine {foreign.url} is ready",
        f"engine {foreign.url}: {warning}",
        f"engine {foreign.url}: this is over: {warning}",
    ]


def test_engines_of_a_model_that_differ_are_a_line_and_a_warning(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_COMPARE_INTERVAL_S", math.inf)  # until it has heard from all
    facts: list[dict[str, Any]] = [
        {"max_model_len": 128, "files_digest": "a"},
        {"max_model_len": 64, "files_digest": "b"},
    ]
    usual, odd = (stack.enter_context(Behind(FakeEngine(PIECES), **each)) for each in facts)
    other = stack.enter_context(Behind(FakeEngine(PIECES), served_model_names=("other",), **facts[1]))
    third = stack.enter_context(Behind(FakeEngine(PIECES), **facts[0]))
    router = stack.enter_context(Routed(usual, odd, other, third, admin_keys=("root",)))
    monkeypatch.setattr(engines, "_COMPARE_INTERVAL_S", 0.0)
    until(lambda: states(router)[odd.address]["warning"], "the difference is found")
    told = [line for line in lines(caplog, "differ in their") if "no longer" not in line]
    assert len({*told}) == len(told) and any(f"128 ({usual.address}, {third.address})" in line for line in told)
    found = {url: state["warning"] for url, state in states(router).items()}
    models = "demo, org/demo-alias"
    assert found == {
        usual.address: None,
        third.address: None,
        other.address: None,
        odd.address: f"It serves {models} with files_digest b, and {usual.address} with a. "
        f"It serves {models} with max_model_len 64, and {usual.address} with 128.",
    }
    router.ask("/admin/engines", {"remove": odd.address}, authorization="Bearer root")
    until(lambda: len(lines(caplog, "no longer differ")) == 2, "the log says that it is over")
    assert not any(state["warning"] for state in states(router).values())


SNAPSHOT = Snapshot(1, 0, 0, 8, 0, 0, 0, 0, 0, 0.0)
ROLES = {
    "prefill": "p2p,serve=tcp://127.0.0.1:7,key-file=keys,role=prefill",
    "decode": "p2p,peer=named,key-file=keys,role=decode",
    "both, named": "p2p,peer=named,key-file=keys",
    "both": "p2p,peer=/kv",
}


@pytest.mark.parametrize("other", ["decode", "both, named", "both"])
def test_engines_with_roles_between_which_no_kv_travels_are_told(
    other: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any request, as their key files differ, or what makes KV useless elsewhere. Of engines without a role the
    router has none travel."""
    behind, found = [], []
    for role, digest, length in (("prefill", "a", 128), (other, "b", 64)):
        engine = FakeEngine(PIECES)
        tier = TierSnapshot("p2p", 0, 0, 0, 0, 0, 0, kv_digest=digest)
        engine.gateway.handle([replace(SNAPSHOT, tiers=(tier,))])
        facts: dict[str, Any] = {"kv_connector": (ROLES[role],), "max_model_len": length}
        behind.append(engine)
        found.append(stack.enter_context(Behind(engine, **facts)))
    router = stack.enter_context(Routed(*found))
    until(lambda: any(state["warning"] for state in states(router).values()), "they were compared")
    told = lines(caplog, "differ in their kv_digest")
    assert len(told) == (other != "both") and all("b (" in line for line in told)
    before = [engine.offers for engine in router.server.fleet.engines]
    for fake in behind:
        fake.gateway.handle([SNAPSHOT])  # of a core that has begun and does not say it yet
    check_again(router)
    assert [engine.offers for engine in router.server.fleet.engines] == before

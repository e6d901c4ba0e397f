"""Sleep and wake-up over HTTP: keys, answers and refusals."""

from typing import Any

import pytest
from harness import Client, FakeEngine, make_app, request, run

from pagewire.api.admin.endpoints import Sleeper
from pagewire.api.gateway.gateway import Gateway
from pagewire.config.access import ApiKey
from pagewire.ipc.messages import Reset, Sleep, Wake

ON: dict[str, Any] = {"admin_keys": (ApiKey("admin"),), "enable_sleep_mode": True}
ADMIN = {"authorization": "Bearer admin"}
PATHS = [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]


def test_an_engine_is_put_to_sleep_and_woken() -> None:
    engine = FakeEngine()
    app = make_app(engine, **ON)

    async def work() -> None:
        async def ask(method: str, path: str) -> object:
            return (await Client(app).call(method, path, headers=ADMIN)).json

        assert await ask("GET", "/is_sleeping") == {"is_sleeping": False}
        assert await ask("POST", "/sleep?level=1") == {"is_sleeping": True, "freed_bytes": 1000}
        assert await ask("GET", "/is_sleeping") == {"is_sleeping": True}
        ready = await Client(app).call("GET", "/ready")
        assert ready.status == 503 and "sleeps" in ready.error["message"] and ready.headers["retry-after"]
        assert (await Client(app).call("GET", "/health")).status == 200
        assert await ask("POST", "/wake_up") == {"is_sleeping": False}
        assert (await Client(app).call("GET", "/ready")).status == 200

    run(work())


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_an_admin_key_is_required_and_valid_nowhere_else(method: str, path: str) -> None:
    keys: dict[str, Any] = {**ON, "api_keys": ("user",)}
    user = {"authorization": "Bearer user"}
    assert request(FakeEngine(), path, b"", method=method, **keys).status == 401
    reads = method == "GET"  # production-stack's router asks with the key that it has for all requests
    assert request(FakeEngine(), path, b"", method=method, headers=user, **keys).status == (200 if reads else 401)
    assert request(FakeEngine(), path, b"", method=method, headers=ADMIN, **keys).status == 200
    assert request(FakeEngine(), "/v1/models", headers=ADMIN, **keys).status == 401
    assert request(FakeEngine(), "/v1/models", headers=user, **keys).status == 200
    without = request(FakeEngine(), path, b"", method=method, **ON).status
    assert without == (200 if reads else 401), "also if users need no key"


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_without_the_flag_the_endpoints_do_not_exist(method: str, path: str) -> None:
    assert request(FakeEngine(), path, b"", method=method).status == 404
    assert request(FakeEngine(), path, b"", method=method, headers=ADMIN, admin_keys=ON["admin_keys"]).status == 404


@pytest.mark.parametrize(
    ("path", "name"), [("/sleep?level=2", "level"), ("/sleep?mode=abort", "mode"), ("/wake_up?tags=weights", "tags")]
)
def test_unsupported_parameters_are_refused_by_name(path: str, name: str) -> None:
    engine = FakeEngine()
    answer = request(engine, path, b"", method="POST", headers=ADMIN, **ON)
    assert answer.status == 400 and answer.error["param"] == name and not engine.is_asleep


def test_a_wake_that_fails_is_a_503() -> None:
    engine = FakeEngine()
    engine.problem = "There is too little free memory to wake up; free some and try again."
    answer = request(engine, "/wake_up", b"", method="POST", headers=ADMIN, **ON)
    assert answer.status == 503 and "too little free memory" in answer.error["message"]


def test_no_engine_sleeps_without_one_that_is_not_ready() -> None:
    engine = _of_two("It has ended.")
    answer = request(engine, "/sleep", b"", method="POST", headers=ADMIN, **ON)
    assert answer.status == 503 and "Engine 1 is not ready. It has ended." in answer.error["message"]
    assert not engine.is_asleep


def test_an_engine_is_woken_without_one_that_was_given_up() -> None:
    engine = _of_two("It has ended.")
    engine.is_asleep = True
    assert request(engine, "/wake_up", b"", method="POST", headers=ADMIN, **ON).json == {"is_sleeping": False}
    assert not engine.is_asleep
    engine.gateway.handle([Reset(2, 2, (), "It has ended, too.", 0)])
    answer = request(engine, "/wake_up", b"", method="POST", headers=ADMIN, **ON)
    assert answer.status == 503 and "Engine 0 is not ready. It has ended, too." in answer.error["message"]


def _of_two(reason: str) -> FakeEngine:
    """The first of two engines. The second one is away and answers nothing."""

    def nobody(message: Sleep | Wake) -> None:
        raise AssertionError("it is away")

    engine = FakeEngine()
    engine.gateway = Gateway(engine.post, lambda message: None)
    engine.sleeper = Sleeper(engine.rest, nobody)
    engine.gateway.handle([Reset(2, 2, (), reason, 1)])
    return engine

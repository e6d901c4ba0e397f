"""kv_transfer_params: the forms that proxies send, and what is refused by name. The transfer itself is in
tests/test_prefill_decode.py."""

from typing import Any

import pytest
from harness import Answer, FakeEngine, request

SERVES = ("p2p,serve=/tmp/kv",)
ASKS = ("p2p,peer=/tmp/kv",)
SHARED = ("shared,path=/tmp/kv,size=1G",)
ENGINE = {"kv_request_id": "1", "remote_host": "10.1.2.3", "remote_port": 7777}
# The prefill leg of llm-d's nixlv2 connector, as its tests record it (connector_nixlv2_test.go, 2026-08-21).
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
# What a prefill engine answers there; production-stack's router overwrites remote_host.
DECODE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1, 2, 3],
    "remote_engine_id": "5b5fb28f-3f30-4bdd-9a36-958d52459200", "remote_host": "ahost", "remote_port": 4032,
}  # fmt: skip


CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
COMPLETE = "/v1/completions", {"prompt": "abc"}


def ask(engine: FakeEngine, to: tuple[str, dict[str, Any]] = CHAT, flags: Any = None, **fields: Any) -> Answer:
    path, body = to
    return request(engine, path, {**body, **fields}, **(flags or {}))


@pytest.mark.parametrize("connectors", [SERVES, SHARED])
@pytest.mark.parametrize("params", [PREFILL, {"remote_decoder": {"kv_request_id": "1"}}])
def test_a_prefill_leg_is_answered_with_what_decode_needs(params: Any, connectors: tuple[str, ...]) -> None:
    for to in (CHAT, COMPLETE):
        answer = ask(FakeEngine(), to, {"kv_connector": connectors}, kv_transfer_params=params)
        told = answer.json["kv_transfer_params"]
        assert told["do_remote_prefill"] is True and told["do_remote_decode"] is False
        assert told["remote_request_id"] == answer.json["id"] and told["tp_size"] == 1
        assert told["remote_num_tokens"] == answer.json["usage"]["prompt_tokens"]
        # What it says is accepted where its host may be named.
        decode = FakeEngine()
        peers = (told["remote_host"],)
        again = ask(decode, to, {"kv_connector": SHARED, "kv_peers": peers}, kv_transfer_params=told)
        assert again.status == 200 and "kv_transfer_params" not in again.json
        assert not decode.submits[0].awaits_kv


def test_a_decode_leg_that_is_sent_at_once_waits_for_the_peer() -> None:
    engine = FakeEngine()
    flags = {"kv_connector": ASKS, "kv_peers": ("10.1.*",)}
    for name in ("remote_prefiller", "remote_kv_source"):
        assert ask(engine, CHAT, flags, kv_transfer_params={name: ENGINE}).status == 200
    assert [submit.awaits_kv for submit in engine.submits] == [True, False]


@pytest.mark.parametrize("nothing", [None, {}, {"do_remote_decode": None}])
def test_an_empty_object_says_nothing(nothing: Any) -> None:
    answer = ask(FakeEngine(), kv_transfer_params=nothing)
    assert answer.status == 200 and "kv_transfer_params" not in answer.json


@pytest.mark.parametrize(
    ("params", "flags", "why"),
    [
        (PREFILL, {}, "--kv-connector p2p,serve"),
        (PREFILL, {"kv_connector": ASKS}, "--kv-connector p2p,serve"),
        (DECODE, {"kv_peers": ("*",)}, "--kv-connector p2p,peer"),
        (DECODE, {"kv_connector": SERVES, "kv_peers": ("*",)}, "--kv-connector p2p,peer"),
        (DECODE, {"kv_connector": ASKS}, "'ahost' is not among the hosts of --kv-peers"),
        (DECODE, {"kv_connector": ASKS, "kv_peers": ("a", "host*")}, "'ahost' is not among"),
        ({"remote_prefiller": ENGINE}, {"kv_connector": ASKS, "kv_peers": ("10.2.*",)}, "'10.1.2.3' is not among"),
        ({"remote_kv_source": ENGINE}, {"kv_connector": ASKS}, "'10.1.2.3' is not among"),
        ({**PREFILL, "remote_kv_source": ENGINE}, {"kv_connector": (*SERVES, *SHARED)}, "'10.1.2.3' is not among"),
        ({**PREFILL, "do_remote_prefill": True}, {"kv_connector": SHARED}, "cannot both"),
        ({"do_remote_decode": True, "transfer_id": "1"}, {"kv_connector": SHARED}, "transfer_id is of Mooncake"),
        ({**DECODE, "remote_bootstrap_addr": "x"}, {"kv_connector": SHARED}, "remote_bootstrap_addr is of Mooncake"),
        ({**PREFILL, "remote_notify_port": 1}, {"kv_connector": SHARED}, "remote_notify_port is of MoRI-IO"),
        ({"bootstrap_room": 1}, {"kv_connector": SHARED}, "bootstrap_room is of SGLang"),
        ({"do_remote_decode": "yes"}, {"kv_connector": SHARED}, "do_remote_decode"),
        ({"do_remote_sampling": True}, {"kv_connector": SHARED}, "do_remote_sampling"),
        ({"remote_decoder": {}}, {"kv_connector": SHARED}, "kv_request_id"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(params: Any, flags: dict[str, Any], why: str) -> None:
    for to in (CHAT, COMPLETE):
        engine = FakeEngine()
        answer = ask(engine, to, flags, kv_transfer_params=params)
        assert answer.status == 400 and answer.error["param"] == "kv_transfer_params", answer.json
        assert why in answer.error["message"] and not engine.submits


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "ec_transfer_params"])
def test_the_fields_of_other_transfers_are_refused_by_name(name: str) -> None:
    """SGLang's connector writes the first three into the body itself."""
    fields: dict[str, Any] = {name: 1}
    answer = ask(FakeEngine(), **fields)
    assert (answer.status, answer.error["param"]) == (400, name)


def test_a_cache_threshold_is_handed_on() -> None:
    engine = FakeEngine()
    for value in (None, 0, 0.5, 1):
        assert ask(engine, cache_hit_threshold=value).status == 200
    assert [submit.cache_hit_threshold for submit in engine.submits] == [None, 0, 0.5, 1]
    for bad in (-0.1, 1.1, "x"):
        answer = ask(engine, cache_hit_threshold=bad)
        assert (answer.status, answer.error["param"]) == (400, "cache_hit_threshold")

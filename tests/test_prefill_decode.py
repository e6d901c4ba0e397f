"""Prefill on one engine, decode on another, over HTTP bodies as llm-d's sidecar writes them.

Two whole engines of this process with the API in front of each, but for the sockets of HTTP; the KV travels by the p2p
connector's own socket, or a shared folder. The sidecar's rules are those of llm-d/llm-d-router of 2026-08-21 (ebab687,
`pkg/sidecar/proxy/connector_{nixlv2,shared_storage,p2p}.go`), in our words.
"""

import asyncio
import json
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from harness import Answer, Client, http_config
from torch import Tensor
from waiting import until

from pagewire.api.admin.endpoints import Sleeper
from pagewire.api.app import Served, create_app
from pagewire.api.gateway.gateway import Gateway
from pagewire.config.flags import make_config
from pagewire.engine.kv_connector.p2p_store import BlockStore
from pagewire.engine.kv_connector.p2p_worker import P2pWorker
from pagewire.ipc.messages import Message, TierSnapshot
from pagewire.procs.inline import Inline
from pagewire.procs.prepare import prepare

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
BODY = {
    "messages": [{"role": "user", "content": "Count from 1 to 9. " * 20}],
    "temperature": 0,
    "max_tokens": 12,
}


class _Behind(Inline):
    """The actors behind an api's gateway."""

    gateway: Gateway

    def _hear(self, message: Message) -> None:
        self.gateway.handle([message])  # type: ignore[list-item]  # the actors post nothing else to the api


class Engine:
    """The demo model and the whole API. One request at a time."""

    def __init__(self, *connectors: str, **flags: object) -> None:
        flags = {"threads": 1, "max_model_len": 1024, "kv_connector": connectors, **flags}
        config = prepare(make_config(model="demo", **flags))
        ignored: Callable[[object], None] = lambda _: None  # noqa: E731
        self.inline = _Behind(config, on_chunk=ignored, on_failed=ignored)
        gateway = self.inline.gateway = Gateway(self._post)
        sleeper = Sleeper(lambda message: None)
        self._app = create_app([Served(gateway, config, sleeper, lambda: None)], http_config(), version="1")

    def _post(self, message: Message) -> None:
        self.inline.post("tokenizer", message)
        asyncio.get_running_loop().call_soon(self.inline.run)

    def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Answer:
        async def call() -> Answer:
            async with asyncio.timeout(60):
                return await Client(self._app).call("POST", path, json.dumps(body).encode())

        answer = asyncio.run(call())
        assert answer.status == 200, answer.error
        return answer

    @property
    def tier(self) -> TierSnapshot:
        connector = self.inline.scheduler.connector
        assert connector is not None
        return connector.tiers()[0]


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def begin(*connectors: str, **flags: object) -> Engine:
        engines.append(Engine(*connectors, **flags))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.inline.close()


@pytest.fixture
def always_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine computing may be measured to be cheaper than loading."""
    monkeypatch.setattr("pagewire.engine.core.cost._MIN_OBSERVED", sys.maxsize)


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="pw-")  # sockets need short paths
    yield path
    shutil.rmtree(path)


def text(answer: Answer) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


def num_cached(answer: Answer) -> int:
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def primed(body: dict[str, Any]) -> dict[str, Any]:
    """A prefill leg's body without its transfer parameters: one token, not streamed."""
    return {**body, "max_tokens": 1, "stream": False}


@pytest.mark.usefixtures("always_loads")
def test_legs_of_nixlv2_and_offloading(start: Callable[..., Engine], folder: str) -> None:
    prefill = start(f"p2p,serve={folder}/kv,size=64M")
    peer = f"p2p,peer={folder}/kv,timeout_ms=20000,wait_ms=20000,fetch_timeout_ms=60000"
    decode = start(peer, kv_peers=(HOST, "prefill-*"))
    wanted = text(prefill.ask({**BODY, "cache_salt": "of-another-prompt"}))

    # nixlv2: one leg after the other; the first one's answer goes verbatim into the second.
    asked = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    leg = {"do_remote_decode": True, "do_remote_prefill": False, **asked}
    first = prefill.ask({**primed(BODY), "max_completion_tokens": 1, "kv_transfer_params": leg})
    told = first.json["kv_transfer_params"]
    assert told.keys() == {
        "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids", "remote_request_id",
        "remote_host", "remote_port", "tp_size", "remote_num_tokens",
    }  # fmt: skip
    assert (told["do_remote_prefill"], told["do_remote_decode"], told["remote_host"]) == (True, False, HOST)
    assert told["remote_num_tokens"] == first.json["usage"]["prompt_tokens"]
    second = decode.ask({**BODY, "stream": False, "kv_transfer_params": told})
    assert text(second) == wanted and "kv_transfer_params" not in second.json
    loaded = decode.tier.num_hit_tokens
    assert loaded >= told["remote_num_tokens"] - 16 and decode.tier.num_failed == 0

    # offloading: both at once. The decode leg is there first and waits for a prompt that nobody has announced.
    body = {**BODY, "messages": [{"role": "user", "content": "Say 7 times: hello. " * 20}]}
    wanted = text(prefill.ask({**body, "cache_salt": "of-another-prompt"}))
    source = {"kv_request_id": "0b5b1a4e", "remote_host": "prefill-0", "remote_port": 7777}
    answers: list[Answer] = []
    leg = {"remote_prefiller": source}
    late = threading.Thread(target=lambda: answers.append(decode.ask({**body, "kv_transfer_params": leg})))
    late.start()
    prefill.ask({**primed(body), "kv_transfer_params": {"remote_decoder": {"kv_request_id": "0b5b1a4e"}}})
    late.join(60)
    assert [text(answer) for answer in answers] == [wanted]
    assert decode.tier.num_hit_tokens > loaded and decode.tier.num_failed == 0


@pytest.mark.usefixtures("always_loads")
@pytest.mark.parametrize("budget", [64, 1024])  # the prompt is computed in several chunks, or in one
def test_layers_leave_during_the_passes_over_a_prompt(
    budget: int, start: Callable[..., Engine], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = start(f"p2p,serve={folder}/kv,size=64M", max_num_batched_tokens=budget)
    decode = start(f"p2p,peer={folder}/kv,timeout_ms=20000,wait_ms=60000,fetch_timeout_ms=60000", kv_peers=("*",))
    wanted = text(prefill.ask({**BODY, "cache_salt": "of-another-prompt"}))
    grown: list[int] = []
    grow = BlockStore.grow

    def counted(self: BlockStore, names: Sequence[bytes], first: int, parts: Tensor) -> None:
        grown.append(parts.numel())
        grow(self, names, first, parts)

    monkeypatch.setattr(BlockStore, "grow", counted)
    source = {"kv_request_id": "0b5b1a4e", "remote_host": "prefill-0", "remote_port": 7777}
    answers: list[Answer] = []
    leg = {"remote_prefiller": source}
    first = threading.Thread(target=lambda: answers.append(decode.ask({**BODY, "kv_transfer_params": leg})))
    first.start()
    runner = prefill.inline._worker._runner
    assert runner is not None and isinstance(runner._connector, P2pWorker)
    server = runner._connector._server
    assert server is not None
    until(lambda: server._awaited, "the decode leg waits for the prompt", 60.0)
    prefill.ask({**primed(BODY), "kv_transfer_params": {"remote_decoder": {"kv_request_id": "0b5b1a4e"}}})
    first.join(60)
    assert [text(answer) for answer in answers] == [wanted]
    num_bytes = decode.tier.num_loaded_bytes
    assert decode.tier.num_hit_tokens > 0 and decode.tier.num_failed == 0
    assert num_bytes <= sum(grown) < num_bytes + 2 * runner.block_bytes, "every block but the last was followed"


@pytest.mark.usefixtures("always_loads")
def test_shared_storage_and_the_cache_threshold(start: Callable[..., Engine], folder: str) -> None:
    shared = f"shared,path={folder},size=64M"
    prefill, decode = start(shared), start(shared)
    wanted = text(prefill.ask({**BODY, "cache_salt": "of-another-prompt"}))
    # A client sent a threshold: decode is tried first, streamed or not, and computes nothing.
    tried = decode.ask({**BODY, "cache_hit_threshold": 0.8}).json
    assert tried["choices"][0]["finish_reason"] == "cache_threshold"
    assert tried["usage"]["completion_tokens"] == 0 and not tried["choices"][0]["message"]["content"]
    events = decode.ask({**BODY, "cache_hit_threshold": 0.8, "stream": True}).body.decode().split("\n\n")
    assert '"finish_reason":"cache_threshold"' in events[1]  # llm-d looks at the first two events
    assert decode.inline.scheduler.counters.num_output_tokens == 0
    # Then the prompt is computed elsewhere, and both bodies have a threshold of 0.
    prefill.ask({**primed(BODY), "max_completion_tokens": 1, "cache_hit_threshold": 0})

    def is_stored() -> bool:
        """The files are written in the background; until then the threshold is not met."""
        probe = decode.ask({**primed(BODY), "cache_hit_threshold": 0.8}).json
        return bool(probe["choices"][0]["finish_reason"] != "cache_threshold")

    until(is_stored, "the prompt's blocks are in the store")
    second = decode.ask({**BODY, "cache_hit_threshold": 0})
    assert text(second) == wanted and decode.tier.num_hit_tokens > 0
    # The next turn of that conversation meets the client's threshold at once.
    assert text(decode.ask({**BODY, "cache_hit_threshold": 0.8})) == wanted


def test_generate_continues_a_rendered_chat_with_the_same_tokens(start: Callable[..., Engine]) -> None:
    engine = start()
    chat = engine.ask({**BODY, "return_token_ids": True}).json
    rendered = engine.ask(BODY, "/v1/chat/completions/render").json
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    answer = engine.ask(rendered, "/inference/v1/generate").json
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"]
    shown = engine.ask({**rendered, "output_mode": "text"}, "/inference/v1/generate").json
    assert shown["choices"][0]["text"] == chat["choices"][0]["message"]["content"]

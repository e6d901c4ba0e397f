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
from pathlib import Path
from random import Random
from typing import Any

import checkpoints
import pytest
import vocabulary
from families import make_family
from harness import Answer, Client, http_config
from torch import Tensor
from waiting import SLOW_DISK_S, until

from pagewire.api.admin.endpoints import Sleeper
from pagewire.api.app import Served, create_app
from pagewire.api.gateway.gateway import Gateway
from pagewire.config.flags import make_config
from pagewire.engine.core.request import Request
from pagewire.engine.kv_connector.p2p_store import BlockStore
from pagewire.engine.kv_connector.p2p_worker import P2pWorker
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Message, TierSnapshot
from pagewire.procs.inline import Inline
from pagewire.procs.prepare import prepare
from pagewire.tools.servers import free_port

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
    """The demo model, or another one, and the whole API. One request at a time."""

    def __init__(self, *connectors: str, **flags: object) -> None:
        flags = {"threads": 1, "max_model_len": 1024, "kv_connector": connectors, **flags}
        config = prepare(make_config(**{"model": "demo", **flags}))
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

    def get(self, path: str) -> Answer:
        return asyncio.run(Client(self._app).call("GET", path))

    @property
    def runner(self) -> Runner:
        runner = self.inline._worker._runner
        assert runner is not None
        return runner

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


def test_load_says_between_which_engines_kv_travels(start: Callable[..., Engine], folder: str) -> None:
    def digest(connector: str, key_file: str, **flags: object) -> str:
        engine = start(f"p2p,{connector},key-file={folder}/{key_file}", **flags)
        engine.ask({**BODY, "max_tokens": 1})
        answer = engine.get("/load")
        (found,) = {model["kv_digest"] for model in answer.json["models"].values()}
        return str(found)

    prefill = digest(f"serve=tcp://127.0.0.1:{free_port()},size=64M", "keys")
    assert len(bytes.fromhex(prefill)) == 32
    assert digest("peer=named", "keys") == prefill
    assert digest("peer=named", "others") != prefill
    assert digest("peer=named", "keys", kv_cache_dtype="float32") != prefill


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


SOURCE = {"remote_prefiller": {"kv_request_id": "0b5b1a4e", "remote_host": "prefill-0", "remote_port": 7777}}
TARGET = {"remote_decoder": {"kv_request_id": "0b5b1a4e"}}


def decode_first(prefill: Engine, decode: Engine, body: dict[str, Any], path: str = "/v1/chat/completions") -> Answer:
    """The decode leg's answer. It waits for the prompt before the prefill leg begins."""
    answers: list[Answer] = []
    leg = {**body, "kv_transfer_params": SOURCE}
    first = threading.Thread(target=lambda: answers.append(decode.ask(leg, path)))
    first.start()
    connector = prefill.runner._connector
    assert isinstance(connector, P2pWorker)
    server = connector._server
    assert server is not None
    until(lambda: server._awaited, "the decode leg waits for the prompt", 60.0)
    prefill.ask({**primed(body), "kv_transfer_params": TARGET}, path)
    first.join(60)
    (answer,) = answers
    return answer


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that have left passes under way."""
    found: list[int] = []
    grow = BlockStore.grow

    def counted(self: BlockStore, names: Sequence[bytes], first: int, parts: Tensor) -> None:
        found.append(parts.numel())
        grow(self, names, first, parts)

    monkeypatch.setattr(BlockStore, "grow", counted)
    return found


@pytest.mark.usefixtures("always_loads")
@pytest.mark.parametrize("budget", [64, 1024])  # the prompt is computed in several chunks, or in one
def test_layers_leave_during_the_passes_over_a_prompt(
    budget: int, start: Callable[..., Engine], folder: str, grown: list[int]
) -> None:
    prefill = start(f"p2p,serve={folder}/kv,size=64M", max_num_batched_tokens=budget)
    decode = start(f"p2p,peer={folder}/kv,timeout_ms=20000,wait_ms=60000,fetch_timeout_ms=60000", kv_peers=("*",))
    wanted = text(prefill.ask({**BODY, "cache_salt": "of-another-prompt"}))
    assert text(decode_first(prefill, decode, BODY)) == wanted
    num_bytes = decode.tier.num_loaded_bytes
    assert decode.tier.num_hit_tokens > 0 and decode.tier.num_failed == 0
    assert num_bytes <= sum(grown) < num_bytes + 2 * prefill.runner.block_bytes, "every block but the last was followed"


# A window or chunks beside full attention, a window alone, states beside full attention, states alone.
KINDS = ["gemma3", "llama4_text", "mistral", "jamba", "mamba2"]
LENGTH, BLOCK = 333, 16


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama4_text":
        return make_family(folder, request.param)
    checkpoints.make_checkpoint(folder, request.param)
    return vocabulary.add_tokenizer(folder)


def decode_tokens(prefill: Engine, decode: Engine, checkpoint: Path) -> Answer:
    """The decode leg's answer, whose tokens are those of transformers."""
    rng = Random(1)
    prompt = [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(LENGTH)]
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    answer = decode_first(prefill, decode, {"prompt": prompt, **sampling}, "/v1/completions")
    tokens = answer.json["choices"][0]["token_ids"]
    assert [tokens] == checkpoints.reference_greedy(checkpoint, [prompt], 12)
    return answer


Pair = Callable[[int], tuple[Engine, Engine]]


@pytest.fixture
def pair(checkpoint: Path, start: Callable[..., Engine], folder: str, always_loads: None) -> Pair:
    """Token budget of a step → a prefill and a decode engine."""

    def begin(budget: int) -> tuple[Engine, Engine]:
        flags: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32", "max_num_batched_tokens": budget}
        prefill = start(f"p2p,serve={folder}/kv,size=64M", **flags)
        asks = f"p2p,peer={folder}/kv,timeout_ms=20000,wait_ms=60000,fetch_timeout_ms=60000"
        return prefill, start(asks, kv_peers=("*",), **flags)

    return begin


@pytest.mark.parametrize("budget", [64, 1024])
def test_all_groups_leave_during_the_passes_over_a_prompt(
    budget: int, checkpoint: Path, pair: Pair, grown: list[int]
) -> None:
    """Blocks of windows as far as they are read behind the prompt, and the state before its last position."""
    prefill, decode = pair(budget)
    answer = decode_tokens(prefill, decode, checkpoint)
    groups = prefill.inline.scheduler.pool.groups
    num = LENGTH - 1 if groups.state is not None else (LENGTH - 1) // BLOCK * BLOCK
    assert decode.tier.num_failed == 0 and num_cached(answer) == num
    of_blocks = sum(
        groups.sizes[group] * (LENGTH // BLOCK - groups.need_from(group, num // BLOCK * BLOCK) // BLOCK)
        for group in range(groups.num_tables)
    )
    assert sum(grown) == of_blocks * prefill.runner.block_bytes, "every block was followed that is read behind it"


@pytest.mark.parametrize("checkpoint", ["gemma3", "jamba"], indirect=True)
def test_all_groups_leave_after_each_chunk_where_no_pass_can_be_followed(
    checkpoint: Path, pair: Pair, grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU recorded steps are one launch, and no layer of theirs can leave before their end."""
    monkeypatch.setattr("pagewire.engine.kv_connector.p2p_worker.layer_stops", lambda cache: {})
    kept: list[int] = []
    keep = BlockStore.keep

    def counted(self: BlockStore, names: Sequence[bytes], blocks: Sequence[bytes | None], *states: Any) -> None:
        kept.append(len(names))
        keep(self, names, blocks, *states)

    monkeypatch.setattr(BlockStore, "keep", counted)
    prefill, decode = pair(64)
    answer = decode_tokens(prefill, decode, checkpoint)
    assert decode.tier.num_failed == 0 and num_cached(answer) >= LENGTH // BLOCK * BLOCK
    assert kept[:4] == [4] * 4 and not grown, "a chunk fills four blocks, and the window's come last"


@pytest.mark.parametrize("checkpoint", ["jamba", "mamba2"], indirect=True)
def test_a_promised_state_that_is_not_kept_is_computed(
    checkpoint: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(64)
    monkeypatch.setattr(Request, "keep_positions", lambda *_, **__: [])  # as if there were no room for states
    decode_tokens(prefill, decode, checkpoint)
    tier = decode.tier
    if checkpoint.name.startswith("jamba"):
        assert tier.num_failed == 2, "the state, and the beginning of the block before it"
    else:
        assert not tier.num_hit_tokens, "nothing was there to begin with"


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

    until(is_stored, "the prompt's blocks are in the store", SLOW_DISK_S)
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

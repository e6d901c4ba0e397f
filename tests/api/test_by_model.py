"""Several models over the whole application: which of them a request reaches, and what is listed of them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from harness import CONFIG, Answer, Client, FakeEngine, run, split_settings
from msgspec.structs import replace

from pagewire.api.app import Served, create_app
from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.residence import Residence
from pagewire.config.access import ApiKey
from pagewire.ipc.messages import ChatPrompt, ModelState, Reset, Restored, Swapped

HI = {"messages": [{"role": "user", "content": "hi"}]}
LOADED = ModelState("loaded", 1.0, 1000, True, float("inf"), 2.5, "")


class Several:
    """Two models: `a`, which is also called `first`, and `b`, which has a system prompt."""

    def __init__(self, **settings: Any) -> None:
        _, self.http = split_settings(settings)
        self.engines = [FakeEngine(["from a"]), FakeEngine(["from b"])]
        self.told: list[tuple[int, bool, float | None]] = []
        self.changes: list[dict[str, object]] = []
        self.versions: list[int | None] = []
        self.headers: dict[str, str] = {}
        self.served = [self._served(0, ("a", "first"), ""), self._served(1, ("b",), "Be kind.")]
        self.app = create_app(self.served, self.http, version="1", swap=self._swap)

    def _served(self, number: int, names: tuple[str, ...], system_prompt: str) -> Served:
        engine = self.engines[number]
        residence = Residence(lambda is_open, keep_s: self.told.append((number, is_open, keep_s)))
        residence.state = LOADED
        engine.gateway = Gateway(engine.post, api_index=number, outage_wait_s=600.0, on_use=residence.use)
        config = replace(CONFIG, served_model_names=names, system_prompt=system_prompt)
        return Served(engine.gateway, config, engine.sleeper, lambda: None, residence=residence)

    async def _swap(self, changes: bytes, version: int | None, must_drain: bool) -> Swapped:
        self.changes.append(msgspec.json.decode(changes))
        self.versions.append(version)
        return Swapped(1, 409, "Not now.") if self.changes[-1]["pinned"] else Swapped(1, 202, "It is being done.")

    async def call(self, path: str, body: object = None, method: str | None = None) -> Answer:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return await Client(self.app).call(method or ("GET" if body is None else "POST"), path, data, self.headers)

    def ask(self, path: str, body: object = None) -> Answer:
        return run(self.call(path, body))


def test_load_says_which_models_are_loaded_or_would_fit() -> None:
    several = Several()
    first, second = (served.residence for served in several.served)
    assert first is not None and second is not None
    second.state = replace(LOADED, state="unloaded", fits=True)
    more = {"files_digest": "", "max_model_len": 128, "kv_digest": ""}
    a, b = {"state": "loaded", "fits": False, **more}, {"state": "unloaded", "fits": True, **more}
    assert several.ask("/load").json["models"] == {"a": a, "first": a, "b": b}
    second.use(True)
    assert several.ask("/load").json["models"]["b"]["state"] == "loading", "it is next"


def said(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    ("model", "text"), [("a", "from a"), ("first", "from a"), ("b", "from b"), (None, "from a"), ("", "from a")]
)
def test_a_request_reaches_the_model_that_it_names(model: str | None, text: str) -> None:
    several = Several()
    answer = several.ask("/v1/chat/completions", {**HI, "model": model})
    assert said(answer) == text and answer.json["model"] == (model or "a")


def test_every_api_names_the_model() -> None:
    for path, body, field in (
        ("/v1/completions", {"model": "b", "prompt": "x"}, "choices"),
        ("/v1/responses", {"model": "b", "input": "x"}, "output"),
        ("/v1/messages", {"model": "b", "max_tokens": 9, **HI}, "content"),
        ("/api/chat", {"model": "b:latest", "stream": False, **HI}, "message"),
        ("/api/generate", {"model": "b", "stream": False, "prompt": "x"}, "response"),
        ("/invocations", {"model": "b", **HI}, "choices"),
    ):
        several = Several()
        answer = several.ask(path, body)
        assert answer.status == 200 and "from b" in json.dumps(answer.json[field]), (path, answer.body)
        assert not several.engines[0].submits and len(several.engines[1].submits) == 1, path


def test_what_names_no_model_that_is_there_is_refused_in_the_words_of_one() -> None:
    several = Several()
    answer = several.ask("/v1/chat/completions", {**HI, "model": "c"})
    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert several.ask("/v1/chat/completions", b'{"model": ').error["code"] == "invalid_json"
    assert several.ask("/v1/chat/completions", {**HI, "model": 7}).status == 400
    assert several.ask("/v1/chat/completions").status == 405 and several.ask("/nowhere", {}).status == 404
    assert several.ask("/v1/chat/completions", b"\xff").status == 400


def test_the_models_are_listed_with_their_states() -> None:
    several = Several()
    residence = several.served[1].residence
    assert residence is not None
    residence.state = replace(LOADED, state="unloaded", is_pinned=False, load_s=0.0)
    cards = several.ask("/v1/models").json["data"]
    assert [(card["id"], card["state"]) for card in cards] == [("a", "loaded"), ("first", "loaded"), ("b", "unloaded")]
    assert several.ask("/v1/models/b").json["state"] == "unloaded" and several.ask("/v1/models/c").status == 404
    assert [tag["name"] for tag in several.ask("/api/tags").json["models"]] == ["a", "first", "b"]
    assert [one["name"] for one in several.ask("/api/ps").json["models"]] == ["a", "first"]
    residence.state = replace(residence.state, state="loading", progress=0.43)
    assert several.ask("/admin/models").json["data"][1]["progress"] == 0.43
    assert several.ask("/v1/models/b").json["progress"] == 0.43
    residence.state = replace(residence.state, state="unloaded", progress=None)
    a, b = several.ask("/admin/models").json["data"]
    assert a["progress"] is None and "progress" not in several.ask("/v1/models/a").json
    assert (a["name"], a["aliases"], a["state"], a["pinned"], a["load_s"]) == ("a", ["first"], "loaded", True, 2.5)
    assert (b["state"], b["load_s"], b["expires_in_s"], b["open"]) == ("unloaded", None, None, 0)
    metrics = several.ask("/metrics").body.decode()
    assert 'pagewire:model_state{model_name="a",state="loaded"} 1' in metrics
    assert 'pagewire:model_state{model_name="b",state="unloaded"} 1' in metrics
    assert 'pagewire:num_requests_running{model_name="b"}' in metrics
    assert metrics.count("# TYPE pagewire:num_requests_running gauge") == 1
    assert several.ask("/api/show", {"model": "b"}).json["template"] == "", "it is not loaded for that"


def test_the_engines_of_a_loaded_model_are_listed() -> None:
    several = Several()
    pair = several.served[1]._replace(gateway=Gateway(several.engines[1].post, several.engines[1].post))
    pair.gateway.handle([Reset(2, 2, ("core",), "It died.", 1)])
    app = create_app([several.served[0], pair], several.http, version="1")
    found = run(Client(app).call("GET", "/health")).json["engines"]
    assert [(one["model"], one["engine"], one["ready"], one["trouble"]) for one in found] == [
        ("b", 0, True, None),
        ("b", 1, False, "It died."),
    ]
    assert pair.residence is not None
    pair.residence.state = replace(LOADED, state="unloaded")
    assert "engines" not in run(Client(app).call("GET", "/health")).json, "it has none"


def test_one_model_has_no_state() -> None:
    engine = FakeEngine()
    app = create_app([Served(engine.gateway, CONFIG, engine.sleeper, lambda: None)], split_settings({})[1], version="1")
    answer = run(Client(app).call("GET", "/v1/models"))
    assert all("state" not in card for card in answer.json["data"])


def test_an_administrator_changes_a_model() -> None:
    assert Several().ask("/admin/models", {"model": "b", "loaded": True}).status == 405, "there is no administrator"
    several = Several(admin_keys=(ApiKey("of-the-administrator"),))
    assert several.ask("/admin/models", {"model": "b", "loaded": True}).status == 401
    several.headers["authorization"] = "Bearer of-the-administrator"
    answer = several.ask("/admin/models", {"model": "b", "loaded": True})
    assert answer.status == 202 and several.changes == [{"model": 1, "loaded": True, "pinned": None, "settings": None}]
    assert several.ask("/admin/models", {"model": "first", "pinned": True}).status == 409
    assert several.ask("/admin/models", {"model": "c", "pinned": True}).status == 404
    assert several.ask("/admin/models", {"model": "b"}).error["param"] == "loaded"
    refused = several.ask("/admin/models", {"model": "b", "replace": {"model": "/x"}})
    assert refused.status == 403 and "--enable-model-swap" in refused.error["message"]


def test_an_administrator_replaces_a_model() -> None:
    several = Several(admin_keys=(ApiKey("of-the-administrator"),), enable_model_swap=True)
    several.headers["authorization"] = "Bearer of-the-administrator"
    settings: dict[str, object] = {"model": "/x", "max_model_len": 64, "kv_cache_memory": "1M"}
    assert several.ask("/admin/models", {"model": "b", "replace": {**settings, "version": 1}}).status == 202
    assert several.changes == [{"model": 1, "loaded": None, "pinned": None, "settings": settings}]
    assert several.versions == [1]
    assert several.ask("/admin/models", {"model": "b", "replace": {}}).error["param"] == "replace"
    assert several.ask("/admin/models", {"model": "b", "replace": settings, "loaded": True}).status == 400
    assert several.ask("/admin/models", {"model": "b", "replace": {"served_model_name": ["c"]}}).status == 400
    assert len(several.changes) == 1


def test_a_model_with_another_version_has_its_endpoints() -> None:
    """Those of the other model stay as they are."""
    several = Several()
    before = [several.ask("/v1/models/" + name).json["max_model_len"] for name in ("a", "b")]
    for number in (1, 1, 0):
        config = several.served[number].config
        model = replace(config.model, path=f"/{number}")
        several.app.replaced(number, replace(config, max_model_len=32, model=model, system_prompt="Be brief."))
        after = [several.ask("/v1/models/" + name).json["max_model_len"] for name in ("a", "b")]
        assert after == [32 if number == 0 else before[0], 32]
    assert [one["root"] for one in several.ask("/admin/models").json["data"]] == ["/0", "/1"]
    assert said(several.ask("/v1/chat/completions", {"model": "b", **HI})) == "from b"
    (submit,) = several.engines[1].submits
    assert isinstance(submit.prompt, ChatPrompt) and b"Be brief." in submit.prompt.messages
    assert several.ask("/openapi.json").status == 200


def test_the_system_prompt_is_for_conversations_that_have_none() -> None:
    several = Several()
    own = [{"role": "system", "content": "Be short."}, *HI["messages"]]
    for messages in (HI["messages"], own):
        said(several.ask("/v1/chat/completions", {"model": "b", "messages": messages}))
    prompts = [submit.prompt for submit in several.engines[1].submits]
    assert all(isinstance(prompt, ChatPrompt) for prompt in prompts)
    first, second = (json.loads(prompt.messages) for prompt in prompts if isinstance(prompt, ChatPrompt))
    assert first == [{"role": "system", "content": "Be kind."}, *HI["messages"]] and second == own


def test_who_uses_a_model_is_told_and_for_how_long_it_stays() -> None:
    several = Several()
    several.ask("/v1/chat/completions", {**HI, "model": "b"})
    assert several.told == [(1, True, None), (1, False, None)]
    several.told.clear()
    several.ask("/api/chat", {**HI, "model": "b", "keep_alive": "5m", "stream": False})
    assert several.told == [(1, True, 300.0), (1, False, None)]
    several.told.clear()
    assert several.ask("/api/generate", {"model": "a", "keep_alive": 0}).json["done_reason"] == "unload"
    assert several.told == [(0, False, 0.0)], "nothing is loaded for it"
    assert several.ask("/api/chat", {**HI, "model": "b", "keep_alive": "soon"}).status == 400


def with_b_unloaded(scenario: Callable[[Several, Gateway, Residence], Awaitable[None]]) -> None:
    async def run_it() -> None:
        several = Several()
        gateway, residence = several.engines[1].gateway, several.served[1].residence
        assert residence is not None
        gateway.handle([Reset(2, 2, (), "b is being loaded.")])
        await scenario(several, gateway, residence)

    run(run_it())


def test_requests_wait_for_their_model_and_not_for_others() -> None:
    async def scenario(several: Several, gateway: Gateway, residence: Residence) -> None:
        waiting = asyncio.ensure_future(several.call("/v1/chat/completions", {**HI, "model": "b"}))
        while not several.told:
            await asyncio.sleep(0)
        assert several.told == [(1, True, None)]
        assert said(await several.call("/v1/chat/completions", {**HI, "model": "a"})) == "from a"
        assert not waiting.done() and (await several.call("/health")).status == 200
        gateway.handle([Restored(2)])
        assert said(await waiting) == "from b"

    with_b_unloaded(scenario)


def test_requests_of_a_model_that_cannot_be_loaded_fail_at_once() -> None:
    async def scenario(several: Several, gateway: Gateway, residence: Residence) -> None:
        waiting = asyncio.ensure_future(several.call("/v1/chat/completions", {**HI, "model": "b"}))
        counting = asyncio.ensure_future(several.call("/tokenize", {"model": "b", "prompt": "x"}))
        while len(several.told) < 1 or gateway.num_open < 1:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        gateway.hinder("b could not be served: it has no weights.")
        for answer in await asyncio.gather(waiting, counting):
            assert answer.status == 503 and "it has no weights" in answer.error["message"]
        late = await several.call("/v1/chat/completions", {**HI, "model": "b"})
        assert late.status == 503 and late.headers["retry-after"]
        gateway.hinder(None)
        gateway.handle([Restored(2)])
        assert said(await several.call("/v1/chat/completions", {**HI, "model": "b"})) == "from b"

    with_b_unloaded(scenario)


def test_a_query_may_name_the_model() -> None:
    several = Several(enable_sleep_mode=True)
    assert several.ask("/sleep?level=1&model=b", b"").status == 200
    assert several.engines[1].is_asleep and not several.engines[0].is_asleep


def test_a_response_in_the_background_is_made_by_its_model() -> None:
    async def scenario() -> None:
        several = Several()
        several.app.start()
        body = {"model": "b", "input": "x", "background": True}
        answer = await several.call("/v1/responses", body)
        found = answer.json
        while found["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
            found = (await several.call(f"/v1/responses/{found['id']}")).json
        assert found["status"] == "completed" and "from b" in json.dumps(found["output"])
        assert not several.engines[0].submits
        await several.app.stop()

    run(scenario())


def test_expiry_is_told() -> None:
    several = Several()
    residence = several.served[0].residence
    assert residence is not None
    residence.state = replace(LOADED, expires_at=time.clock_gettime(time.CLOCK_MONOTONIC) + 100.0)
    assert 90 < several.ask("/admin/models").json["data"][0]["expires_in_s"] <= 100
    assert not several.ask("/api/ps").json["models"][0]["expires_at"].startswith("2318")

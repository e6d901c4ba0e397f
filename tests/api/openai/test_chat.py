"""Chat completions: the shapes that clients read, streamed and plain."""

import json
from typing import Any

import pytest
from harness import Answer, FakeEngine, chat, request

from pagewire.config.access import ApiKey
from pagewire.config.config import SamplingDefaults
from pagewire.config.latency_classes import LatencyClass
from pagewire.ipc.messages import ChatPrompt

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "n": [1, {"a": "}"}]}}\n</tool_call>'


def deltas(events: list[Any], index: int = 0) -> list[dict[str, Any]]:
    return [c["delta"] for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]


def content(events: list[Any], index: int = 0) -> str:
    return "".join(delta.get("content", "") for delta in deltas(events, index))


def finishes(events: list[Any], index: int = 0) -> list[str]:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def test_plain() -> None:
    answer = chat(FakeEngine(stop_reason="END"), model="org/demo-alias")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == "org/demo-alias" and isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"content": "Hello", "role": "assistant", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
            "token_ids": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_stream() -> None:
    answer = chat(FakeEngine(), stream=True)
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    *events, done = answer.events
    assert done == "[DONE]"
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert deltas(events) == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}]
    assert finishes(events) == ["stop"] and all("usage" not in e and e["choices"] for e in events)
    assert all(part.count(b"data: ") <= 1 for part in answer.parts)


def test_stream_with_usage() -> None:
    *events, usage, done = chat(FakeEngine(), stream=True, stream_options={"include_usage": True}).events
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["total_tokens"] == 8
    assert all(e["usage"] is None for e in events)


def test_special_characters_are_kept_streamed_and_plain() -> None:
    text = 'quote " back \\ line \n tab \t nul \x00 emoji 🙂 sep \u2028 </script>'
    assert content(chat(FakeEngine([text, ""]), stream=True).events) == text
    assert chat(FakeEngine([text, ""])).json["choices"][0]["message"]["content"] == text


def test_several_choices_interleave() -> None:
    engine = FakeEngine()
    *events, _ = chat(engine, stream=True, n=3).events
    assert [content(events, i) for i in range(3)] == ["Hello"] * 3
    assert [finishes(events, i) for i in range(3)] == [["stop"]] * 3
    assert [e["choices"][0]["index"] for e in events[3:6]] == [0, 1, 2]
    assert all(deltas(events, i)[0]["role"] == "assistant" for i in range(3))
    body = chat(FakeEngine(), n=3).json
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 15


def test_empty_answer() -> None:
    body = chat(FakeEngine([""])).json
    assert body["choices"][0]["message"]["content"] == ""
    *events, _ = chat(FakeEngine([""]), stream=True).events
    assert deltas(events) == [{"role": "assistant", "content": ""}, {}]


def test_finish_reason_length() -> None:
    assert chat(FakeEngine(finish="length")).json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(stream: bool) -> None:
    answer = chat(FakeEngine(["hé", "", "y"]), logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [
            entry
            for e in answer.events[:-1]
            for c in e["choices"]
            if c["logprobs"]
            for entry in c["logprobs"]["content"]
        ]
    else:
        entries = answer.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["h", "é", "y"]
    assert entries[1] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "~", "logprob": -2.0, "bytes": [126]},
        ],
    }


def test_logprobs_without_top() -> None:
    engine = FakeEngine(["h"])
    assert chat(engine, logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert engine.submits[0].sampling.logprobs == 0
    assert chat(FakeEngine(), logprobs=False).json["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids(stream: bool) -> None:
    answer = chat(FakeEngine(), return_token_ids=True, stream=stream)
    if stream:
        events = answer.events[:-1]
        prompts = [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e]
        assert prompts == [[97, 98, 99]]
        ids = [i for e in events for c in e["choices"] for i in c.get("token_ids", ())]
    else:
        assert answer.json["prompt_token_ids"] == [97, 98, 99]
        ids = answer.json["choices"][0]["token_ids"]
    assert ids == list(map(ord, "Hello"))


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tool_call_plain() -> None:
    choice = chat(FakeEngine([CALL]), tools=TOOLS).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function" and set(call) == {"id", "type", "function"}
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln", "n": [1, {"a": "}"}]}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_streamed_tool_calls_do_not_depend_on_the_chunks(size: int) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    *events, _ = chat(FakeEngine(pieces), tools=TOOLS, stream=True).events
    assert content(events) == "Let me see." and finishes(events) == ["tool_calls"]
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas(events):
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] not in calls and part["type"] == "function" and part["function"]["arguments"] == ""
                calls[part["index"]] = {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert sorted(calls) == [0, 1] and calls[0]["id"] != calls[1]["id"]
    for call in calls.values():
        assert call["name"] == "weather" and json.loads(call["arguments"])["city"] == "Köln"


def test_only_one_call_without_parallel_tool_calls() -> None:
    message = chat(FakeEngine([CALL + CALL]), tools=TOOLS, parallel_tool_calls=False).json["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    *events, _ = chat(FakeEngine([CALL + CALL]), tools=TOOLS, parallel_tool_calls=False, stream=True).events
    assert {part["index"] for delta in deltas(events) for part in delta.get("tool_calls", ())} == {0}


def test_a_call_cut_by_the_length_limit() -> None:
    choice = chat(FakeEngine([CALL[:50]], finish="length"), tools=TOOLS).json["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("pieces", [list(CALL), [CALL]])
def test_logprobs_of_a_tool_call_come_once(pieces: list[str]) -> None:
    *events, _ = chat(FakeEngine(pieces), tools=TOOLS, stream=True, logprobs=True).events
    tokens = [t["token"] for e in events for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    assert "".join(tokens) == CALL


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_is_text(stream: bool) -> None:
    broken = '<tool_call>{"name": "f", oops}</tool_call>'
    answer = chat(FakeEngine(list(broken)), tools=TOOLS, stream=stream)
    if stream:
        assert content(answer.events[:-1]) == broken and finishes(answer.events[:-1]) == ["stop"]
    else:
        choice = answer.json["choices"][0]
        assert choice["message"]["content"] == broken and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def chat_with(engine: FakeEngine, parsers: dict[str, Any], **fields: Any) -> Answer:
    """Like `chat`, with the server's parsers."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return request(engine, "/v1/chat/completions", body, **parsers)


def test_a_call_format_that_needs_special_tokens() -> None:
    engine = FakeEngine(['[TOOL_CALLS]f[ARGS]{"a": 1}'])
    choice = chat_with(engine, {"tool_call_parser": "mistral"}, tools=TOOLS).json["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert set(engine.submits[0].text.marks) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert engine.submits[0].text.skip_special_tokens


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────────────────

QWEN3 = {"reasoning_parser": "qwen3"}
THOUGHT = "<think>\nWell.\n</think>\n\nYes"


def test_reasoning_plain() -> None:
    body = chat_with(FakeEngine([THOUGHT[:10], *THOUGHT[10:]]), QWEN3).json
    message = body["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Well." and message["content"] == "Yes"
    num_reasoning = len("<think>\nWell.\n</think>")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    assert body["usage"]["completion_tokens"] == len(THOUGHT)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
def test_streamed_reasoning_does_not_depend_on_the_chunks(size: int, more: dict[str, Any]) -> None:
    text = THOUGHT.removeprefix("<think>") + CALL
    engine = FakeEngine([text[i : i + size] for i in range(0, len(text), size)])
    engine.prompt_end = "<|im_start|>assistant\n<think>"
    answer = chat_with(engine, QWEN3, tools=TOOLS, stream=True, stream_options={"include_usage": True}, **more)
    *events, _ = answer.events
    parts = deltas(events[:-1])
    assert "".join(part.get("reasoning", "") for part in parts) == "Well."
    assert "".join(part.get("reasoning_content", "") for part in parts) == "Well."
    assert content(events) == "Yes" and finishes(events) == ["tool_calls"]
    arguments = "".join(call["function"]["arguments"] for part in parts for call in part.get("tool_calls", ()))
    assert json.loads(arguments)["city"] == "Köln"
    at_least = len("\nWell.\n</think>")
    num_reasoning = events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert at_least <= num_reasoning < at_least + size


def test_reasoning_may_be_left_out() -> None:
    body = chat_with(FakeEngine([THOUGHT]), QWEN3, include_reasoning=False).json
    assert body["choices"][0]["message"] == {"content": "Yes", "role": "assistant", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)  # all in one step


OUTPUTS = {
    "hermes": THOUGHT + "\n" + CALL + CALL + " and <tool_call>no</tool_call>",
    "llama3_json": THOUGHT.removesuffix("Yes")
    + '{"name": "f", "parameters": {"a": "é"}}; {"name": "g", "parameters": {}}',
    "mistral": THOUGHT + '[TOOL_CALLS] [{"name": "f", "arguments": {}}][TOOL_CALLS]g[ARGS]{"a": [1]}[TOOL_CALLS] oops',
    "pythonic": THOUGHT.removesuffix("Yes") + "[f(a='x', b={'c': None}), g()] and more",
    "deepseek_v31": THOUGHT + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜> ',
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
    '<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>Yes',
}


@pytest.mark.parametrize("parser", OUTPUTS)
def test_a_stream_adds_up_to_the_plain_answer_for_every_split(parser: str) -> None:
    text, parsers = OUTPUTS[parser], {"tool_call_parser": parser, "reasoning_parser": "qwen3"}
    plain = chat_with(FakeEngine([text]), parsers, tools=TOOLS).json["choices"][0]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in plain["message"]["tool_calls"]]
    assert calls and plain["message"]["reasoning"]
    for cut in range(0, len(text), 3):
        pieces = [text[:cut], text[cut : cut + 5], text[cut + 5 :]]
        *events, _ = chat_with(FakeEngine(pieces), parsers, tools=TOOLS, stream=True).events
        streamed: dict[int, list[str]] = {}
        for delta in deltas(events):
            for part in delta.get("tool_calls", ()):
                call = streamed.setdefault(part["index"], ["", ""])
                call[0] += part["function"].get("name", "")
                call[1] += part["function"]["arguments"]
        assert [tuple(call) for call in streamed.values()] == calls, cut
        assert content(events) == (plain["message"]["content"] or ""), cut
        assert "".join(delta.get("reasoning", "") for delta in deltas(events)) == plain["message"]["reasoning"], cut
        assert finishes(events) == [plain["finish_reason"]]


def test_without_a_parser_reasoning_is_text() -> None:
    engine = FakeEngine([THOUGHT])
    assert chat(engine).json["choices"][0]["message"]["content"] == THOUGHT
    assert not engine.submits[0].text.prompt_end and not engine.submits[0].text.marks


# ── requests without tools ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_there_are_no_calls(fields: dict[str, Any]) -> None:
    engine = FakeEngine([CALL])
    choice = chat(engine, **fields).json["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools == b""


# ── submitted requests ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_prompt_is_the_clients_json() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "é🙂", "extra": [1, {"a": None}]}]
    chat(
        engine,
        messages=messages,
        tools=TOOLS,
        chat_template_kwargs={"enable_thinking": False},
        documents=[{"text": "d"}],
    )
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.messages) == messages and json.loads(prompt.tools) == TOOLS
    assert json.loads(prompt.template_kwargs) == {"enable_thinking": False, "documents": [{"text": "d"}]}
    assert prompt.add_generation_prompt and not prompt.continue_final_message


def test_fields_are_submitted() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 5,
    }
    more: dict[str, Any] = {"presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"5": 1.5}}
    chat(engine, **fields, **more, max_tokens=9, stop="x", priority=-3, ignore_eos=True, stop_token_ids=[4], n=2)
    (submit,) = engine.submits
    sampling = submit.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (-1, 2, {5: 1.5})
    assert (submit.n, submit.priority, submit.limits.max_tokens, submit.text.stop) == (2, -3, 9, ("x",))
    assert submit.limits.ignore_eos and submit.limits.stop_token_ids == (4,)


def test_defaults_and_null() -> None:
    engine = FakeEngine()
    chat(engine)
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "max_tokens",
        "logit_bias",
        "tools",
        "stream",
        "user",
        "logprobs",
    ]
    chat(engine, **dict.fromkeys(names))
    first, second = engine.submits
    assert first.limits.max_tokens is None and first.sampling.temperature == 1.0 and first.sampling.logprobs is None
    assert (first.limits, first.text, first.prompt) == (second.limits, second.text, second.prompt)
    assert first.sampling.seed != second.sampling.seed, "without a seed, each request gets its own"


def test_max_completion_tokens_wins() -> None:
    engine = FakeEngine()
    chat(engine, max_tokens=5, max_completion_tokens=6)
    assert engine.submits[0].limits.max_tokens == 6


def test_the_defaults_are_those_that_the_model_recommends() -> None:
    engine = FakeEngine()
    recommended = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05)
    body = {"messages": [{"role": "user", "content": "hi"}], "top_p": 1.0}
    request(engine, "/v1/chat/completions", body, sampling=recommended)
    sampling = engine.submits[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0.6, 20, 0.05, 1.05)
    assert sampling.top_p == 1.0  # the client's value


def test_a_tiny_temperature_is_greedy() -> None:
    engine = FakeEngine()
    chat(engine, temperature=1e-320)
    assert engine.submits[0].sampling.temperature == 0.0


def test_any_seed_leaves_room_for_its_choices() -> None:
    engine = FakeEngine()
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        chat(engine, seed=seed, n=128)
        assert 0 <= engine.submits[-1].sampling.seed <= 2**63 - 1 - 128


def test_continue_final_message() -> None:
    engine = FakeEngine()
    chat(engine, messages=[{"role": "assistant", "content": "so"}], continue_final_message=True)
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.continue_final_message and not prompt.add_generation_prompt


def test_cache_salts_differ() -> None:
    engine = FakeEngine()
    for salt in ("a", "b", None):
        chat(engine, cache_salt=salt)
    salts = [submit.salt for submit in engine.submits]
    assert len(set(salts)) == 3 and salts[2] == b""


def test_requests_in_the_form_of_open_webui() -> None:
    """A turn of a chat with its settings, and then a title, as its source makes them."""
    headers = {
        "authorization": "Bearer none",
        "x-openwebui-user-name": "A",
        "x-openwebui-user-id": "1",
        "x-openwebui-chat-id": "2",
    }
    models = request(FakeEngine(), "/v1/models", headers=headers).json["data"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    settings = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 9, "frequency_penalty": 0.1, "seed": 7, "stop": []}
    turn = {"stream": True, "stream_options": {"include_usage": True}, "model": models[0]["id"], "messages": messages}
    events = request(FakeEngine(), "/v1/chat/completions", turn | settings, headers=headers).events
    texts = [choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"]]
    assert "".join(texts) == "Hello" and events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] == 5
    title = {"model": models[0]["id"], "messages": messages[1:], "stream": False, "max_completion_tokens": 100}
    answer = request(FakeEngine(), "/v1/chat/completions", title, headers=headers).json
    assert answer["choices"][0]["message"]["content"] == "Hello"


def test_the_answer_names_the_latency_class() -> None:
    config: dict[str, Any] = {"latency_classes": {"interactive": LatencyClass(ttft_ms=500)}}
    body = {"messages": [{"role": "user", "content": "x"}], "service_tier": "interactive"}
    engine, path = FakeEngine(), "/v1/chat/completions"
    answer = request(engine, path, body, **config)
    assert answer.json["service_tier"] == engine.submits[0].latency_class == "interactive"
    streamed = request(engine, path, body | {"stream": True, "service_tier": "auto"}, **config)
    assert {event["service_tier"] for event in streamed.events if event != "[DONE]"} == {"default"}
    header = {"X-Latency-Class": "interactive"}
    for more in ({}, {"use_beam_search": True, "n": 2, "max_tokens": 2}):
        whole = request(engine, "/v1/completions", {"prompt": "x", **more}, headers=header, **config)
        assert whole.json["service_tier"] == engine.submits[-1].latency_class == "interactive"
    refused = request(engine, path, body | {"service_tier": "interactiv"}, **config)
    assert refused.status == 400 and refused.error["param"] == "service_tier"
    assert "service_tier" not in chat(FakeEngine(), service_tier="interactive").json  # without classes it is ignored


def test_a_key_bounds_classes_and_priorities() -> None:
    keys = (ApiKey("a", latency_classes=("batch", "chat"), min_priority=0), ApiKey("b"))
    config: dict[str, Any] = {"latency_classes": {name: LatencyClass() for name in ("chat", "batch")}, "api_keys": keys}
    engine = FakeEngine()

    def status(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return request(engine, "/v1/completions", {"prompt": "x", **fields}, headers=headers, **config).status

    assert status("a") == 200 and engine.submits[-1].latency_class == "batch"
    assert status("b") == 200 and engine.submits[-1].latency_class == "default"
    assert status("a", service_tier="chat", priority=3) == 200
    assert status("a", service_tier="default") == status("a", priority=-1) == 403
    assert status("b", service_tier="default", priority=-1) == 200


def test_arguments_of_a_plugin() -> None:
    """Equal ones have equal bytes; without a plugin, or if they are too long, they are refused."""
    plugin: dict[str, Any] = {"runner_plugin": "module:Class"}
    messages, path = [{"role": "user", "content": "hi"}], "/v1/chat/completions"
    for args in ({"b": 1, "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": 1}):
        engine = FakeEngine()
        assert request(engine, path, {"messages": messages, "vllm_xargs": args}, **plugin).status == 200
        assert engine.submits[0].sampling.extra_args == b'{"a":{"c":3,"d":2},"b":1}'
    none: dict[str, Any] = {}
    for flags, given in ((none, {"a": 1}), (plugin, {"a": "x" * 16384}), (plugin, [1])):
        answer = request(FakeEngine(), path, {"messages": messages, "vllm_xargs": given}, **flags)
        assert (answer.status, answer.error["param"]) == (400, "vllm_xargs")
    assert request(FakeEngine(), path, {"messages": messages, "vllm_xargs": {}}).status == 200

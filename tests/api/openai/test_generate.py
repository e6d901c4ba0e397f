"""/inference/v1/generate over the fake engine, and as llm-d's coordinator writes and reads it.

Its rules are those of llm-d/llm-d-router of 2026-08-21 (ebab687, `pkg/coordinator/steps/{utils,prefill,decode}.go`),
the shapes those of vLLM's `token_in_token_out/protocol.py` (006ebac), in our words.
"""

import json
from typing import Any

import pytest
from harness import Answer, FakeEngine, request

from pagewire.ipc.messages import IdsPrompt, bytes_to_ids

PATH = "/inference/v1/generate"
SHARED = {"kv_connector": ("shared,path=/tmp/kv,size=1G",)}


def generate(engine: FakeEngine, flags: Any = None, **fields: Any) -> Answer:
    return request(engine, PATH, {"token_ids": [72, 105], **fields}, **(flags or {}))


def events(answer: Answer) -> list[dict[str, Any]]:
    *lines, end = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def test_tokens_go_in_and_come_out() -> None:
    engine = FakeEngine()
    params = {"max_tokens": 7, "temperature": 0, "n": 2, "seed": 5, "stop_token_ids": [3]}
    answer = generate(engine, sampling_params=params, request_id="r-1", cache_salt="s", priority=3).json
    (submit,) = engine.submits
    assert isinstance(submit.prompt, IdsPrompt) and list(bytes_to_ids(submit.prompt.ids)) == [72, 105]
    assert (submit.n, submit.limits.max_tokens, submit.limits.stop_token_ids) == (2, 7, (3,))
    assert (submit.sampling.temperature, submit.sampling.seed, submit.priority) == (0, 5, 3)
    assert not submit.text.detokenize and submit.cache_salt == "s"
    assert (answer["request_id"], answer["output_mode"], answer["model"]) == ("r-1", "tokens", "demo")
    assert answer["choices"] == [
        {"index": i, "token_ids": list(map(ord, "Hello")), "finish_reason": "stop", "stop_reason": None,
         "logprobs": None} for i in range(2)
    ]  # fmt: skip
    assert answer["usage"]["completion_tokens"] > 0 and "kv_transfer_params" not in answer


def test_without_max_tokens_the_context_is_the_limit() -> None:
    engine = FakeEngine()
    assert generate(engine).status == 200
    assert generate(engine, sampling_params={"min_tokens": 40}).status == 200
    assert [submit.limits.max_tokens for submit in engine.submits] == [None, None]


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_stream_has_the_pieces_of_the_answer(mode: str) -> None:
    fields: dict[str, Any] = {"sampling_params": {"logprobs": 2, "n": 2}, "output_mode": mode}
    whole = generate(FakeEngine(), **fields, return_token_ids=True).json
    options = {"include_usage": True}
    streamed = events(generate(FakeEngine(), **fields, return_token_ids=True, stream=True, stream_options=options))
    assert {event["request_id"] for event in streamed} == {streamed[0]["request_id"]}
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"] == whole["usage"]
    assert [event["prompt_token_ids"] for event in streamed if "prompt_token_ids" in event] == [[72, 105]]
    assert whole["prompt_token_ids"] == [72, 105]
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in streamed[:-1] if event["choices"][0]["index"] == choice["index"]]
        assert [id for piece in mine for id in piece["token_ids"]] == choice["token_ids"]
        assert [entry for piece in mine for entry in piece["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert "".join(piece.get("text", "") for piece in mine) == ("Hello" if mode == "text" else "")
        assert ("text" in choice) == (mode == "text")
        for entry, letter in zip(choice["logprobs"]["content"], "Hello", strict=False):
            if mode == "text":
                assert entry["token"][0] == letter and "token_id" not in entry
            else:
                first, *others = entry["top_logprobs"]
                assert first["token_id"] == entry["token_id"] and entry["rank"] == first["rank"] == 1
                assert [one["rank"] for one in others] == [2]


def test_the_legs_of_llm_ds_coordinator() -> None:
    """The prefill leg, and the decode leg with what was answered, both below `sampling_params.extra_args`."""
    engine = FakeEngine()
    asked = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    leg = {"do_remote_decode": True, "do_remote_prefill": False, **asked}
    params = {"max_tokens": 1, "extra_args": {"kv_transfer_params": leg}}
    told = generate(engine, SHARED, sampling_params=params, stream=False, request_id="a").json["kv_transfer_params"]
    assert told["do_remote_prefill"] is True and told["remote_request_id"] == "a"
    peers = {**SHARED, "kv_peers": (told["remote_host"],)}
    params = {"max_tokens": 9, "extra_args": {"kv_transfer_params": told}}
    assert generate(engine, peers, sampling_params=params, stream=True).status == 200
    assert generate(engine, peers, kv_transfer_params=told).status == 200  # as production-stack has it
    refused = generate(engine, SHARED, sampling_params=params)
    assert refused.status == 400 and "--kv-peers" in refused.error["message"]


def test_arguments_go_to_the_runner_plugin() -> None:
    """But for what a renderer leaves there of a request that these parameters cannot say."""
    args = {"b": [1, None], "a": "x", "nothing": None}
    plugin = {"runner_plugin": "module:Class"}
    engine = FakeEngine()
    assert generate(engine, plugin, sampling_params={"extra_args": args}).status == 200
    (submit,) = engine.submits
    assert submit.sampling.extra_args == b'{"a":"x","b":[1,null]}'
    for flags, name in ((plugin, "response_format"), ({}, "a")):
        answer = generate(FakeEngine(), flags, sampling_params={"extra_args": {name: True}})
        assert (answer.status, answer.error["param"]) == (400, f"sampling_params.extra_args.{name}")
    long = generate(FakeEngine(), plugin, sampling_params={"extra_args": {"a": "x" * 16384}})
    assert (long.status, long.error["param"]) == (400, "sampling_params.extra_args")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{}]}, "content_parts"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"output_mode": "audio"}, "output_mode"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"sampling_params": {"logits_processors": ["x"]}}, "sampling_params.logits_processors"),
        ({"sampling_params": {"stop_token_ids": [5000]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"extra_args": {"tool_choice": True}}}, "sampling_params.extra_args.tool_choice"),
        (
            {"sampling_params": {"extra_args": {"kv_transfer_params": 1}}},
            "sampling_params.extra_args.kv_transfer_params",
        ),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "sampling_params.detokenize"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = generate(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert not engine.submits

"""llama-server's endpoints over the whole application."""

import json
from typing import Any

import pytest
from harness import Answer, FakeEngine, request

from pagewire.config.config import Infill
from pagewire.ipc.messages import IdsPrompt, TextPrompt, bytes_to_ids

INFILL = Infill(prefix="<P>", suffix="<S>", middle="<M>", stop_ids=(7,), file="<F>")


def complete(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/completion", {"prompt": "hi", **fields})


def parts(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_a_plain_answer() -> None:
    for path in ("/completion", "/completions"):
        body = request(FakeEngine(["Hel", "lo\n"]), path, {"prompt": "hi"}).json
        assert body["content"] == "Hello\n" and body["stop"] is True and body["stop_type"] == "eos"
        assert body["model"] == "demo" and body["tokens"] == [] and body["has_new_line"] is True
        assert (body["tokens_evaluated"], body["tokens_predicted"], body["stopping_word"]) == (3, 6, "")
        assert body["timings"].keys() >= {"prompt_n", "prompt_ms", "predicted_n", "predicted_per_second"}


def test_a_stream_ends_with_an_event_that_says_so() -> None:
    *pieces, last = parts(complete(FakeEngine(["Hel", "lo"], finish="length"), stream=True))
    assert [(piece["content"], piece["stop"]) for piece in pieces] == [("Hel", False), ("lo", False)]
    assert pieces[0]["tokens"] == [72, 101, 108] and "timings" not in pieces[0]
    assert last["content"] == "" and last["stop"] is True and last["stop_type"] == "limit"


def test_a_stop_string_is_told() -> None:
    body = complete(FakeEngine(["a"], stop_reason="END"), stop=["END"], return_tokens=True).json
    assert (body["stop_type"], body["stopping_word"], body["tokens"]) == ("word", "END", [97])


def test_probabilities_name_tokens() -> None:
    (first, _) = complete(FakeEngine(["ab"]), n_probs=2).json["completion_probabilities"]
    assert (first["id"], first["token"], first["bytes"]) == (97, "a", [97]) and len(first["top_logprobs"]) == 2
    assert first["top_logprobs"][0].keys() == {"id", "token", "bytes", "logprob"}


def test_parameters() -> None:
    engine = FakeEngine()
    complete(
        engine, n_predict=5, temperature=0, seed=4, repeat_penalty=1.5, ignore_eos=True, cache_prompt=True, id_slot=-1,
        logit_bias=[[5, 2.5], [6, False], [7, -1e9]], samplers=["top_k"], min_keep=0,
    )  # fmt: skip
    (submit,) = engine.submits
    assert submit.limits.max_tokens == 5 and submit.limits.ignore_eos
    assert (submit.sampling.temperature, submit.sampling.seed, submit.sampling.repetition_penalty) == (0.0, 4, 1.5)
    assert submit.sampling.logit_bias == {5: 2.5, 6: -100.0, 7: -100.0}
    engine = FakeEngine()
    complete(engine, prompt=[1, 2, 3], n_predict=-1)
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, IdsPrompt) and list(bytes_to_ids(prompt.ids)) == [1, 2, 3]
    assert engine.submits[0].limits.max_tokens is None


def test_grammars_and_schemas_are_enforced() -> None:
    for fields in ({"grammar": 'root ::= "a" | "b"'}, {"json_schema": {"type": "object"}}):
        engine = FakeEngine()
        complete(engine, **fields)
        assert engine.submits[0].constraint is not None
    assert complete(FakeEngine(), grammar='root ::= "a"', json_schema={}).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 1}, "mirostat"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"lora": [{"id": 0}]}, "lora"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [["a", 1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"n_probs": 99}, "n_probs"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"logit_bias": [[100000, 1.0]]}, "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = complete(engine, **fields)
    assert answer.status == 400 and answer.error["param"].startswith(param) and not engine.submits


def test_infill_writes_between_two_texts() -> None:
    engine = FakeEngine(["b"])
    fields = {
        "input_prefix": "def f(", "input_suffix": "return 1", "prompt": "x",
        "input_extra": [{"filename": "a.py", "text": "import b"}],
    }  # fmt: skip
    assert request(engine, "/infill", fields, infill=INFILL).json["content"] == "b"
    (submit,) = engine.submits
    assert isinstance(submit.prompt, TextPrompt)
    assert submit.prompt.text == "<F>a.py\nimport b\n<P>def f(<S>return 1<M>x" and submit.limits.stop_token_ids == (7,)
    refused = request(FakeEngine(), "/infill", fields)
    assert refused.status == 400 and "no tokens for infilling" in refused.error["message"]


def test_properties_and_slots() -> None:
    props = request(FakeEngine(), "/props").json
    assert props["total_slots"] == 8 and props["default_generation_settings"]["n_ctx"] == 128
    assert props["model_alias"] == "demo" and props["modalities"] == {"vision": False, "audio": False}
    slots = request(FakeEngine(), "/slots").json
    assert [slot["id"] for slot in slots] == list(range(8)) and not any(slot["is_processing"] for slot in slots)

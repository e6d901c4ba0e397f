"""Rare parameters with a real server: beam search, chat templates of requests, prompts that end inside a character."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from pagewire import LLM, BeamSearchParams
from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
QUESTION = [{"role": "user", "content": "Count from 1 to 5"}]


def post(server: Server, path: str, **fields: Any) -> Any:
    request = urllib.request.Request(
        server.url + path, json.dumps(fields).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def refusal(server: Server, path: str, **fields: Any) -> Any:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, path, **fields)
    assert caught.value.code == 400
    return json.load(caught.value)["error"]


def test_beam_search_gives_the_beams_of_the_offline_api(server: Server) -> None:
    prompts = ["Count from", "The capital"]
    fields = {"n": 3, "max_tokens": 8, "length_penalty": 0.7, "use_beam_search": True}
    answer = post(server, "/v1/completions", prompt=prompts, return_token_ids=True, **fields)
    llm = LLM(threads=1, kv_cache_memory="64M")
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.7)
    expected = [beam for output in llm.beam_search(prompts, params) for beam in output.sequences]
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [c["prompt_token_ids"] + c["token_ids"] for c in choices] == [beam.tokens for beam in expected]
    assert [c["text"] for c in choices] == [beam.text for beam in expected]
    assert [c["finish_reason"] for c in choices] == [beam.finish_reason for beam in expected]
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
    assert answer["usage"]["prompt_tokens"] == sum(len(choices[i]["prompt_token_ids"]) for i in (0, 3))


def test_a_beam_width_of_one_is_greedy(server: Server) -> None:
    greedy = post(server, "/v1/chat/completions", messages=QUESTION, temperature=0, max_tokens=60)
    beam = post(server, "/v1/chat/completions", messages=QUESTION, max_tokens=60, use_beam_search=True, n=1)
    for part in ("message", "finish_reason", "stop_reason"):
        assert beam["choices"][0][part] == greedy["choices"][0][part]
    assert beam["usage"]["completion_tokens"] == greedy["usage"]["completion_tokens"]
    assert beam["usage"]["prompt_tokens"] == greedy["usage"]["prompt_tokens"]
    for word in ("stream", "logprobs"):
        fields = {"messages": QUESTION, "use_beam_search": True, word: True}
        assert refusal(server, "/v1/chat/completions", **fields)["param"] == word


def test_a_beam_search_that_exceeds_the_context_is_refused(server: Server) -> None:
    error = refusal(server, "/v1/completions", prompt=[5] * 100_000, use_beam_search=True)
    assert error["code"] == "context_length_exceeded"


def test_min_tokens_and_best_of_are_obeyed(server: Server) -> None:
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields: Any = {"model": "pagewire-demo", "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    plain = client.chat.completions.create(**fields).usage
    assert plain is not None and plain.completion_tokens < 40
    longer = client.chat.completions.create(**fields, extra_body={"min_tokens": 40})
    assert longer.usage is not None and longer.usage.completion_tokens >= 40
    best = client.completions.create(model="pagewire-demo", prompt="Count", max_tokens=6, n=2, best_of=5, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in best.choices]
    assert len(means) == 2 and means[0] >= means[1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_ends_inside_a_character_is_not_part_of_the_answer(server: Server, stream: bool) -> None:
    """vllm-project/vllm#48853: the answer began with text of the prompt."""
    ids = post(server, "/tokenize", prompt="The secret word is Swordfish 🦊")["tokens"]
    whole = post(server, "/detokenize", tokens=ids)["prompt"]
    cut = next(
        n
        for n in range(len(ids) - 1, 0, -1)
        if whole.startswith(post(server, "/detokenize", tokens=ids[:n])["prompt"][:-1])
    )
    assert post(server, "/detokenize", tokens=ids[:cut])["prompt"].endswith("\ufffd"), "the fox has several tokens"
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    rest = {str(id): 100 for id in ids[cut:]}  # would complete the character
    answer = client.completions.create(
        model="pagewire-demo",
        prompt=ids[:cut],
        max_tokens=len(rest),
        temperature=0,
        stream=stream,
        logit_bias=rest,
    )
    text = "".join(c.choices[0].text for c in answer if c.choices) if stream else answer.choices[0].text
    assert "Swordfish" not in text and "🦊" not in text and "secret" not in text


def test_a_chat_template_of_a_request_needs_the_flag_and_is_sandboxed(
    start: Callable[..., Server], server: Server
) -> None:
    fields = {"messages": QUESTION, "chat_template": "{{ messages[0].content }}|{{ word }}",
              "chat_template_kwargs": {"word": "x"}}  # fmt: skip
    assert refusal(server, "/v1/chat/completions", **fields)["param"] == "chat_template"
    trusting = start("--trust-request-chat-template").wait_ready()
    ids = post(trusting, "/tokenize", **fields)["tokens"]
    assert post(trusting, "/detokenize", tokens=ids)["prompt"] == "Count from 1 to 5|x"
    assert post(trusting, "/v1/chat/completions", max_tokens=2, **fields)["choices"]
    broken = refusal(trusting, "/v1/chat/completions", **fields | {"chat_template": "{% if %}"})
    assert "chat_template" in broken["message"]
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    assert "refuses" in refusal(trusting, "/tokenize", **fields | {"chat_template": escape})["message"]


def test_tokenizer_info_has_special_tokens_and_the_chat_template(server: Server) -> None:
    info = json.loads(server.get("/tokenizer_info"))
    assert info["eos_token"] and "{%" in info["chat_template"] and {"bos_token", "pad_token"} <= info.keys()

"""A server whose ranks have whole experts gives the tokens of one rank, and says how evenly the experts are used."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import vocabulary
from waiting import until

from pagewire import LLM, SamplingParams
from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
PROMPTS = [[5, 9, 40, 33, 12], [7] * 30, [3 + i for i in range(50)]]


def _complete(server: Server) -> list[list[int]]:
    body = {"prompt": PROMPTS, "max_tokens": 16, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choices = json.load(response)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


@pytest.mark.parametrize(
    ("size", "sizes", "share"),
    [
        (2, {"num_experts": 7}, "4 of 7"),
        pytest.param(3, {"num_attention_heads": 6, "num_key_value_heads": 3}, "3 of 8", marks=pytest.mark.long),
    ],
)
def test_uneven_parts_of_the_experts(
    size: int, sizes: dict[str, Any], share: str, tmp_path: Path, start: Callable[..., Server]
) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, "qwen3_moe", **sizes))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", threads=1)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    flags = ("--dtype", "float32", "--tensor-parallel-size", str(size), "--enable-expert-parallel")
    server = start(str(folder), *flags).wait_ready()
    assert f"{share} experts of a layer on this rank, whole" in server.announced()
    assert _complete(server) == expected
    # Two layers have experts, and each token has three of them in each.
    computed = sum(len(prompt) + 15 for prompt in PROMPTS)
    until(lambda: server.metric("pagewire:expert_tokens_total") == 2 * 3 * computed, "idle ranks report their load")
    until(lambda: server.metric("pagewire:expert_imbalance") >= 2, "the ratio of each of two layers")
    assert server.stop() == 0, server.log.read_text()


def test_a_model_without_experts_is_refused_before_anything_starts(start: Callable[..., Server]) -> None:
    server = start("--tensor-parallel-size", "2", "--enable-expert-parallel")
    assert server.process.wait(20) == 2
    expected = "pagewire: --enable-expert-parallel is for models with experts, and this one has none; leave it out.\n"
    assert server.log.read_text() == expected

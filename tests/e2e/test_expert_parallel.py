"""A server whose ranks have whole experts gives the tokens of one rank, and says how evenly the experts are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import families
import pytest
import torch
import vocabulary
from completions import complete
from safetensors.torch import load_file, save_file
from waiting import until

from pagewire import LLM, SamplingParams
from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
PROMPTS = [[5, 9, 40, 33, 12], [7] * 30, [3 + i for i in range(50)]]


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
    assert complete(server, PROMPTS, max_tokens=16) == expected
    # Two layers have experts, and each token has three of them in each.
    computed = sum(len(prompt) + 15 for prompt in PROMPTS)
    until(lambda: server.metric("pagewire:expert_tokens_total") == 2 * 3 * computed, "idle ranks report their load", 60)
    until(lambda: server.metric("pagewire:expert_imbalance") >= 2, "the ratio of each of two layers", 60)
    assert server.stop() == 0, server.log.read_text()


def test_a_model_without_experts_is_refused_before_anything_starts(start: Callable[..., Server]) -> None:
    server = start("--tensor-parallel-size", "2", "--enable-expert-parallel")
    assert server.process.wait(60) == 2
    expected = "pagewire: --enable-expert-parallel is for models with experts, and this one has none; leave it out.\n"
    assert server.log.read_text() == expected


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_follow_the_load_under_a_stream(num_stages: int, tmp_path: Path, start: Callable[..., Server]) -> None:
    """All tokens choose the experts 0 and 1, which the first rank has."""
    folder = families.make_family(tmp_path, "gpt_oss")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor.copy_(torch.tensor([50.0, 50.0, 0.0, 0.0]))
    save_file(tensors, file, {"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", threads=1)
    (expected,) = (list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS[:1], params, use_tqdm=False))
    flags = ("--dtype", "float32", "--tensor-parallel-size", "2", "--enable-expert-parallel", "--expert-replicas", "1")
    server = start(str(folder), *flags, "--pipeline-parallel-size", str(num_stages)).wait_ready()
    assert "2 of 4 experts of a layer on this rank, whole, and room for 1 more" in server.announced()
    # The ranks report after 1,000 steps, in the midst of the second answer.
    for _ in range(2):
        assert complete(server, PROMPTS[:1], max_tokens=700) == [expected]
    moved = "the ranks get the experts ((0, 1, -1), (2, 3, 0))"
    until(lambda: server.log.read_text().count(moved) == 3, "a replica in each of the layers", 60)
    assert complete(server, PROMPTS[:1], max_tokens=700) == [expected]
    # 1.5 : 0.5 instead of 2 : 0.
    until(lambda: server.metric("pagewire:expert_imbalance") < 1.6 * 3, "the second rank has replicas", 60)
    server.of_kind("worker")[1].kill()
    assert complete(server, PROMPTS[:1], max_tokens=700) == [expected], "new ranks have what was dealt"
    assert server.stop() == 0, server.log.read_text()

"""Ranks of a quantized checkpoint each read their part of the packed tensors, and give the tokens of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import quantized_checkpoints
import vocabulary
from completions import complete

from pagewire import LLM, SamplingParams
from pagewire.tools.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.long]
PROMPTS = [[5, 9, 40, 33, 12], [7] * 30, [3 + i for i in range(50)]]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 64}), ("jamba", {}), ("bamba", {}), ("minimax", {})],
)
def test_two_ranks_of_an_awq_checkpoint_give_the_tokens_of_one_rank(
    family: str, sizes: dict[str, Any], tmp_path: Path, start: Callable[..., Server]
) -> None:
    source = checkpoints.make_checkpoint(tmp_path / "float", family, intermediate_size=128, **sizes)
    vocabulary.add_tokenizer(source)
    folder, _ = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "awq")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", threads=1)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    server = start(str(folder), "--dtype", "float32", "--tensor-parallel-size", "2").wait_ready()
    assert complete(server, PROMPTS, max_tokens=16) == expected
    assert "4 bits (awq)" in server.announced()


def test_a_number_of_ranks_that_splits_a_group_is_refused(tmp_path: Path, start: Callable[..., Server]) -> None:
    """Two ranks cannot share three groups of 32 feed-forward columns."""
    source = checkpoints.make_checkpoint(tmp_path / "float", "qwen3")
    vocabulary.add_tokenizer(source)
    folder, _ = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "awq")
    server = start(str(folder), "--dtype", "float32", "--tensor-parallel-size", "2")
    assert server.process.wait(60) == 2
    log = server.log.read_text()
    assert "mlp.down_proj is quantized 32 columns at a time" in log and "choose another --tensor-parallel-size" in log

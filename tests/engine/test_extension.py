"""Loading an extension by name, passing its bytes to attention, and the example in the documents."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.engine.attention.base import AttentionParameters, AttentionStep
from pagewire.engine.attention.kv_cache import KvCache, KvShape
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.engine.extension import load_extension
from pagewire.errors import ConfigError
from pagewire.kernels.ops import reference_ops

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SIZE = 16


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("topk_blocks", "topk_attention"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("topk_blocks", "write module:Class"),
        (":TopkBlocks", "write module:Class"),
        ("no_such_module:X", "no_such_module cannot be imported"),
        ("topk_blocks:Nothing", "no class Nothing"),
        ("topk_blocks:BlockBudget", "no class BlockBudget with core and wrap_attention"),
        ("topk_blocks:TopkBlocks,share", "'share' is not an option=value"),
        ("topk_blocks:TopkBlocks,share=1,share=2", "'share=2' is not an option=value, or the option is given twice"),
    ],
)
def test_an_invalid_extension_spec_is_refused(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_extension(spec)


def test_the_core_half_works_without_importing_torch():
    kind, options = load_extension("topk_blocks:TopkBlocks,share=0.5,least=2")
    assert options == {"share": "0.5", "least": "2"}
    assert "topk_attention" not in sys.modules
    data = kind.core(options).extend(1, [7, 8, 9], [1, 1, 40], [0, 160, 20])
    assert np.frombuffer(data, "<i4").tolist() == [2, 5, 2]
    for wrong in ({"share": "2"}, {"share": "many"}, {"least": "0"}, {"k": "3"}):
        with pytest.raises(ConfigError):
            kind.core(wrong)


def decode_step(contexts, tables, budgets, order):
    return AttentionStep(
        num_decode=len(contexts),
        context_lens=np.array(contexts),
        query_lens=np.ones(len(contexts), np.int64),
        tables=tables[None],
        slots=torch.tensor(
            [[int(t[(c - 1) // SIZE]) * SIZE + (c - 1) % SIZE for t, c in zip(tables, contexts, strict=True)]]
        ),
        order=np.array(order),
        extension=np.array(budgets, np.int32).tobytes(),
    )


def test_the_blocks_with_the_largest_scores_are_kept():
    """Each row's query points at the keys of two blocks. With a budget of 3 of 10 blocks the output is nearly exact;
    with a budget of all blocks it is exact."""
    torch.manual_seed(5)
    shape = KvShape.uniform(num_layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    cache = KvCache(shape=shape, num_pages=64, block_size=SIZE, device=torch.device("cpu"))
    kind, options = load_extension("topk_blocks:TopkBlocks")
    exact = TorchPagedAttention(cache=cache, ops=reference_ops(), dtype=torch.float32)
    approximate = kind.wrap_attention(
        options, TorchPagedAttention(cache=cache, ops=reference_ops(), dtype=torch.float32), cache
    )
    rng = random.Random(2)
    blocks = rng.sample(range(64), 40)
    tables = np.array([blocks[10 * row : 10 * row + 10] for row in range(4)], np.int32)
    contexts = [146, 150, 155, 160]
    order = [2, 0, 3, 1]  # the step's row 0 is the plan's row 2
    budgets = [3, 10, 3, 3]  # one per row of the plan
    step = decode_step(contexts, tables, budgets, order)
    query = torch.randn(4, 4, 8)
    for keys, values in cache.pages:
        keys.normal_(std=0.1)
        values.normal_()
        for row in range(4):
            direction = query[row].view(2, 2, 8).sum(1)
            for index in rng.sample(range(9), 2):
                keys[tables[row, index]] += 10 * direction
    key, value = 0.1 * torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    exact.begin(step)
    approximate.begin(step)
    parameters = AttentionParameters(scale=1.0)
    for layer in range(2):
        expected = exact.forward(layer, query, key, value, parameters)
        got = approximate.forward(layer, query, key, value, parameters)
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
        assert not torch.equal(got, expected), "rows with a budget of 3 leave blocks out"
        assert torch.equal(got[order.index(1)], expected[order.index(1)]), "the budget covers all blocks of this row"


@pytest.mark.slow
def test_tokens_are_equal_if_the_budget_covers_all_blocks(tmp_path):
    checkpoints.make_checkpoint(tmp_path, "llama")
    vocabulary.add_tokenizer(tmp_path)
    rng = random.Random(1)
    prompts = [
        [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in (1, 15, 16, 40, 100, 150, 200, 260)
    ]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def tokens(**options):
        llm = LLM(str(tmp_path), dtype="float32", threads=1, max_model_len=512, kv_cache_memory="8M", **options)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    plain = tokens()
    assert tokens(extension="topk_blocks:TopkBlocks,share=1,least=1") == plain
    assert tokens(extension="topk_blocks:TopkBlocks,share=0.01,least=18") == plain, "18 blocks hold 284 tokens"
    few = tokens(extension="topk_blocks:TopkBlocks,share=0.01,least=2")
    assert few != plain
    assert few[0] == plain[0], "a row of up to two blocks is exact"

"""`--attention-backend`: torch's attention for whole models, and the adapters of FlashInfer and FlashAttention.

Neither package can be installed without a GPU. The adapters call stand-ins with the packages' signatures, which check
what the packages demand of their arguments and compute with `reference.paged_attention`.
"""

import random
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import checkpoints
import numpy as np
import pytest
import torch
from runner_driver import Request, arrays

from pagewire.engine.attention.base import AttentionParameters
from pagewire.engine.attention.cache_groups import Lifetime
from pagewire.engine.attention.kv_cache import KvCache, KvShape, Tile
from pagewire.engine.gpu.attention import HostRows, host_attention, lacks
from pagewire.engine.models.description import Reach
from pagewire.engine.models.program import Attend, Vector
from pagewire.ipc.messages import Sampling
from pagewire.kernels.reference import paged_attention

CPU = torch.device("cpu")
BF16 = torch.bfloat16
LENGTHS = (1, 15, 16, 17, 45)
SMALL = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow


def _prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


class BatchPrefillWithPagedKVCacheWrapper:
    """The signatures of flashinfer, of which 0.7.2 has all arguments and some more."""

    calls = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.nbytes >= 128 << 20
        assert kv_layout == "HND" and not use_cuda_graph
        self.planned = None

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32 and each.is_contiguous()
        assert causal and head_dim_qk in (64, 128, 256)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        starts = paged_kv_indptr.tolist()
        table = torch.zeros(len(starts) - 1, int(paged_kv_indptr.diff().max()), dtype=torch.int32)
        for row, (first, end) in enumerate(pairwise(starts)):
            table[row, : end - first] = paged_kv_indices[first:end]
        context_lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        window = None if window_left < 0 else window_left + 1
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type or q_data_type
        self.planned = table, context_lens, qo_indptr.diff(), sm_scale, window, logits_soft_cap, sizes

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        assert self.planned is not None and sinks is None
        table, context_lens, query_lens, scale, window, softcap, sizes = self.planned
        k, v = paged_kv_cache
        assert k.stride() == v.stride() and k.stride(-1) == 1
        assert sizes == (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.dtype, k.dtype)
        assert q.shape[0] == query_lens.sum()
        type(self).calls += 1
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        result = paged_attention(q, k, v, table, context_lens, query_lens, scale, window, softcap or None)
        if out is None:
            return result
        assert out.is_contiguous() and out.dtype == q.dtype
        return out.copy_(result)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """The signature of flash-attn 2. Of a window of (w, 0) a query sees the w keys before it, and itself."""
    assert q.dtype in (torch.float16, BF16) and q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == 1
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    for each in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert each.dtype == torch.int32 and each.is_contiguous()
    assert causal and q.shape[0] == cu_seqlens_q[-1]
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    assert block_table.shape[1] * k.shape[1] >= max_seqlen_k
    window = None if window_size[0] < 0 else window_size[0] + 1
    lens = cu_seqlens_k.diff(), cu_seqlens_q.diff()
    return paged_attention(q, k, v, block_table, *lens, softmax_scale, window, softcap or None)


@pytest.fixture
def packages(monkeypatch):
    flashinfer, flash_attn = ModuleType("flashinfer"), ModuleType("flash_attn")
    wrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setattr(flashinfer, wrapper.__name__, wrapper, raising=False)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    for module in (flashinfer, flash_attn):
        module.__spec__ = ModuleSpec(module.__name__, None)  # transformers looks for it
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(wrapper, "calls", 0)


def cache_of(block_size: int, window: int) -> KvCache:
    """Two layers, one with a window, whose pages hold random numbers."""
    tiles = Tile(2, 64, 64), Tile(2, 64, 64, Lifetime("window", window))
    cache = KvCache(
        shape=KvShape(layers=tiles, dtype=BF16), num_pages=40, block_size=block_size, device=CPU, head_major=True
    )
    for part in (part for pair in cache.pages for part in pair):
        part.copy_(torch.randn(part.shape))
    return cache


def rows_of(cache: KvCache, rng: np.random.Generator) -> HostRows:
    """Two decode rows, a prompt, a chunk after a long prefix, and three tokens at the end of a page. Where a window has
    passed, the tables hold no page."""
    size = cache.block_size
    counts, contexts = np.array([1, 1, size + 3, 20, 3]), np.array([5, size, size + 3, 3 * size + 7, 2 * size])
    tables = rng.integers(0, cache.num_pages, (cache.groups.num_tables, len(counts), 6)).astype(np.int32)
    for tile, window in enumerate((None, 20)):
        for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
            first = 0 if window is None else max(0, context - count + 1 - window) // size
            tables[cache.tables[tile], row, :first] = -1
    return HostRows(num_decode=2, query_lens=counts, context_lens=contexts, tables=tables)


@pytest.mark.parametrize(("name", "block_size"), [("torch", 16), ("flashinfer", 16), ("flash-attn", 256)])
def test_a_backend_computes_what_the_reference_does(name, block_size, packages):
    """Three steps, so that plans are made anew; the second has the rows in another order."""
    torch.manual_seed(0)
    cache, rng = cache_of(block_size, window=20), np.random.default_rng(0)
    found = host_attention(name, dtype=BF16, kv_dtype=BF16, device=CPU, depth=2)
    assert found is not None
    found.backend.open(cache)
    layers = [AttentionParameters(scale=0.2), AttentionParameters(scale=0.1, window=20, softcap=4.0)]
    for _ in range(3):
        rows = rows_of(cache, rng)
        total = rows.num_tokens
        query = torch.randn(total + 4, 4, 64).to(BF16)  # with padding
        with found.step(rows):
            for tile, parameters in enumerate(layers):
                wide = torch.full((total + 4, 4 * 64 + 8), torch.nan, dtype=BF16)
                out = wide[:, : 4 * 64].view(-1, 4, 64) if tile else torch.full_like(query, torch.nan)
                found.attend(out, query, tile, parameters)
                keys, values = (pages.transpose(1, 2) for pages in cache.pages[tile])
                expected = paged_attention(
                    query[:total], keys, values, torch.from_numpy(rows.tables[cache.tables[tile]]).clamp(min=0),
                    torch.from_numpy(rows.context_lens), torch.from_numpy(rows.query_lens), parameters.scale,
                    parameters.window, parameters.softcap,
                )  # fmt: skip
                first = 0 if found.backend.decodes else rows.num_decode
                torch.testing.assert_close(out[first:total], expected[first:], atol=3e-2, rtol=3e-2)
                assert out[:first].isnan().all() and out[total:].isnan().all(), "other tokens are not written"
        assert found.rows is None


def _layer(**changes) -> Attend:
    sizes = {"layer": 0, "tile": 0, "heads": 4, "kv_heads": 2, "head_dim": 64, "value_dim": 64, "scale": 1.0}
    return Attend(**{**sizes, "reach": Reach(), **changes})


def test_a_backend_says_which_layers_it_lacks():
    sinks = Vector("sinks", ())
    assert lacks("flashinfer", _layer(), BF16, BF16) == lacks("flash-attn", _layer(softcap=3.0), BF16, BF16) == ""
    assert lacks("flash-attn", _layer(sinks=sinks), BF16, BF16) == "sinks"
    assert lacks("flashinfer", _layer(head_dim=32, value_dim=32), BF16, BF16) == "heads of 32 numbers"
    assert lacks("flash-attn", _layer(), torch.float32, torch.float32) == "float32"
    assert lacks("flashinfer", _layer(), BF16, torch.float8_e4m3fn) == "a KV cache of fp8"
    assert lacks("torch", _layer(sinks=sinks), torch.float32, torch.float32) == ""
    assert lacks("torch", _layer(), BF16, torch.float8_e4m3fn) == "an fp8 KV cache"
    assert host_attention("auto", dtype=BF16, kv_dtype=BF16, device=CPU, depth=2) is None


@pytest.mark.parametrize("kind", ["qwen2-sliding", "qwen3"])
def test_torchs_attention_gives_the_tokens_of_transformers(kind, checkpoint, driver):
    folder = checkpoint(kind, num_hidden_layers=2)
    prompts = _prompts(kind)
    expected = checkpoints.reference_greedy(folder, prompts, 4)
    served = driver(folder, attention_backend="torch", **SMALL)
    assert "attention by torch" in served.runner.notes[0]
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == expected


def test_prompts_by_flashinfer_beside_decode_rows_by_triton(checkpoint, driver, packages):
    """The same log-probabilities as with Triton alone, up to roundings to bfloat16."""
    folder = checkpoint("qwen3", num_hidden_layers=2, head_dim=64, initializer_range=0.1)

    def logprobs(**flags):
        served = driver(folder, dtype="bfloat16", **flags, **SMALL)
        scoring = Sampling(temperature=0, prompt_logprobs=0)
        requests = [Request(prompt, max_new=2, sampling=scoring) for prompt in _prompts(0)[1:]]
        served.run(requests, chunk=20, budget=32, rows=3)
        return served.runner.notes[0], [arrays(request.prompt_logprobs)[1] for request in requests]

    _, alone = logprobs()
    assert BatchPrefillWithPagedKVCacheWrapper.calls == 0
    text, beside = logprobs(attention_backend="flashinfer")
    assert "attention of prompts, in steps that are not recorded, by flashinfer" in text
    steps = BatchPrefillWithPagedKVCacheWrapper.calls / 2  # of two layers
    assert 1 < steps <= 2 * len(LENGTHS)
    for ours, theirs in zip(alone, beside, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.1)


def test_layers_that_a_backend_lacks_stay_with_triton(checkpoint, driver, packages):
    """The heads have 16 numbers."""
    folder = checkpoint("qwen3", num_hidden_layers=1)
    served = driver(folder, dtype="bfloat16", attention_backend="flashinfer", **SMALL)
    text = "1 layer by Triton, because flashinfer lacks heads of 16 numbers"
    assert text in served.runner.notes[0]
    served.run([Request(_prompts(0)[-1], max_new=2)], chunk=20, budget=32, rows=3)
    assert BatchPrefillWithPagedKVCacheWrapper.calls == 0

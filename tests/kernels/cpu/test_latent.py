"""MLA by the C kernels against the reference, and its bits in steps that cut a sequence in other ways."""

import random
from itertools import pairwise

import pytest
import torch

from pagewire.kernels import reference_latent as reference
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.latent import NativeLatent

# heads, nope, rope, rank, value
SHAPES = {"tiny": (3, 8, 6, 20, 10), "small": (4, 32, 16, 64, 24), "DeepSeek": (6, 128, 64, 512, 128)}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def layer(level, shape, dtype=torch.float32):
    """The layer's products in C, and its weights."""
    heads, nope, rope, rank, value = shape
    weight = (torch.randn(heads * (nope + value), rank) * rank**-0.5).to(dtype)
    keys, values = reference.split_kv_b(weight, heads, nope)
    in_latents = [NativeMatrix(level, part.t().contiguous()) for part in keys]
    native = NativeLatent(level, in_latents, [NativeMatrix(level, part.contiguous()) for part in values], rope)
    return native, keys.float(), values.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 13, 70])
def test_products(level, shape, dtype, tokens):
    heads, nope, rope, rank, _ = shape
    native, keys, values = layer(level, shape, dtype)
    q = torch.randn(tokens, heads * (nope + rope) + 5)[:, 5:].view(tokens, heads, -1)  # columns of a wider tensor
    absorbed = native.absorb(q)
    torch.testing.assert_close(absorbed, reference.absorb(q, keys), atol=1e-4, rtol=1e-5)
    assert torch.equal(absorbed[:, :, rank : rank + rope], q[:, :, nope:])
    assert not absorbed[:, :, rank + rope :].any()
    attended = torch.randn(absorbed.shape)
    torch.testing.assert_close(native.expand(attended), reference.expand(attended, values), atol=1e-4, rtol=1e-5)
    assert torch.equal(native.absorb(q[-1:]), absorbed[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_latent(level, shape, dtype):
    _, _, rope, rank, _ = shape
    native, _, _ = layer(level, shape)
    latent, key = torch.randn(6, rank + rope + 3).split([rank, rope + 3], dim=1)
    slots, width = torch.tensor([11, 0, 6, 7, 3, 14]), reference.cache_width(rank, rope)
    wide = torch.full((2, 4, 5 * width), 3.0, dtype=dtype)  # pages that are not adjacent
    mine, theirs = (memory[:, : 4 * width].view(4, 4, width) for memory in wide)
    native.write_latent(latent, key[:, :rope], mine, slots)
    reference.write_latent(latent, key[:, :rope], theirs, slots)
    assert torch.equal(wide[0], wide[1]) and (wide[0, :, 4 * width :] == 3).all()


class Cached:
    """Random latents of rows, in pages in a random order."""

    def __init__(self, shape, contexts, dtype, block_size=8):
        _, _, rope, rank, _ = shape
        self.contexts = contexts
        most = -(-max(contexts) // block_size)
        pages = random.Random(0).sample(range(len(contexts) * most), len(contexts) * most)
        self.table = torch.tensor(pages, dtype=torch.int32).view(len(contexts), most)
        self.pages = torch.full((len(pages), block_size, reference.cache_width(rank, rope)), torch.nan, dtype=dtype)
        for row, context in enumerate(contexts):
            at = torch.arange(context)
            slots = self.table[row, at // block_size].long() * block_size + at % block_size
            reference.write_latent(torch.randn(context, rank), torch.randn(context, rope), self.pages, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(level, shape, dtype):
    heads, nope, rope, _, _ = shape
    native, keys, _ = layer(level, shape)
    cached = Cached(shape, [40, 1, 9, 200], dtype)
    counts = torch.tensor([40, 1, 3, 1])
    query = reference.absorb(torch.randn(int(counts.sum()), heads, nope + rope), keys)
    arguments = cached.table, torch.tensor(cached.contexts), counts, (nope + rope) ** -0.5
    out = native.attend_latent(query, cached.pages, *arguments)
    expected = reference.attend_latent(query, cached.pages.nan_to_num(), *arguments)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_depend_on_its_inputs_only(level, shape, dtype, rounds):
    """From queries to the heads' outputs: in one step, cut into several, and beside other rows."""
    heads, nope, rope, _, _ = shape
    native, _, _ = layer(level, shape, dtype)
    cached = Cached(shape, [1100 if heads < 6 else 70, 33], dtype)
    length, chosen = cached.contexts[0], random.Random(0)
    q, other = torch.randn(length, heads, nope + rope), torch.randn(33, heads, nope + rope)
    scale = (nope + rope) ** -0.5

    def step(first, end, company):
        queries = torch.cat((q[first:end], other[33 - company :]))
        query = native.absorb(queries)
        contexts, counts = torch.tensor([end, 33]), torch.tensor([end - first, company])
        if not company:
            contexts, counts = contexts[:1], counts[:1]
        out = native.attend_latent(query, cached.pages, cached.table, contexts, counts, scale, rounds=rounds)
        return native.expand(out)[: end - first]

    whole = step(0, length, 0)
    cuts = [0, *sorted(chosen.sample(range(1, length), 5)), length - 1, length]
    parts = torch.cat([step(first, end, chosen.choice([0, 1, 33])) for first, end in pairwise(cuts)])
    assert torch.equal(whole, parts)

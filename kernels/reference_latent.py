"""Multi-head latent attention (MLA) in plain torch: the specification of `kernels/cpu/latent.h`, on any device.

Always in its absorbed form: the cache holds one latent and one turned key for a position, and a query is brought into
their space. A position of the cache has `cache_width` numbers: the latent [rank], the turned key [rope], and zeros. So
has a query of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference

LANES = 16


def cache_width(rank: int, rope: int) -> int:
    """Numbers of a position: a multiple of 16, which kernels take at once."""
    return -(-(rank + rope) // LANES) * LANES


def split_kv_b(weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """kv_b [heads · (nope + value), rank], for each head its key rows and then its value rows → [heads, nope, rank] and
    [heads, value, rank]."""
    by_head = weight.view(heads, -1, weight.shape[1])
    return by_head[:, :nope], by_head[:, nope:]


def absorb(q: Tensor, keys: Tensor) -> Tensor:
    """A query in the space of the cache. q: [tokens, heads, nope + rope], the last `rope` turned; keys: [heads, nope,
    rank] of `split_kv_b`. Result [tokens, heads, cache_width]."""
    nope, rank = keys.shape[1:]
    latent, turned = torch.einsum("thd,hdr->thr", q[:, :, :nope], keys), q[:, :, nope:]
    rope = turned.shape[2]
    return F.pad(torch.cat((latent, turned), dim=-1), (0, cache_width(rank, rope) - rank - rope))


def expand(attended: Tensor, values: Tensor) -> Tensor:
    """The heads' outputs. attended: [tokens, heads, cache_width], what `attend_latent` returns; values: [heads, value,
    rank] of `split_kv_b`. Result [tokens, heads, value]."""
    return torch.einsum("thr,hvr->thv", attended[:, :, : values.shape[2]], values)


def write_latent(latent: Tensor, key: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Writes the step's latents, after their norm, and turned keys to the cache.

    latent: [tokens, rank]; key: [tokens, rope]; pages: [pages, block_size, cache_width], changed in place; slots:
    [tokens] int64, page · block_size + offset. Values are rounded to the pages' type.
    """
    row = torch.cat((latent, key), dim=-1)
    at = (slots // pages.shape[1], slots % pages.shape[1])
    pages.index_put_(at, F.pad(row, (0, pages.shape[2] - row.shape[1])).to(pages.dtype))


def attend_latent(
    query: Tensor, pages: Tensor, block_table: Tensor, context_lens: Tensor, query_lens: Tensor, scale: float
) -> Tensor:
    """Causal attention of several rows over the cache. query: [tokens, heads, cache_width] of `absorb`, row after row;
    pages: as in `write_latent`; the others: as in `reference.paged_attention`. Result as query; its first `rank`
    numbers are the weighted sum of latents."""
    both = pages[:, :, None]
    return reference.paged_attention(query, both, both, block_table, context_lens, query_lens, scale, None, None)

"""Multi-head latent attention by the C kernels, with the results of `reference_latent`."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference_latent import cache_width
from .dense import PackedMatrix
from .library import Kernels
from .structs import LatentFields, MatrixFields, Pages


class NativeLatent:
    """The matrices of a layer, a pair for each head. All activations are float32."""

    def __init__(
        self, kernels: Kernels, keys: Sequence[PackedMatrix], values: Sequence[PackedMatrix], rope: int
    ) -> None:
        """keys: [rank, nope] and values: [value, rank] of each head, of `reference_latent.split_kv_b`, the keys
        transposed; rope: features of a key that turn."""
        self._kernels = kernels
        self._matrices = (*keys, *values)  # whose memory `fields` points to
        self._packed = (MatrixFields * len(self._matrices))(*(part.fields(None) for part in self._matrices))
        first, heads = ctypes.addressof(self._packed), len(keys)
        rank, nope, value = self._packed[0].n, self._packed[0].k, self._packed[heads].n
        self.fields = LatentFields(
            keys=first, values=first + heads * ctypes.sizeof(MatrixFields), heads=heads, nope=nope, rope=rope,
            rank=rank, value=value, width=cache_width(rank, rope),
        )  # fmt: skip

    def absorb(self, q: Tensor) -> Tensor:
        q = q if q[:1].is_contiguous() else q.contiguous()
        out = torch.empty((q.shape[0], self.fields.heads, self.fields.width))
        self._kernels.absorb(
            ctypes.addressof(self.fields), q.data_ptr(), q.stride(0), out.data_ptr(), q.shape[0]
        )  # fmt: skip
        return out

    def expand(self, attended: Tensor) -> Tensor:
        assert attended.is_contiguous(), attended.stride()
        out = torch.empty((attended.shape[0], self.fields.heads, self.fields.value))
        self._kernels.expand(
            ctypes.addressof(self.fields), attended.data_ptr(), out.data_ptr(), out.stride(0), out.shape[0]
        )  # fmt: skip
        return out

    def write_latent(self, latent: Tensor, key: Tensor, pages: Tensor, slots: Tensor) -> None:
        assert latent.stride(1) == key.stride(1) == 1, (latent.stride(), key.stride())
        cache = Pages(
            keys=pages.data_ptr(), block_size=pages.shape[1], page_stride=pages.stride(0) * pages.element_size(),
            bf16=pages.dtype == torch.bfloat16,
        )  # fmt: skip
        self._kernels.write_latent(
            ctypes.addressof(self.fields), ctypes.addressof(cache), latent.data_ptr(), latent.stride(0),
            key.data_ptr(), key.stride(0), slots.data_ptr(), slots.shape[0],
        )  # fmt: skip

    def attend_latent(
        self,
        query: Tensor,
        pages: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_lens: Tensor,
        scale: float,
        *,
        rounds: bool = False,
    ) -> Tensor:
        """block_table: int32, context_lens and query_lens: int64. rounds: queries and weights are rounded to bfloat16,
        as a cache of bfloat16 is."""
        _, block_size, width = pages.shape
        assert pages[0].is_contiguous() and query.is_contiguous(), (pages.stride(), query.stride())
        cache = Pages(
            keys=pages.data_ptr(), values=pages.data_ptr(), heads=self.fields.heads, kv_heads=1, dim=width,
            block_size=block_size, scale=scale, bf16=pages.dtype == torch.bfloat16, rounds=rounds,
            page_stride=pages.stride(0) * pages.element_size(),
        )  # fmt: skip
        out = torch.empty_like(query)
        self._kernels.attend(
            ctypes.addressof(cache), query.data_ptr(), query.stride(0), block_table.data_ptr(), block_table.stride(0),
            context_lens.data_ptr(), query_lens.data_ptr(), out.data_ptr(), query_lens.shape[0],
        )  # fmt: skip
        return out

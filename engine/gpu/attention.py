"""Attention by torch, FlashInfer and FlashAttention in place of the Triton kernels (`--attention-backend`).

They read the same pages as the Triton kernels, after these have written a step's keys and values. All of them need the
lengths and tables of the rows on the host, so the steps that they serve are launched one by one and never recorded.
FlashInfer and FlashAttention serve rows of several tokens in steps with prompts; decode rows, draft tokens, latent
attention, and layers that a backend lacks stay with Triton. Torch's attention serves every row of every step: it is
the reference that the others are compared with.

No GPU has run the adapters of FlashInfer and FlashAttention: tests call them with functions that have the packages'
signatures and compute in torch. No Triton here: `pagewire doctor` asks on machines without it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.ops import reference_ops
from ..attention.base import AttentionParameters, AttentionStep
from ..attention.kv_cache import KvCache
from ..attention.torch_paged import TorchPagedAttention
from ..models.program import Attend, Program

_FLASHINFER_DIMS = (64, 128, 256)  # head dimensions
_FLASHINFER_BYTES = 128 << 20  # of the workspace that its documentation recommends


@dataclass(frozen=True, kw_only=True, eq=False)
class HostRows:
    """The rows of a step as the host knows them, in the order of their tokens. Those of one token come first."""

    num_decode: int  # rows of one token
    query_lens: NDArray[np.int64]  # [rows] tokens of the step
    context_lens: NDArray[np.int64]  # [rows] keys, this step's tokens included
    tables: NDArray[np.int32]  # [tables, rows, blocks]; any values where a row needs no block

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    def prompts(self, table: int, window: int | None, block_size: int) -> "Prompts":
        """The rows of several tokens, with the pages that their tokens see."""
        queries, contexts = self.query_lens[self.num_decode :], self.context_lens[self.num_decode :]
        first = np.zeros_like(contexts)
        if window is not None:
            first = np.maximum(0, contexts - queries + 1 - window) // block_size
        own = self.tables[table, self.num_decode :]
        pages = [row[a:b] for row, a, b in zip(own, first, -(-contexts // block_size), strict=True)]
        return Prompts(queries, contexts - first * block_size, pages)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Rows whose last keys are those of their queries."""

    query_lens: NDArray[np.int64]
    key_lens: NDArray[np.int64]  # in the pages
    pages: list[NDArray[np.int32]]  # of each row


class PagedAttention(Protocol):
    """A backend. `open` comes before the first step, and `begin` before its layers."""

    decodes: bool  # it takes the rows of one token as well

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept between steps."""

    def open(self, cache: KvCache) -> None:
        """cache: head-major."""

    def begin(self, rows: HostRows) -> None: ...

    def attend(self, out: Tensor, query: Tensor, tile: int, parameters: AttentionParameters) -> None:
        """One layer. out, query: [tokens, heads, head_dim], of all rows that it takes; tile: of the cache."""


class HostAttention:
    """A backend, and the layers and steps that it serves."""

    def __init__(self, name: str, backend: PagedAttention, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.backend = backend
        self._name, self._dtypes = name, (dtype, kv_dtype)
        self.rows: HostRows | None = None  # of the step that it serves now

    def takes(self, args: Attend) -> bool:
        return not lacks(self._name, args, *self._dtypes)

    def serves(self, *, has_prompts: bool) -> bool:
        """Whether it serves a step. has_prompts: some rows have more tokens than a row of draft tokens has."""
        return has_prompts or self.backend.decodes

    @contextmanager
    def step(self, rows: HostRows) -> Iterator[None]:
        self.backend.begin(rows)
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def attend(self, out: Tensor, query: Tensor, tile: int, parameters: AttentionParameters) -> None:
        """The rows that the backend takes. out, query: [tokens, heads, head_dim], of all tokens and padding."""
        assert self.rows is not None, "attend before step"
        own = slice(0 if self.backend.decodes else self.rows.num_decode, self.rows.num_tokens)
        self.backend.attend(out[own], query[own], tile, parameters)


def host_attention(
    name: str, *, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device, depth: int
) -> HostAttention | None:
    """The backend of that name; None: Triton's kernels. depth: steps in flight."""
    if name in ("auto", "triton"):
        return None
    makers: dict[str, Callable[[], PagedAttention]] = {
        "torch": lambda: TorchAttention(dtype),
        "flashinfer": lambda: FlashInfer(dtype, device, depth),
        "flash-attn": FlashAttention,
    }
    return HostAttention(name, makers[name](), dtype=dtype, kv_dtype=kv_dtype)


def lacks(name: str, args: Attend, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """What a layer has that the backend lacks; empty: nothing. dtype: of queries."""
    if name == "torch":
        return "an fp8 KV cache" if kv_dtype.itemsize == 1 else ""
    if args.sinks is not None:
        return "sinks"
    if args.alibi is not None:
        return "ALiBi"
    if args.reach.kind == "chunk":
        return "chunked attention"
    if args.value_dim != args.head_dim:
        return f"values of {args.value_dim} numbers beside keys of {args.head_dim}"
    if dtype.itemsize != 2:
        return "float32"
    if kv_dtype != dtype:
        return f"a KV cache of {'fp8' if kv_dtype.itemsize == 1 else 'another type'}"
    if name == "flashinfer" and args.head_dim not in _FLASHINFER_DIMS:
        return f"heads of {args.head_dim} numbers"
    return ""


def note(name: str, program: Program, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """For the operator: which rows and layers the backend serves; empty: none."""
    if name in ("auto", "triton"):
        return ""
    missing = [lacks(name, args, dtype, kv_dtype) for args in program.attention]
    served, reasons = missing.count(""), dict.fromkeys(filter(None, missing))
    rows = "attention" if name == "torch" else "attention of prompts, in steps that are not recorded,"
    if not reasons:
        return f"{rows} by {name}"
    left = f"{_layers(len(missing) - served)} by Triton, because {name} lacks {', '.join(reasons)}"
    return f"{rows} by {name} in {_layers(served)}; {left}" if served else left


def _layers(number: int) -> str:
    return f"{number} layer{'s' * (number > 1)}"


class TorchAttention:
    """The reference's attention. It also converts numbers to their type, so it needs no kernels at all.

    Triton never loads keys that no row sees, but torch multiplies their values by 0. So pages are cleared before rows
    begin to fill them, as `kv_cache.py` says."""

    decodes = True
    nbytes = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._cache: KvCache | None = None
        self._paged: TorchPagedAttention | None = None

    def open(self, cache: KvCache) -> None:
        self._cache = cache.by_position()
        self._paged = TorchPagedAttention(cache=self._cache, ops=reference_ops(), dtype=self._dtype)

    def begin(self, rows: HostRows) -> None:
        assert self._paged is not None and self._cache is not None, "begin before open"
        self._clear(rows, self._cache)
        self._paged.begin(
            AttentionStep(
                num_decode=rows.num_decode,
                context_lens=rows.context_lens,
                query_lens=rows.query_lens,
                tables=rows.tables,
                slots=torch.empty(0),  # Triton writes keys and values
                order=np.arange(len(rows.query_lens)),
            )
        )

    def _clear(self, rows: HostRows, cache: KvCache) -> None:
        size, starts = cache.block_size, rows.context_lens - rows.query_lens
        first, end = -(-starts // size), -(-rows.context_lens // size)  # the blocks that the step begins
        begun = [rows.tables[:, row, a:b].reshape(-1) for row, (a, b) in enumerate(zip(first, end, strict=True))]
        cache.clear(torch.from_numpy(np.concatenate(begun).astype(np.int64)).to(cache.device))
        for row in range(rows.num_decode, len(starts)):
            if inside := int(starts[row] % size):  # perhaps behind copied positions
                for table in set(cache.tables):
                    cache.clear_rest(table, int(rows.tables[table, row, first[row] - 1]), inside)

    def attend(self, out: Tensor, query: Tensor, tile: int, parameters: AttentionParameters) -> None:
        assert self._paged is not None, "attend before open"
        out.copy_(self._paged.forward(tile, query, None, None, parameters))


class FlashInfer:
    """FlashInfer's prefill over a paged cache in the layout HND, which is that of our pages. `plan` prepares a step on
    the host, once for all layers of equal sizes and reach.

    A plan is copied to the device from pinned memory of its wrapper. So a wrapper is used again only when its last step
    has ended: there is one for each step in flight.
    """

    decodes = False

    def __init__(self, dtype: torch.dtype, device: torch.device, depth: int) -> None:
        self._dtype, self._depth = dtype, depth
        self._workspace = torch.empty(_FLASHINFER_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[object, ...], Any] = {}
        self._planned: set[tuple[object, ...]] = set()
        self._cache: KvCache | None = None
        self._rows: HostRows | None = None
        self._number = 0  # of the step, modulo the depth

    @property
    def nbytes(self) -> int:
        return self._workspace.nbytes

    def open(self, cache: KvCache) -> None:
        self._cache = cache

    def begin(self, rows: HostRows) -> None:
        self._rows, self._number = rows, (self._number + 1) % self._depth
        self._planned.clear()

    def attend(self, out: Tensor, query: Tensor, tile: int, parameters: AttentionParameters) -> None:
        assert self._cache is not None, "attend before open"
        pages = self._cache.pages[tile]
        key = (
            self._number, self._cache.tables[tile], query.shape[1:], pages[0].shape[1], parameters.scale,
            parameters.window, parameters.softcap,
        )  # fmt: skip
        if key not in self._wrappers:
            import flashinfer

            self._wrappers[key] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        wrapper = self._wrappers[key]
        if key not in self._planned:
            self._plan(wrapper, query, tile, parameters)
            self._planned.add(key)
        if out.is_contiguous():
            wrapper.run(query, pages, out=out)
        else:
            out.copy_(wrapper.run(query, pages))

    def _plan(self, wrapper: Any, query: Tensor, tile: int, parameters: AttentionParameters) -> None:
        assert self._cache is not None and self._rows is not None, "plan before begin"
        size, window = self._cache.block_size, parameters.window
        prompts = self._rows.prompts(self._cache.tables[tile], window, size)
        wrapper.plan(
            torch.from_numpy(_starts(prompts.query_lens)),
            torch.from_numpy(_starts(np.array([len(pages) for pages in prompts.pages]))),
            _to_device(np.concatenate(prompts.pages), query.device),
            torch.from_numpy(((prompts.key_lens - 1) % size + 1).astype(np.int32)),
            query.shape[1],
            self._cache.pages[tile][0].shape[1],
            query.shape[2],
            size,
            causal=True,
            sm_scale=parameters.scale,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=parameters.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


class FlashAttention:
    """FlashAttention 2 with a block table. Its kernels take pages of 256 positions, or a multiple, in any strides: with
    this backend `resolve` chooses blocks of that size."""

    decodes = False
    nbytes = 0

    def __init__(self) -> None:
        self._cache: KvCache | None = None
        self._rows: HostRows | None = None
        self._inputs: dict[tuple[int, int | None], tuple[Tensor, Tensor, int, int, Tensor]] = {}

    def open(self, cache: KvCache) -> None:
        self._cache = cache

    def begin(self, rows: HostRows) -> None:
        self._rows = rows
        self._inputs.clear()

    def attend(self, out: Tensor, query: Tensor, tile: int, parameters: AttentionParameters) -> None:
        from flash_attn import flash_attn_varlen_func

        assert self._cache is not None, "attend before open"
        window, reach = parameters.window, (self._cache.tables[tile], parameters.window)
        if reach not in self._inputs:
            self._inputs[reach] = self._inputs_of(*reach, query.device)
        query_starts, key_starts, most_queries, most_keys, table = self._inputs[reach]
        k_pages, v_pages = (pages.transpose(1, 2) for pages in self._cache.pages[tile])
        result = flash_attn_varlen_func(
            query,
            k_pages,
            v_pages,
            query_starts,
            key_starts,
            most_queries,
            most_keys,
            softmax_scale=parameters.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=parameters.softcap or 0.0,
            block_table=table,
        )
        out.copy_(result)

    def _inputs_of(
        self, table: int, window: int | None, device: torch.device
    ) -> tuple[Tensor, Tensor, int, int, Tensor]:
        """(starts of the rows' queries, and of their keys; the most of each; block table)."""
        assert self._cache is not None and self._rows is not None, "attend before begin"
        prompts = self._rows.prompts(table, window, self._cache.block_size)
        padded = np.zeros((len(prompts.pages), max(map(len, prompts.pages))), np.int32)
        for row, pages in zip(padded, prompts.pages, strict=True):
            row[: len(pages)] = pages
        return (
            _to_device(_starts(prompts.query_lens), device),
            _to_device(_starts(prompts.key_lens), device),
            int(prompts.query_lens.max()),
            int(prompts.key_lens.max()),
            _to_device(padded, device),
        )


def _starts(lens: NDArray[np.int64]) -> NDArray[np.int32]:
    """[rows + 1]: where each row begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)


def _to_device(array: NDArray[np.int32], device: torch.device) -> Tensor:
    """Without waiting for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

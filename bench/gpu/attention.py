"""Attention over the paged cache: bandwidth of decode attention, and operations per second of prompts' attention."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...engine.device.queue import Queue
from ...kernels.triton.decode_attention import DecodeWorkspace, decode_attention, plan_decode, workspace_decode
from ...kernels.triton.extend_attention import TILE_ROWS, extend_attention, extend_work, tile_tokens
from .clock import copy_gbs, microseconds
from .figures import Figure
from .setting import Setting

_LEAST_SHARE = 88  # % of the bandwidth of a copy in the same run, from 64 rows and 1k positions on
HEADS = ((16, 8), (32, 8))  # query and kv heads: Qwen3-0.6B, Llama-3.1-8B


@dataclass(frozen=True, kw_only=True)
class Cached:
    """Rows with random keys and values in pages in random order."""

    queue: Queue
    heads: int
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    lens: Tensor  # [rows] int32

    @classmethod
    def of(
        cls, queue: Queue, lens: list[int], *, heads: int, kv_heads: int, head_dim: int, block_size: int
    ) -> "Cached":
        """Makes the same rows for the same arguments."""
        torch.manual_seed(0)
        most = -(-max(lens) // block_size)
        shape = (len(lens) * most, kv_heads, block_size, head_dim)
        order = torch.randperm(shape[0], dtype=torch.int32)
        return cls(
            queue=queue,
            heads=heads,
            k_pages=torch.randn(shape, dtype=torch.bfloat16, device=queue.device),
            v_pages=torch.randn(shape, dtype=torch.bfloat16, device=queue.device),
            table=order.view(len(lens), most).to(queue.device),
            lens=torch.tensor(lens, dtype=torch.int32, device=queue.device),
        )

    def queries(self, tokens: int) -> Tensor:
        """[tokens, heads, head_dim]."""
        shape = (tokens, self.heads, self.k_pages.shape[3])
        return torch.randn(shape, dtype=torch.bfloat16, device=self.queue.device)

    def workspace(self, *, chunk: int | None = None, num_programs: int | None = None) -> DecodeWorkspace:
        """A workspace that is planned for the rows."""
        rows, most = self.table.shape
        _, kv_heads, block_size, head_dim = self.k_pages.shape
        workspace = workspace_decode(
            rows=rows,
            max_context=most * block_size,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_programs=num_programs or self.queue.num_programs(head_dim),
            chunk=chunk,
            device=self.queue.device,
        )
        plan_decode(self.lens, workspace)
        return workspace

    def decode(self, out: Tensor, query: Tensor, workspace: DecodeWorkspace) -> None:
        """Launches decode attention."""
        head_dim = self.k_pages.shape[3]
        decode_attention(out, query, self.k_pages, self.v_pages, self.table, workspace, scale=head_dim**-0.5)

    def decode_us(self) -> float:
        """Microseconds of a launch."""
        query = self.queries(len(self.lens))
        out, workspace = torch.empty_like(query), self.workspace()
        return microseconds(self.queue, [lambda: self.decode(out, query, workspace)] * 4)

    def tiles(self, *, tile_rows: int = TILE_ROWS) -> Tensor:
        """The work list of `extend` if all positions are new."""
        lens = self.lens.cpu().numpy().astype(np.int64)
        group = self.heads // self.k_pages.shape[1]
        return torch.from_numpy(extend_work(lens, lens, tile_tokens(group, tile_rows))).to(self.queue.device)

    def extend(self, out: Tensor, query: Tensor, work: Tensor, *, tile_rows: int = TILE_ROWS) -> None:
        """Launches the attention of prompts. query: of all positions; work: from `tiles`."""
        extend_attention(
            out,
            query,
            self.k_pages,
            self.v_pages,
            self.table,
            self.lens,
            work,
            scale=query.shape[2] ** -0.5,
            num_programs=self.queue.num_programs(query.shape[2]),
            tile_rows=tile_rows,
        )

    def prompts_us(self, *, tile_rows: int = TILE_ROWS) -> float:
        """Microseconds of a launch of attention in which all positions are new."""
        query, work = self.queries(int(self.lens.sum())), self.tiles(tile_rows=tile_rows)
        out = torch.empty_like(query)
        return microseconds(self.queue, [lambda: self.extend(out, query, work, tile_rows=tile_rows)], repeat=10)

    @property
    def operations(self) -> int:
        """Multiplications and additions of causal attention in which all positions are new."""
        pairs = sum(int(n) * (int(n) + 1) // 2 for n in self.lens.tolist())
        return 4 * self.heads * int(self.k_pages.shape[3]) * pairs


def measure(setting: Setting) -> Iterator[Figure]:
    queue = setting.open_queue()
    head_dim, block_size = setting.choose((128, 64), (16, 16))
    copied = copy_gbs(queue, num_bytes=setting.choose(1 << 30, 1 << 16))
    yield Figure(name="copy", value=copied, unit="GB/s")

    def cached(lens: list[int], heads: tuple[int, int]) -> Cached:
        return Cached.of(queue, lens, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, block_size=block_size)

    for heads in setting.choose(HEADS, ((4, 2),)):
        layout = f"{heads[0]}/{heads[1]} heads"
        for rows in setting.choose((64, 128, 256), (2,)):
            for context in setting.choose((1024, 4096), (40,)):
                case = cached([context] * rows, heads)
                gbs = rows * context * 4 * heads[1] * head_dim / case.decode_us() / 1e3
                name = f"decode attention, {layout}, {rows} × {context}"
                yield Figure(name=name, value=gbs, unit="GB/s")
                yield Figure(name=f"{name}, of a copy", value=100 * gbs / copied, unit="%", least=_LEAST_SHARE)
        case = cached([setting.choose(1024, 40)], heads)
        yield Figure(name=f"decode attention, {layout}, 1 × {case.lens[0].item()}", value=case.decode_us(), unit="µs")
        for lens in setting.choose(([8192], [1024] * 8), ([20, 9],)):
            case = cached(lens, heads)
            name = f"prompts' attention, {layout}, {len(lens)} × {lens[0]}"
            yield Figure(name=name, value=case.operations / case.prompts_us() / 1e6, unit="TFLOP/s")
            yield Figure(name=f"{name}, torch's", value=case.operations / _torch_us(case) / 1e6, unit="TFLOP/s")


def _torch_us(case: Cached) -> float:
    """Microseconds of torch's causal attention over as many contiguous keys."""
    rows, length = len(case.lens), int(case.lens[0])
    _, kv_heads, _, head_dim = case.k_pages.shape

    def states(heads: int) -> Tensor:
        return torch.randn(rows, heads, length, head_dim, dtype=torch.bfloat16, device=case.queue.device)

    q, k, v = states(case.heads), states(kv_heads), states(kv_heads)

    def launch() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return microseconds(case.queue, [launch], repeat=10)

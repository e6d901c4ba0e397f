"""Checks that kernels in which the last program sums the partial results of the others give the same bits in very many
launches. A sum in the order of arrival, or a read before the write, would give other bits."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...engine.device.queue import Queue, Work
from ...kernels.triton.small_product import small_product, tiling, workspace_small_product
from .attention import Cached
from .figures import Figure
from .setting import Setting


def count_differences(queue: Queue, out: Tensor, work: Work, *, times: int, a_recording: int) -> int:
    """The number of launches of `work`, out of `times`, that left other bits in `out` than the first. The device
    compares, without waits of the host, so launches follow each other as closely as in a step."""
    work()
    first = out.clone().view(torch.uint8)
    differing = torch.zeros((), dtype=torch.int64, device=out.device)

    def run() -> None:
        for _ in range(a_recording):
            out.fill_(float("nan"))  # so that a missing write shows as a difference
            work()
            differing.add_((out.view(torch.uint8) != first).any())

    replay = queue.record(run)
    differing.zero_()  # a queue may run what it records
    for _ in range(times // a_recording):
        replay()
    return int(differing.item())


def measure(setting: Setting) -> Iterator[Figure]:
    queue = setting.open_queue()
    times, a_recording = setting.choose((100_000, 50), (4, 2))
    many = setting.choose([1, 255, 256, 257, 1000, 2500, 4096, 4096], [3, 33, 40])
    heads, kv_heads, head_dim, block_size = setting.choose((32, 8, 128, 64), (4, 2, 16, 16))
    case = Cached.of(queue, many, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    query = case.queries(len(many))
    out, workspace = torch.empty_like(query), case.workspace(chunk=block_size)
    assert int(workspace.items[: int(workspace.num_items), 3].max()) > 2 << 16, "rows of several pieces"

    def launched(num_programs: int | None = None) -> Tensor:
        case.decode(out, query, case.workspace(chunk=block_size, num_programs=num_programs))
        return out.clone()

    few = int((launched() != launched(3)).any())
    yield _none(f"decode attention, {max(many)} positions, by 3 programs: other bits", few)
    found = count_differences(
        queue, out, lambda: case.decode(out, query, workspace), times=times, a_recording=a_recording
    )
    yield _none(f"decode attention, {max(many)} positions, launches of {times} with other bits", found)

    for n, k in setting.choose(((1024, 2048), (1024, 3072), (4096, 14336)), ((16, 512),)):
        splits = tiling(n, k).splits
        if splits == 1:
            continue
        x = torch.randn(16, k, device=queue.device).bfloat16()
        weight = (torch.randn(n, k, device=queue.device) * k**-0.5).bfloat16()
        product = torch.empty(16, n, dtype=torch.bfloat16, device=queue.device)
        shared = workspace_small_product([(n, k)], queue.device)

        multiply = partial(small_product, x, weight, product, shared)
        found = count_differences(queue, product, multiply, times=times, a_recording=a_recording)
        yield _none(f"small product {n} × {k} in {splits} parts, launches of {times} with other bits", found)


def _none(name: str, count: int) -> Figure:
    return Figure(name=name, value=count, unit="", most=0, is_proof=True)

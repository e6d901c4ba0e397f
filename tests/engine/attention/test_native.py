"""Attention by the C kernels, compiled for several processors: against plain torch, and bit for bit against itself."""

import ctypes
import platform
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.engine.attention.base import Alibi
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.operations import page_stride
from pagewire.kernels.cpu.structs import Pages
from pagewire.kernels.reference import alibi_bias

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")

_SOURCES = ("attention.c", "attention_products.c", "dense.c", "threads.c")
_FLAGS = ("-O2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-w")
_LEVELS = {
    "native": ("-march=native",),
    "tiles": ("-march=native", "-DPAGEWIRE_AMX", "-DPAGEWIRE_EMULATE_TILES"),
    "avx512": ("-march=skylake-avx512",),
    "avx2": ("-march=haswell",),
    "portable": (),
}
_NEEDED = {"avx512": "avx512dq", "avx2": "avx2"}  # in /proc/cpuinfo
_P, _L = ctypes.c_void_p, ctypes.c_long

Attend = Callable[..., None]


@pytest.fixture(
    scope="module",
    params=[level if level == "native" else pytest.param(level, marks=pytest.mark.slow) for level in _LEVELS],
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    level = request.param
    if level in _NEEDED and (platform.machine() != "x86_64" or _NEEDED[level] not in _flags_of_this_cpu()):
        pytest.skip("another processor")
    source, target = Path(build.__file__).parent, tmp_path_factory.mktemp(level)
    command = [str(build.compiler()), *_FLAGS, *_LEVELS[level]]
    running = [
        subprocess.Popen([*command, "-c", str(source / name), "-o", str(target / f"{name}.o")]) for name in _SOURCES
    ]
    assert not any(process.wait() for process in running)
    objects = [str(target / f"{name}.o") for name in _SOURCES]
    linked = str(target / "kernels.so")
    subprocess.run([*command, "-shared", *objects, "-lm", "-lpthread", "-o", linked], check=True)
    loaded = ctypes.CDLL(linked)
    loaded.pagewire_attend.argtypes = (_P, _P, _L, _P, _L, _P, _P, _P, _L)
    loaded.pagewire_attend.restype = None
    loaded.pagewire_set_threads.argtypes, loaded.pagewire_set_threads.restype = (_L,), _L
    loaded.pagewire_set_threads(2)
    return loaded


def _flags_of_this_cpu() -> set[str]:
    return set(Path("/proc/cpuinfo").read_text().split())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cache with the keys and values of some sequences, and the queries of all their positions."""

    query: Tensor  # [sequences, positions, heads, dim]
    keys: Tensor  # [pages, block_size, kv_heads, dim], pages apart
    values: Tensor  # of a size of its own
    table: Tensor  # [sequences, blocks] int32
    rounds: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]
    alibi: Alibi | None = None
    scale: float = 0.3

    def attend(self, library: ctypes.CDLL, rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """The results of the positions [first, last) of a sequence, for each (sequence, first, last)."""
        heads, dim = self.query.shape[2:]
        slopes = None if self.alibi is None else self.alibi.slopes
        pages = Pages(
            keys=self.keys.data_ptr(), values=self.values.data_ptr(), heads=heads, kv_heads=self.keys.shape[2],
            dim=dim, block_size=self.keys.shape[1], window=self.window or 0, chunk=self.chunk or 0, scale=self.scale,
            softcap=self.softcap or 0.0, bf16=self.keys.dtype == torch.bfloat16, rounds=self.rounds,
            sinks=None if self.sinks is None else self.sinks.data_ptr(), page_stride=page_stride(self.keys),
            slopes=None if slopes is None else slopes.data_ptr(),
            slope_scale=self.scale if self.alibi is not None and self.alibi.before_scale else 1.0,
            rounds_slopes=self.alibi is not None and self.alibi.rounded,
            value_dim=self.values.shape[3],
        )  # fmt: skip
        query = torch.cat([self.query[row, first:last] for row, first, last in rows])
        query = torch.nn.functional.pad(query.flatten(1), (0, 48))  # queries lie apart, as in the decoder
        out = torch.full((len(query), heads, self.values.shape[3]), 7.0)
        table = self.table[[row for row, _, _ in rows]].contiguous()
        contexts = np.array([last for _, _, last in rows])
        counts = np.array([last - first for _, first, last in rows])
        library.pagewire_attend(
            ctypes.addressof(pages), query.data_ptr(), query.stride(0), table.data_ptr(), table.shape[1],
            contexts.ctypes.data, counts.ctypes.data, out.data_ptr(), len(rows),
        )  # fmt: skip
        return list(out.split(counts.tolist()))

    def expected(self, row: int, position: int) -> Tensor:
        """One position's result by the definition, in float64."""
        group = self.query.shape[2] // self.keys.shape[2]
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        seen = slice(first if self.chunk is None else position - position % self.chunk, position + 1)
        blocks = self.table[row, : position // self.keys.shape[1] + 1].long()
        keys, values = (pages[blocks].flatten(0, 1)[seen].double() for pages in (self.keys, self.values))
        query = self.query[row, position]
        query = (query.bfloat16() if self.rounds else query).double()
        scores = torch.einsum("hd,khd->hk", query, keys.repeat_interleave(group, 1)) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi is not None:
            at = torch.arange(seen.start, seen.stop)[None]
            bias = alibi_bias(self.alibi.slopes, at, torch.tensor([[position]]), self.alibi.rounded)[:, 0]
            scores = scores + bias * (self.scale if self.alibi.before_scale else 1.0)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None].double()), 1)
        weights = scores.softmax(1)[:, : len(keys)]
        return torch.einsum("hk,khd->hd", weights, values.repeat_interleave(group, 1)).float()


def _case(
    *, sequences=1, positions, heads=(4, 2), dim=32, value_dim=0, block_size=16, dtype=torch.float32, seed=0, **options
) -> Case:
    """The blocks of the sequences are mixed, and the rest of their last blocks is NaN. value_dim: 0: dim."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    width = -(-positions // block_size)
    blocks = torch.randperm(sequences * width, generator=generator).view(sequences, width)
    sizes = [block_size * kv_heads * size for size in (dim, value_dim or dim)]
    pages = torch.full((sequences * width, sizes[0] + sum(sizes)), float("nan"), dtype=dtype)  # of two layers
    parts = []
    for columns in pages[:, sizes[0] :].split(sizes, dim=1):
        part = columns.unflatten(1, (block_size, kv_heads, -1))
        part.copy_(torch.randn(part.shape, generator=generator))
        if positions % block_size:
            part[blocks[:, -1], positions % block_size :] = float("nan")
        parts.append(part)
    return Case(
        query=torch.randn(sequences, positions, num_heads, dim, generator=generator),
        keys=parts[0],
        values=parts[1],
        table=torch.nn.functional.pad(blocks, (0, 2), value=-1).int(),
        **options,
    )


def _alibi(kind: str, heads: int) -> Alibi:
    slopes = 0.5 ** torch.linspace(0.5, 8, heads)
    slopes = slopes.bfloat16().float() if kind == "rounded" else slopes
    return Alibi(slopes, before_scale=kind == "before the scale", rounded=kind == "rounded")


_TYPES = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
_types = pytest.mark.parametrize(("dtype", "rounds"), _TYPES, ids=["float32", "bfloat16", "rounded"])


@_types
@pytest.mark.parametrize(
    ("heads", "dim", "block_size"),
    [((4, 2), 16, 4), ((3, 3), 32, 16), ((7, 1), 48, 8), ((16, 2), 64, 16), ((40, 1), 80, 1), ((2, 1), 256, 32)],
)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"window": 1}, {"window": 70}, {"softcap": 2.0}, {"sinks": True}, {"window": 20, "sinks": True},
        {"chunk": 1}, {"chunk": 50}, {"chunk": 64, "sinks": True},
        {"alibi": "plain"}, {"alibi": "rounded"}, {"alibi": "before the scale", "softcap": 2.0, "chunk": 30},
    ],
    ids=str,
)  # fmt: skip
def test_agrees_with_the_definition(library, dtype, rounds, heads, dim, block_size, options):
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-2, 3, heads[0])}
    if kind := options.get("alibi"):
        options = options | {"alibi": _alibi(kind, heads[0])}
    case = _case(
        sequences=5, positions=150, heads=heads, dim=dim, block_size=block_size, dtype=dtype, rounds=rounds, **options
    )
    rows = [(0, 149, 150), (1, 0, 1), (2, 60, 70), (3, 0, 150), (4, 63, 64)]
    for (row, first, last), ours in zip(rows, case.attend(library, rows), strict=True):
        expected = torch.stack([case.expected(row, position) for position in range(first, last)])
        torch.testing.assert_close(ours, expected, **({"atol": 1e-2, "rtol": 1e-2} if rounds else {}))


@_types
@pytest.mark.parametrize(("dim", "value_dim"), [(48, 32), (16, 80), (192, 128)])
@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": True}, {"softcap": 2.0}], ids=str)
def test_values_of_another_size_than_keys(library, dtype, rounds, dim, value_dim, options):
    """In few and many queries, over several splits of the keys, and with other rows."""
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-2, 3, 8)}
    case = _case(
        sequences=2, positions=1100, heads=(8, 2), dim=dim, value_dim=value_dim, dtype=dtype, rounds=rounds, **options
    )
    rows = [(0, 1099, 1100), (1, 1000, 1060), (0, 0, 40)]
    found = case.attend(library, rows)
    for (row, first, last), ours in zip(rows, found, strict=True):
        expected = torch.stack([case.expected(row, position) for position in range(first, last)])
        torch.testing.assert_close(ours, expected, **({"atol": 1e-2, "rtol": 1e-2} if rounds else {}))
    (alone,) = case.attend(library, [(1, 1030, 1031)])
    assert torch.equal(alone[0], found[1][30])


@_types
@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"softcap": 5.0}, {"chunk": 1030}, {"alibi": "rounded"}], ids=str
)
def test_long_contexts_agree_with_the_definition(library, dtype, rounds, options):
    if "alibi" in options:
        options = {"alibi": _alibi(options["alibi"], 3)}
    case = _case(positions=2100, heads=(3, 1), dtype=dtype, rounds=rounds, **options)
    # Slope · position is some 1,000, beside which a score in float32 has fewer digits.
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if rounds else {"atol": 3e-4, "rtol": 1e-4} if "alibi" in options else {}
    for first, last in ((2099, 2100), (1000, 1050), (2040, 2050)):
        (ours,) = case.attend(library, [(0, first, last)])
        expected = torch.stack([case.expected(0, position) for position in range(first, last)])
        torch.testing.assert_close(ours, expected, **tolerance)


@_types
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 32), ((7, 1), 48), ((2, 2), 64)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 65}, {"window": 1023, "softcap": 3.0}, {"chunk": 100}, {"alibi": "plain"}],
    ids=str,
)
def test_the_bits_of_a_query_depend_on_nothing_else(library, dtype, rounds, heads, dim, options):
    """Alone, in a chunk of any size, beside other rows, and with any number of threads."""
    rng = random.Random(f"{heads} {options}")
    positions = 1200
    if "alibi" in options:
        options = {"alibi": _alibi(options["alibi"], heads[0])}
    case = _case(sequences=3, positions=positions, heads=heads, dim=dim, dtype=dtype, rounds=rounds, **options)
    whole = case.attend(library, [(row, 1000, positions) for row in range(3)])
    edges = [1000, 1007, 1008, 1009, 1022, 1023, 1024, 1025, 1039, 1040, 1087, 1088, 1089, 1199]
    for position in edges:
        (alone,) = case.attend(library, [(0, position, position + 1)])
        assert torch.equal(alone[0], whole[0][position - 1000]), position
    for position in (0, 1, 15, 16, 17, 62, 63, 64, 65, 127, 128):
        (alone,) = case.attend(library, [(1, position, position + 1)])
        (chunk,) = case.attend(library, [(1, 0, 130 + rng.randrange(40))])
        assert torch.equal(alone[0], chunk[position]), position
    for number in range(4):
        library.pagewire_set_threads(1 + number % 3)
        cuts = sorted({1000, positions, *(rng.randrange(1001, positions) for _ in range(rng.randrange(1, 12)))})
        rows = [(row, first, last) for row in range(3) for first, last in pairwise(cuts)]
        rng.shuffle(rows)
        for (row, first, last), part in zip(rows, case.attend(library, rows), strict=True):
            assert torch.equal(part, whole[row][first - 1000 : last - 1000]), (row, first, last)
    library.pagewire_set_threads(2)


@_types
@pytest.mark.parametrize("count", [1, 40])
def test_a_row_that_is_cut_along_its_keys_has_the_same_bits(library, dtype, rounds, count):
    """Few queries of many keys: parts of the keys are tasks, and their results are merged afterwards."""
    case = _case(positions=6200, heads=(4, 1), dim=128, dtype=dtype, rounds=rounds, window=6150)
    seen = []
    for threads in (1, 2, 3):
        library.pagewire_set_threads(threads)
        seen += case.attend(library, [(0, 6200 - count, 6200)])
    library.pagewire_set_threads(2)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    expected = torch.stack([case.expected(0, position) for position in range(6200 - count, 6200)])
    torch.testing.assert_close(seen[0], expected, **({"atol": 1e-2, "rtol": 1e-2} if rounds else {}))


@_types
@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_touches_only_queries_that_see_it(library, dtype, rounds, what, number):
    """Neither the earlier queries of its chunk, nor those whose window has passed it, nor other rows."""
    case = _case(sequences=2, positions=180, dtype=dtype, rounds=rounds, window=50)
    clean = case.attend(library, [(0, 0, 180), (1, 0, 180)])
    block, offset = case.table[0, 100 // 16], 100 % 16
    spoilt = {"keys": case.keys.clone(), "values": case.values.clone()}
    spoilt[what][block, offset] = number
    dirty = replace(case, **spoilt)
    ours = dirty.attend(library, [(0, 0, 180), (1, 0, 180)])
    assert torch.equal(ours[1], clean[1])
    assert torch.equal(ours[0][:100], clean[0][:100]) and torch.equal(ours[0][150:], clean[0][150:])
    for position in (100, 149):
        (alone,) = dirty.attend(library, [(0, position, position + 1)])
        assert torch.equal(alone[0].nan_to_num(), ours[0][position].nan_to_num())
    if number != number or what == "values":
        assert not ours[0][100:150].isfinite().any()


@_types
def test_a_query_that_is_nan_touches_no_other(library, dtype, rounds):
    case = _case(sequences=2, positions=40, heads=(8, 2), dtype=dtype, rounds=rounds)
    rows = [(0, 10, 40), (1, 39, 40)]
    clean = case.attend(library, rows)
    case.query[0, 20, 3] = float("nan")
    ours = case.attend(library, rows)
    assert ours[0][10, 3].isnan().all()
    ours[0][10, 3] = clean[0][10, 3]
    assert torch.equal(ours[0], clean[0]) and torch.equal(ours[1], clean[1])


def test_denominators_sum_the_rounded_weights(library):
    """Equal values come out as they are: weights that are rounded differently above and below would change them."""
    case = _case(positions=500, dtype=torch.bfloat16, rounds=True)
    case.values.nan_to_num_().fill_(1.25)
    (ours,) = case.attend(library, [(0, 0, 500)])
    torch.testing.assert_close(ours, torch.full_like(ours, 1.25), atol=0, rtol=1e-6)


def test_the_sign_of_zero_does_not_depend_on_what_a_query_does_not_see(library):
    """A sum that underflows is -0, to which a chunk that other queries see adds +0."""
    case = _case(positions=140, heads=(1, 1), dim=16, block_size=140, scale=1.0)
    case.query.fill_(0)[..., 0] = 1
    case.keys.fill_(0)[0, 64, 0, 0] = 86
    case.values.fill_(0)[0, :64], case.values[0, 128:] = -1e-10, 1
    (alone,), (together,) = case.attend(library, [(0, 127, 128)]), case.attend(library, [(0, 120, 140)])
    assert torch.equal(alone[0].view(torch.int32), together[7].view(torch.int32))

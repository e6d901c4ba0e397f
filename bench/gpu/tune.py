"""Measures on a GPU which launch options are fastest for its kernels; servers do not tune at run time.

    python -m pagewire.bench.gpu.tune                  # prints the best options and writes all measurements
    python -m pagewire.bench.gpu.tune --only small_product --write

`--write` puts options that are clearly faster than the kernels' rules into `kernels/triton/tuned.py`. Run the tests of
the kernels afterwards, and generate golden.json again (see CONTRIBUTING.md).
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from .machine import machine
from .setting import ROOT, Setting

if TYPE_CHECKING:
    from ...engine.device.queue import Queue

Options = dict[str, int]
_LEAST_GAIN = 1.03  # options must be that many times as fast as the rule to replace it
_ROWS = ((64, 1024), (256, 1024), (8, 4096))  # decode: (rows, positions)
_PROMPTS = ((1, 8192), (8, 1024))  # prefill: (rows, positions)
TABLE = ROOT / "kernels" / "triton" / "tuned.py"
_ENTRIES = re.compile(r"^TUNED: (?P<type>[^=]+) = \{.*?^\}$|^TUNED: (?P<empty>[^=]+) = \{\}$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One line of the table: a kernel and the sizes on which its options depend."""

    kernel: str
    bucket: tuple[int, ...]
    candidates: tuple[Options, ...]  # other than the rule
    measure: Callable[[], list[float]]  # microseconds of some uses with the table's present options


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result for a family."""

    kernel: str
    bucket: tuple[int, ...]
    best: Options  # empty: the rule
    gain: float  # times as fast as the rule
    tried: tuple[tuple[Options, float | None], ...]  # times as fast as the rule; None: it does not fit the device


def grid(**choices: Sequence[int]) -> tuple[Options, ...]:
    """All combinations of options."""
    return tuple(dict(zip(choices, values, strict=True)) for values in product(*choices.values()))


def families(queue: "Queue", *, smoke: bool) -> Iterator[Family]:
    """All families. `smoke`: two candidates each, with tiny uses."""
    from .attention import HEADS, Cached
    from .products import KERNELS, LAYERS, SHAPES, moe_us, product_us, small_product_us

    dim, page = (16, 16) if smoke else (128, 64)

    def cached(heads: tuple[int, int], lens: list[int]) -> Cached:
        return Cached.of(queue, lens, heads=heads[0], kv_heads=heads[1], head_dim=dim, block_size=page)

    decoding = [((4, 2), [40, 3])] if smoke else [(heads, [n] * rows) for heads in HEADS for rows, n in _ROWS]
    yield Family(
        kernel="decode_attention",
        bucket=(dim,),
        candidates=grid(chunk=(16, 32), num_stages=(3,))
        if smoke
        else grid(chunk=(64, 128, 256), num_stages=(3, 4, 5), num_warps=(4, 8), programs=(2, 3, 4)),
        measure=lambda: [cached(heads, lens).decode_us() for heads, lens in decoding],
    )
    for tile_rows in (16,) if smoke else (16, 128):
        prompts = [((4, 2), [20])] if smoke else [(heads, [n] * rows) for heads in HEADS for rows, n in _PROMPTS]

        def prompts_us(
            tile_rows: int = tile_rows, uses: list[tuple[tuple[int, int], list[int]]] = prompts
        ) -> list[float]:
            return [cached(heads, lens).prompts_us(tile_rows=tile_rows) for heads, lens in uses]

        candidates = grid(num_warps=(4, 8), num_stages=(3,) if smoke else (2, 3, 4))
        yield Family(kernel="extend_attention", bucket=(dim, tile_rows), candidates=candidates, measure=prompts_us)
    for n, k in ((32, 512),) if smoke else SHAPES:

        def small_us(n: int = n, k: int = k) -> list[float]:
            return [small_product_us(queue, n, k, rows=rows)[0] for rows in ((2,) if smoke else (1, 16))]

        candidates = grid(block_n=(16, 32, 64, 128), block_k=(128, 256), splits=(1, 2, 4))
        fitting = [c for c in candidates if n % c["block_n"] == 0 and k % (c["splits"] * 256) == 0]
        some = tuple(fitting[:2] if smoke else fitting)
        yield Family(kernel="small_product", bucket=(n, k), candidates=some, measure=small_us)
    for kernel in KERNELS:
        for n, k in ((32, 128),) if smoke else LAYERS:
            for bucket, measured in _buckets(kernel, n, k, smoke=smoke):

                def others_us(
                    kernel: str = kernel, n: int = n, k: int = k, measured: tuple[int, ...] = measured
                ) -> list[float]:
                    return [product_us(queue, kernel, n, k, rows=rows)[0] for rows in measured]

                candidates = grid(BLOCK_N=(16, 32) if smoke else (16, 32, 64, 128), num_warps=(4,) if smoke else (4, 8))
                yield Family(kernel=kernel, bucket=bucket, candidates=candidates, measure=others_us)
    for rows, tokens in ((16, 2),) if smoke else ((16, 64), (64, 1024), (128, 8192)):

        def experts_us(tokens: int = tokens) -> list[float]:
            shape = (4, 2, 64, 32) if smoke else (128, 8, 2048, 768)
            names = ("num_experts", "top_k", "hidden", "inter")
            return [moe_us(queue, tokens=tokens, **dict(zip(names, shape, strict=True)))[0]]

        columns = (64, 128) if smoke else (64, 128, 256)
        candidates = grid(columns=columns, num_warps=(4,) if smoke else (4, 8), num_stages=(3,) if smoke else (3, 4, 5))
        yield Family(kernel="moe", bucket=(rows,), candidates=candidates, measure=experts_us)


def _buckets(kernel: str, n: int, k: int, *, smoke: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The sizes on which the options of a product with a weight [n, k] depend, each with the rows to measure."""
    if kernel == "product":  # its tiles must be equal for all numbers of rows
        return [((n, k), (2,) if smoke else (1, 64, 2048))]
    return [((16, n, k), (2,))] if smoke else [((16, n, k), (1, 16)), ((64, n, k), (64,)), ((128, n, k), (256,))]


def tune(family: Family) -> Found:
    """Measures all candidates. Restores the table."""
    from triton.runtime.errors import OutOfResources

    from ...kernels.triton.tuned import TUNED

    key = (family.kernel, family.bucket)
    before = TUNED.pop(key, None)
    tried: list[tuple[Options, float | None]] = []
    try:
        rule = family.measure()
        for options in family.candidates:
            TUNED[key] = options
            try:
                taken = family.measure()
            except OutOfResources:  # too little shared memory
                tried.append((options, None))
                continue
            tried.append((options, sum(old / new for old, new in zip(rule, taken, strict=True)) / len(rule)))
    finally:
        TUNED.pop(key, None)
        if before is not None:
            TUNED[key] = before
    best, gain = max(((o, g) for o, g in tried if g is not None), key=lambda pair: pair[1], default=({}, 1.0))
    if gain < _LEAST_GAIN:
        best, gain = {}, 1.0
    return Found(kernel=family.kernel, bucket=family.bucket, best=best, gain=gain, tried=tuple(tried))


def rewritten(source: str, table: Mapping[tuple[str, tuple[int, ...]], Options]) -> str:
    """The source of `tuned.py` with another table."""
    lines = [f"    {_text(kernel, bucket)}: {json.dumps(options)}," for (kernel, bucket), options in table.items()]
    match = _ENTRIES.search(source)
    assert match is not None, "the table was not found"
    body = "{\n" + "\n".join(lines) + "\n}" if lines else "{}"
    return source[: match.start()] + f"TUNED: {match['type'] or match['empty']} = {body}" + source[match.end() :]


def _text(kernel: str, bucket: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, bucket)) + ("," if len(bucket) == 1 else "")
    return f'("{kernel}", ({numbers}))'


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--smoke", action="store_true", help="in Triton's interpreter, as a test of the program")
    flags.add_argument("--only", nargs="+", metavar="KERNEL", help="only these kernels")
    flags.add_argument("--out", type=Path, help="folder for the measurements (default: bench/results/gpu)")
    flags.add_argument("--write", action="store_true", help="write better options into kernels/triton/tuned.py")
    given = flags.parse_args(argv)
    if given.smoke and given.write:
        flags.error("an interpreter says nothing about a GPU: --smoke writes no table")
    facts = machine()
    if not given.smoke and not facts["device"]:
        raise SystemExit("There is no NVIDIA GPU here; --smoke runs the same program on a CPU.")
    if given.smoke:
        import numpy as np

        from ...tools.triton_interpreter import interpret

        interpret()
        np.seterr(all="ignore")
    found = []
    for family in families(Setting(smoke=given.smoke, scratch=Path()).open_queue(), smoke=given.smoke):
        if given.only and family.kernel not in given.only:
            continue
        found.append(tune(family))
        best = found[-1].best or "the rule"
        print(f"{family.kernel} {family.bucket}: {best}, {found[-1].gain:.2f} times as fast", flush=True)
    folder = given.out or ROOT / ("build" if given.smoke else "bench/results/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("tune-smoke.json" if given.smoke else f"{facts['date']}-tune.json")
    title = "SMOKE of the tuner, no measurement" if given.smoke else "tuning"
    content = {"title": title, "machine": facts, "found": [asdict(each) for each in found]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
    if given.write:
        from ...kernels.triton.tuned import TUNED

        table = {key: options for key, options in TUNED.items() if key not in {(f.kernel, f.bucket) for f in found}}
        table |= {(each.kernel, each.bucket): each.best for each in found if each.best}
        TABLE.write_text(rewritten(TABLE.read_text(), dict(sorted(table.items()))))
        print(f"{TABLE}: {len(table)} entries; now run the tests of the kernels, and generate golden.json again")


if __name__ == "__main__":
    main()

"""pagewire and a vLLM that is installed beside it, on one GPU: the same models, the same requests, one after the other.

    python -m pagewire.bench.gpu.beside_vllm --vllm VENV/bin/python
    python -m pagewire.bench.gpu.beside_vllm --vllm VENV/bin/python --models llama-3.1-8b --workloads G1 G3
    python -m pagewire.bench.gpu.beside_vllm --smoke              the same program on a CPU, with tiny sizes

Both get random weights (`--load-format dummy`), bfloat16, the same share of the device's memory and nothing else: their
own defaults. Workloads, figures and the client are those of `bench.peers`.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ...tools.make_checkpoint import make_checkpoint
from ..peers.__main__ import measure
from ..peers.base import Peer, PeerError
from ..peers.with_pagewire import Pagewire
from ..peers.with_vllm import Vllm
from ..peers.work import Workload, plain
from ..report import Row, print_table, write_json
from .machine import machine
from .setting import ROOT

MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
_SMOKE_MODEL = "llama-15m"
_FLAGS = ("--load-format", "dummy", "--dtype", "bfloat16")
_OF_DEVICE = ("--gpu-memory-utilization", "0.85")


def workloads(like: str, *, smoke: bool) -> tuple[Workload, ...]:
    """One stream, a batch of equal ones, and nano-vllm's benchmark."""
    few, most, part = (2, 4, 16) if smoke else (32, 256, 1)
    long, middle, short = 1024 // part, 512 // part, 128 // part

    def of(name: str, title: str, streams: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> Workload:
        return Workload(name, like, title, plain(streams, inputs, outputs), seed=ord(name[-1]))

    return (
        of("G1", f"1 stream, {long} in, {short} out", 1, (long, long), (short, short)),
        of("G2", f"{few} streams, {middle} in, {short} out", few, (middle, middle), (short, short)),
        of("G3", f"{most} streams, {100 // part}–{long} in and out", most, (100 // part, long), (100 // part, long)),
    )


def compare(peers: Sequence[Peer], work: Sequence[Workload], folder: Path) -> tuple[list[Row], list[str]]:
    """The figures, and a line for each peer that has none."""
    rows = {(w.name, peer.name): Row(f"{w.like} {w.name} {peer.name}") for w in work for peer in peers}
    lines = []
    for peer in peers:
        if how := peer.missing():
            lines.append(f"{peer.name}: skipped, it is not installed: {how}")
            continue
        print(f"{peer.name} on {folder.name}", flush=True)
        try:
            measure(peer, folder, work, rows)
        except PeerError as error:
            lines.append(f"{peer.name}: failed on {folder.name}: {error}")
    return [row for row in rows.values() if row.figures], lines


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--vllm", default=sys.executable, metavar="PYTHON", help="the interpreter that has vLLM")
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:2]))
    flags.add_argument("--workloads", nargs="+", choices=("G1", "G2", "G3"), default=["G1", "G2", "G3"])
    flags.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    flags.add_argument("--files", type=Path, default=ROOT / "build" / "beside_vllm", help="for configs and logs")
    flags.add_argument("--json", type=Path, help="default: bench/results/gpu/beside_vllm.json, smoke: build")
    given = flags.parse_args(argv)
    facts = machine()
    if not given.smoke and not facts["device"]:
        print("There is no NVIDIA GPU here; --smoke runs the same program on a CPU.", file=sys.stderr)
        return 2
    device, own = ("cpu", ()) if given.smoke else ("cuda", _OF_DEVICE)
    peers: list[Peer] = [
        Pagewire([*_FLAGS, *own], device=device),
        Vllm(given.vllm, [*_FLAGS, *own], device=device),
    ]
    rows: list[Row] = []
    lines: list[str] = []
    for like in [_SMOKE_MODEL] if given.smoke else given.models:
        folder = given.files.resolve() / like
        if not (folder / "config.json").exists():
            make_checkpoint(folder, like, weights=False)
        work = [each for each in workloads(like, smoke=given.smoke) if each.name in given.workloads]
        found, missing = compare(peers, work, folder)
        rows += found
        lines += missing
    title = "SMOKE, not a measurement" if given.smoke else "beside vLLM, on a GPU"
    path = given.json or ROOT / ("build" if given.smoke else "bench/results/gpu") / "beside_vllm.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, title, rows, facts, {"smoke": given.smoke, "notes": lines})
    print(title)
    print_table(rows)
    for line in lines:
        print(line)
    print(path)
    return 1 if any("failed" in line for line in lines) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers are stopped as well
    sys.exit(main())

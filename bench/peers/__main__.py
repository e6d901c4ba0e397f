"""pagewire compared with other engines, on the same checkpoint files and the same requests.

    python -m pagewire.bench.peers --peers pagewire vllm --workloads W1 W2
    python -m pagewire.bench.peers --quick

A repetition starts each peer in turn on each checkpoint, warms it up, runs the checkpoint's workloads and stops it, so
no other peer is in memory while one is measured. Servers are measured over HTTP, which costs time; the others run in a
child process behind a pipe, which returns only times. `floor` is not an engine: it reads the weights once per step.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ...tools.make_checkpoint import SHAPES
from ..report import Row, machine, print_table, write_json
from .base import CONVERT_TIMEOUT_S, Load, Peer, PeerError
from .figures import figures
from .gguf_file import GgufFile
from .with_floor import Floor
from .with_llama_cpp_python import LlamaCppPython
from .with_llama_server import LlamaServer
from .with_openvino import OpenVino
from .with_pagewire import Pagewire
from .with_transformers import Transformers
from .with_vllm import Vllm
from .work import Workload, warm_up, workloads

_WITH_FLAGS = ("pagewire", "pagewire-int8", "pagewire-int4", "pagewire-q4_k_m", "vllm")
PEERS = (
    *_WITH_FLAGS,
    "openvino",
    "openvino-int8",
    "openvino-int4",
    "llama-server",
    "llama-server-q4_k_m",
    "llama-cpp-python",
    "transformers",
    "floor",
)
_PLACES = ("vllm", "openvino", "optimum", "llama-server", "llama-cpp-python", "transformers", "floor")
_KV_BYTES = 2 << 30  # for every peer that has such an option


def make_peer(name: str, at: Mapping[str, str], flags: Mapping[str, Sequence[str]]) -> Peer:
    """`at`: one of `_PLACES` → an interpreter or program. `flags`: peer → flags to append to its command line."""
    engine, _, precision = name.rpartition("-") if name.endswith(("-int8", "-int4", "-q4_k_m")) else (name, "", "")
    place = at.get(engine, sys.executable)
    given = flags.get(name, ())
    llama_server = at.get("llama-server", "llama-server")
    file = GgufFile(quantized_by=llama_server) if precision == "q4_k_m" else None
    match engine:
        case "pagewire":
            asked = ("--quantization", precision) if precision and file is None else ()
            return Pagewire([*asked, *given], name=name, file=file)
        case "vllm":
            return Vllm(place, given)
        case "openvino":
            return OpenVino(place, precision or "fp16", exporter=at.get("optimum", place))
        case "llama-server":
            return LlamaServer(llama_server, file or GgufFile(), name=name)
        case "llama-cpp-python":
            return LlamaCppPython(place)
        case "transformers":
            return Transformers(place)
        case "floor":
            return Floor(place)
    raise AssertionError(name)


def checkpoint(root: Path, like: str) -> Path:
    """A checkpoint with weights, made by the first call. Raises PeerError."""
    folder = root / like
    if not folder.exists():
        print(f"making {folder} …", flush=True)
        unfinished = root / f"{like}.unfinished"
        command = [sys.executable, "-m", "pagewire.tools.make_checkpoint", str(unfinished), "--like", like, "--weights"]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=CONVERT_TIMEOUT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{folder} could not be made: {error}") from None
        unfinished.rename(folder)
    return folder


def vocab_size(like: str) -> int:
    size = SHAPES[like]["vocab_size"]
    assert isinstance(size, int)
    return size


def measure(peer: Peer, folder: Path, work: Sequence[Workload], rows: dict[tuple[str, str], Row]) -> None:
    """Starts one peer and adds the figures of each workload to its row of `rows`. Raises PeerError. The peer's
    processes have ended when it returns or raises."""
    made = {workload.name: workload.make(vocab_size(workload.like)) for workload in work}
    warm = {workload.name: warm_up(len(made[workload.name]), vocab_size(workload.like)) for workload in work}
    lengths = [len(r.prompt) + r.num_tokens for requests in (*made.values(), *warm.values()) for r in requests]
    load = Load(
        folder=folder,
        converted=peer.convert(folder),
        num_streams=max(len(requests) for requests in made.values()),
        max_len=max(lengths) + 16,  # so that no peer stops before the last token
        kv_bytes=_KV_BYTES,
        log=folder / "logs" / f"{peer.name}.log",
    )
    started = time.perf_counter()
    running = peer.start(load)
    try:
        running.wait_ready()
        ready_s = time.perf_counter() - started
        for workload in work:
            requests = made[workload.name]
            running.run(warm[workload.name])
            before = running.meter.cpu_seconds()
            streams = running.run(requests)
            cpu_s = running.meter.cpu_seconds() - before
            found = figures(streams, cpu_s=cpu_s, peak_bytes=running.meter.peak_bytes(), ready_s=ready_s)
            rows[workload.name, peer.name].add(**found)
    finally:
        running.stop()


Keep = Callable[[int, list[Row], list[str]], None]


def compare(
    peers: Sequence[Peer],
    work: Sequence[Workload],
    times: int,
    root: Path,
    keep: Keep,
    skip: Collection[tuple[str, str]] = (),
) -> None:
    """Calls `keep` after each repetition with its number, the rows with figures, and one line for each peer without all
    figures. A peer that fails is skipped from then on for that checkpoint. `skip`: (peer, workload) to leave out."""
    missing = {peer.name: peer.missing() for peer in peers}
    lines = [f"{name}: skipped, it is not installed: {how}" for name, how in missing.items() if how]
    ready = [peer for peer in peers if not missing[peer.name]]
    rows = {(w.name, peer.name): Row(f"{w.name} {peer.name}") for w in work for peer in ready}
    failed: set[tuple[str, str]] = set()
    checkpoints = {like: checkpoint(root, like) for like in dict.fromkeys(w.like for w in work if ready)}
    for i in range(times):
        for like, folder in checkpoints.items():
            for peer in ready:
                wanted = [w for w in work if w.like == like and (peer.name, w.name) not in skip]
                if not wanted or (like, peer.name) in failed:
                    continue
                print(f"repetition {i + 1} of {times}: {peer.name} on {like}", flush=True)
                try:
                    measure(peer, folder, wanted, rows)
                except PeerError as error:
                    failed.add((like, peer.name))
                    lines.append(f"{peer.name}: failed on {like}: {error}")
        keep(i + 1, [row for row in rows.values() if row.figures], lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in workloads(quick=False)]
    flags.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    flags.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="W", help=", ".join(names))
    flags.add_argument("--repeat", type=int, default=5, help="repetitions (default: %(default)s)")
    flags.add_argument("--quick", action="store_true", help="the small checkpoint, few streams, once")
    flags.add_argument("--json", type=Path, default=Path("bench/results/peers.json"), help="(default: %(default)s)")
    flags.add_argument("--files", type=Path, default=Path("build/peers"), help="for checkpoints (default: %(default)s)")
    flags.add_argument(
        "--at",
        nargs="+",
        default=[],
        metavar="PEER=PATH",
        help="the interpreter of vllm, openvino (all precisions) or another peer; of optimum, which exports for "
        "openvino, if that is another one; or llama-server's program, beside which llama-quantize lies",
    )
    flags.add_argument(
        "--flags", nargs="+", default=[], metavar="PEER='FLAGS'", help="flags to append to a server's command line"
    )
    flags.add_argument("--skip", nargs="+", default=[], metavar="PEER:W", help="workloads that a peer does not run")
    given = flags.parse_args(argv)
    given.skip = [tuple(entry.split(":")) for entry in given.skip]
    if any(len(entry) != 2 for entry in given.skip):
        flags.error("--skip: PEER:W, such as openvino:W3")
    given.at = dict(entry.partition("=")[::2] for entry in given.at)
    unknown = [name for name, path in given.at.items() if name not in _PLACES or not path]
    if unknown:
        flags.error(f"--at: PEER=PATH with one of {', '.join(_PLACES)}, not {', '.join(unknown)}")
    given.flags = {name: text.split() for name, _, text in (entry.partition("=") for entry in given.flags)}
    unknown = [name for name in given.flags if name not in _WITH_FLAGS]
    if unknown:
        flags.error(f"--flags: PEER='FLAGS' with {', '.join(_WITH_FLAGS)}, not {', '.join(unknown)}")
    if given.repeat < 1:
        flags.error(f"--repeat: at least 1, not {given.repeat}")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = _arguments(argv)
    facts = machine()
    times = 1 if given.quick else given.repeat
    work = [workload for workload in workloads(quick=given.quick) if workload.name in given.workloads]
    peers = [make_peer(name, given.at, given.flags) for name in dict.fromkeys(given.peers)]

    def keep(num: int, rows: list[Row], lines: list[str]) -> None:
        """Writes the results so far: a run takes hours and may be ended early."""
        settings: dict[str, object] = {
            "repeat": num,
            "quick": given.quick,
            "workloads": {workload.name: f"{workload.title}, {workload.like}" for workload in work},
            "flags": given.flags,
            "notes": lines,
        }
        write_json(given.json, "beside other engines", rows, facts, settings)
        if num == times:
            for workload in work:
                print(f"{workload.name}: {workload.title} ({workload.like}, a bfloat16 checkpoint)")
            print(f"median (smallest–largest) of {times}")
            print_table(rows)
            for line in lines:
                print(line)

    try:
        compare(peers, work, times, given.files.resolve(), keep, given.skip)
    except PeerError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers are stopped as well
    main()

"""Verifies correctness on a GPU and compares its speed with the targets, in at most nine minutes.

    bench/gpu/verify.sh                        # on a machine with a GPU; writes into bench/results/gpu
    bench/gpu/verify.sh --smoke                # the same program with tiny sizes on a CPU, as a test of it
    bench/gpu/verify.sh --only attention tests
    bench/gpu/verify.sh --resume               # only what the report of today lacks, for example parts without time

Parts for which the time is too short are reported as skipped; the others run even if a part fails. The report is
written after each part. Beside a figure stands its estimate (`estimate.py`), if there is one for this GPU. The exit
code is 1 if a part failed or a check of correctness did, else 0, whatever the speed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .figures import Figure, Outcome
from .machine import machine
from .parts import PARTS, Part
from .report import as_markdown, estimates_of, finished, write
from .setting import ROOT

_BUDGET_S = 540.0
_PATIENCE = 2  # a part is ended after that many times its estimated time
_GRACE_S = 20.0  # from SIGTERM to SIGKILL
_TAIL = 400  # characters of a failed part's output that the report quotes


def run_part(part: Part, *, smoke: bool, scratch: Path, limit_s: float) -> Outcome:
    """Runs a part in a new process. After `limit_s` ends it and all processes that it started."""
    if smoke and (same := PARTS[[(p.module, p.function) for p in PARTS].index((part.module, part.function))]) != part:
        why = f"the program of {same.name} with another model."
        return Outcome(part=part.name, title=part.title, seconds=0.0, skipped=why)
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(part=part.name, title=part.title, seconds=0.0, skipped=f"not installed: {', '.join(missing)}.")
    if not smoke and part.seconds > limit_s:
        why = f"{limit_s:.0f} s were left, and it may take {part.seconds:.0f}."
        return Outcome(part=part.name, title=part.title, seconds=0.0, skipped=why)
    found, log = scratch / f"{part.name}.jsonl", scratch / f"{part.name}.log"
    command = [sys.executable, "-m", "pagewire.bench.gpu.parts", part.name]
    command += ["--lines", str(found), "--scratch", str(scratch), *(["--smoke"] if smoke else [])]
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            failed = "" if code == 0 else f"it ended with {code}: {_tail(log)}"
        except subprocess.TimeoutExpired:
            failed = f"it was ended after {limit_s:.0f} s: {_tail(log)}"
        finally:
            _end(process)
    figures, skipped = read_lines(found)
    seconds = time.monotonic() - started
    return Outcome(part=part.name, title=part.title, seconds=seconds, figures=figures, skipped=skipped, failed=failed)


def read_lines(path: Path) -> tuple[tuple[Figure, ...], str]:
    """The lines of a part that may have been killed: (figures, why it was skipped)."""
    figures, skipped = [], ""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            written = json.loads(line)
        except ValueError:  # an incomplete last line
            continue
        if "figure" in written:
            figures.append(Figure(**written["figure"]))
        skipped = written.get("skipped", skipped)
    return tuple(figures), skipped


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the part, which ends its server, then all processes of its session, such as tests, even if they hang."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-_TAIL:]


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    flags.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="only these")
    flags.add_argument("--resume", action="store_true", help="keep what an earlier run of this commit has measured")
    flags.add_argument("--out", type=Path, help="folder for the report (default: bench/results/gpu, smoke: build)")
    flags.add_argument("--budget-s", type=float, default=_BUDGET_S, help="seconds for all (default: %(default)g)")
    given = flags.parse_args(argv)
    facts = machine()
    if not given.smoke and not facts["device"]:
        print("There is no NVIDIA GPU here; --smoke runs the same program on a CPU.", file=sys.stderr)
        return 2
    begun = time.monotonic()
    device = facts["device"]
    label = re.sub(r"[^a-z0-9]+", "-", device.get("name", "gpu").lower()) if isinstance(device, dict) else "gpu"
    name = "smoke" if given.smoke else f"{facts['date']}-{label}"
    folder = given.out or ROOT / ("build" if given.smoke else "bench/results/gpu")
    kept = finished(folder / f"{name}.json", facts) if given.resume else {}
    estimates = {} if given.smoke or not isinstance(device, dict) else estimates_of(device.get("name", ""))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="pagewire-gpu-") as scratch:
        for part in PARTS:
            if given.only and part.name not in given.only:
                continue
            if part.name in kept:
                outcomes.append(kept[part.name])
                continue
            left = given.budget_s - (time.monotonic() - begun)
            limit_s = left if given.smoke else min(left, _PATIENCE * part.seconds)
            outcome = run_part(part, smoke=given.smoke, scratch=Path(scratch), limit_s=max(limit_s, 1.0))
            outcomes.append(outcome)
            why = outcome.failed or outcome.skipped
            print(f"{part.title}: {outcome.verdict(smoke=given.smoke)}, {outcome.seconds:.0f} s {why}", flush=True)
            write(folder, name, outcomes, facts, smoke=given.smoke, estimates=estimates)
    write(folder, name, outcomes, facts, smoke=given.smoke, estimates=estimates)
    print(as_markdown(outcomes, facts, smoke=given.smoke, estimates=estimates))
    print(f"{folder / name}.md, {name}.json")
    return 0 if all(outcome.is_right() for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

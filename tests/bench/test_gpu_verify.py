"""The GPU verification and the tuner: smoke runs, verdicts, the report, and the tuner's table."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import until

from pagewire.bench.gpu import verify
from pagewire.bench.gpu.figures import Figure, Outcome
from pagewire.bench.gpu.parts import PARTS, Part
from pagewire.bench.gpu.report import as_json, as_markdown, estimates_of, finished, write
from pagewire.bench.gpu.timeline import Interval, busy_us, by_node, node_gaps_us, read_trace, step_gaps_us
from pagewire.bench.gpu.tune import TABLE, rewritten

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
NO_GPU = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | NO_GPU
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=900)


# Smoke runs of the whole programs


@needs_triton
@pytest.mark.long
@pytest.mark.slow
def test_a_smoke_run_writes_its_results(tmp_path: Path) -> None:
    parts = ["sanitizer", "determinism", "nodes-0.6b", "attention", "steps-0.6b", "products", "steps-8b"]
    script = str(ROOT / "bench" / "gpu" / "verify.sh")
    done = run(script, "--smoke", "--only", *parts, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads((tmp_path / "smoke.json").read_text())
    assert found["smoke"] and found["title"].startswith("SMOKE")
    by_name = {part["part"]: part for part in found["parts"]}
    assert set(by_name) == set(parts)
    verdicts = {name: part["verdict"] for name, part in by_name.items()}
    assert verdicts == {
        "sanitizer": "met",
        "determinism": "met",
        "nodes-0.6b": "measured",
        "attention": "measured",
        "steps-0.6b": "measured",
        "products": "measured",
        "steps-8b": "skipped",
    }, done.stdout
    assert by_name["steps-8b"]["skipped"] == "the program of steps-0.6b with another model."
    assert [figure["value"] for figure in by_name["determinism"]["figures"]] == [0, 0, 0]
    targets = [figure for figure in by_name["steps-0.6b"]["figures"] if figure["most"] is not None]
    assert [(each["name"], each["most"], each["verdict"]) for each in targets] == [
        ("step, 1 × 16", 0.9, "measured"),
        ("step, 2 × 16", 8.0, "measured"),
    ]
    text = (tmp_path / "smoke.md").read_text()
    assert text.startswith("# SMOKE, not a measurement") and "| determinism | " in text and text in done.stdout


@pytest.mark.slow
def test_without_a_gpu_the_error_says_so() -> None:
    done = run(str(ROOT / "bench" / "gpu" / "verify.sh"))
    assert (done.returncode == 2 and "--smoke" in done.stderr) or "no triton" in done.stderr, done.stdout + done.stderr


@needs_triton
@pytest.mark.long
@pytest.mark.slow
def test_a_smoke_run_of_the_tuner_tries_options_and_writes_no_table(tmp_path: Path) -> None:
    before = TABLE.read_text()
    script = str(ROOT / ".typing")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {script!r}); from pagewire.bench.gpu import tune;",
    ]
    command[-1] += f"tune.main(['--smoke', '--out', {str(tmp_path)!r}])"
    done = run(*command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tune-smoke.json").read_text())["found"]
    kernels = {each["kernel"]: each for each in found}
    attention = {"decode_attention", "extend_attention"}
    assert set(kernels) == attention | {"small_product", "fp8_product", "int4_product", "product", "moe"}
    for each in found:
        assert len(each["tried"]) == 2 and all(gain > 0 for _, gain in each["tried"])
    assert kernels["decode_attention"]["bucket"] == [16]
    assert TABLE.read_text() == before


# The outcome of one part


LIMIT_S = 100.0


def outcome_of(tmp_path: Path, code: str, *, limit_s: float = LIMIT_S, **changes: object) -> Outcome:
    """The outcome of a part whose program is `code`."""
    part = Part(**{"name": "some", "title": "Some", "module": "nowhere", "seconds": 1.0, **changes})  # type: ignore[arg-type]
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys, json\nfound = open(sys.argv[5], 'w')\n{code}\n")
    python.chmod(0o755)
    executable, sys.executable = sys.executable, str(python)
    try:
        return verify.run_part(part, smoke=False, scratch=tmp_path, limit_s=limit_s)
    finally:
        sys.executable = executable


FIGURE = "print(json.dumps({'figure': {'name': 'n', 'value': 3, 'unit': 'ms', 'most': 2}}), file=found, flush=True)"


def test_a_part_that_fails_keeps_its_figures(tmp_path: Path) -> None:
    outcome = outcome_of(
        tmp_path, f"{FIGURE}\nfound.write('{{')\nfound.flush()\nraise SystemExit('the device is gone')"
    )
    assert outcome.figures == (Figure(name="n", value=3, unit="ms", most=2),)
    assert outcome.failed == "it ended with 1: the device is gone" and not outcome.is_right()
    assert outcome.verdict(smoke=False) == "failed"


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over as soon as its figure is there, however long its start takes."""
    lines, wait = tmp_path / "some.jsonl", subprocess.Popen.wait

    def wait_for_the_figure(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == LIMIT_S:
            until(lambda: lines.exists() and lines.read_text().endswith("}\n"), "the part's figure", LIMIT_S)
            timeout = 0.0
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_the_figure)
    outcome = outcome_of(tmp_path, f"{FIGURE}\nimport time; time.sleep(60)")
    assert len(outcome.figures) == 1 and outcome.failed.startswith("it was ended after 100 s")


def test_a_part_with_too_little_time_left_is_skipped(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, FIGURE, limit_s=1.5, seconds=60.0)
    assert outcome.skipped == "2 s were left, and it may take 60." and not outcome.figures and outcome.is_right()


def test_a_part_whose_packages_are_missing_names_them(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, FIGURE, needs=("json", "no_such_module", "nor_this"))
    assert outcome.skipped == "not installed: no_such_module, nor_this." and not outcome.figures


def test_a_part_can_report_why_it_is_skipped(tmp_path: Path) -> None:
    line = "print(json.dumps({'skipped': 'there is no room'}), file=found, flush=True)"
    assert outcome_of(tmp_path, line).verdict(smoke=False) == "skipped"
    outcome = outcome_of(tmp_path, f"{FIGURE}\n{line}")
    assert outcome.skipped == "there is no room" and outcome.verdict(smoke=False) == "missed"


# Ranks


def ranks_of(*programs: str) -> list[subprocess.Popen[bytes]]:
    """A process for each; `hang` does not end."""
    hang = "import time; time.sleep(600)"
    return [subprocess.Popen([sys.executable, "-c", hang if each == "hang" else each]) for each in programs]


@pytest.mark.parametrize(
    ("programs", "codes"),
    [
        (("hang", "raise SystemExit(3)"), r"\[None, 3\];"),
        (("hang", "import os; os.kill(os.getpid(), 9)", "hang"), r"\[None, -9, None\];"),
    ],
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(programs: tuple[str, ...], codes: str) -> None:
    from pagewire.bench.gpu.ranks import wait_for

    ranks = ranks_of(*programs)
    with pytest.raises(RuntimeError, match=f"the ranks ended with {codes} None: it still ran"):
        wait_for(ranks, 60.0)
    assert all(rank.returncode is not None for rank in ranks), "none is left behind"


def test_ranks_that_hang_are_ended_with_a_reason() -> None:
    from pagewire.bench.gpu.ranks import wait_for

    ranks = ranks_of("hang", "hang")
    with pytest.raises(RuntimeError, match=r"\[None, None\] after 0 s"):
        wait_for(ranks, 0.2)
    assert all(rank.returncode is not None for rank in ranks)
    wait_for(ranks_of("", ""), 300.0)


def test_ranks_that_hang_leave_time_to_say_so() -> None:
    from pagewire.bench.gpu import ranks

    limits = [verify._PATIENCE * part.seconds for part in PARTS if part.module in ("stages", "domains")]
    assert len(limits) == 2 and 0.7 * min(limits) > ranks._LIMIT_S


# Verdicts


@pytest.mark.parametrize(
    ("value", "target", "verdict"),
    [
        (85, {"least": 85}, "met"),
        (84.99, {"least": 85}, "missed"),
        (0.9, {"most": 0.9}, "met"),
        (0.91, {"most": 0.9}, "missed"),
        (float("nan"), {"least": 85}, "missed"),
        (float("nan"), {"most": 85}, "missed"),
        (1, {}, "measured"),
        (1, {"most": 0, "is_proof": True}, "missed"),
    ],
)
def test_verdict_of_a_figure(value: float, target: dict[str, float], verdict: str) -> None:
    figure = Figure(name="n", value=value, unit="ms", **target)  # type: ignore[arg-type]
    assert figure.verdict(smoke=False) == verdict
    assert figure.verdict(smoke=True) == (verdict if figure.is_proof else "measured")


def test_a_slow_part_is_right_but_a_failed_proof_is_not() -> None:
    slow = Figure(name="slow", value=2, unit="ms", most=1)
    wrong = Figure(name="wrong", value=1, unit="", most=0, is_proof=True)
    fine = Outcome(part="p", title="P", seconds=1, figures=(slow,))
    assert fine.verdict(smoke=False) == "missed" and fine.is_right()
    assert not Outcome(part="p", title="P", seconds=1, figures=(slow, wrong)).is_right()


def test_the_report_lists_every_figure_and_every_reason() -> None:
    figures = (
        Figure(name="step", value=1.23456, unit="ms", most=0.9),
        Figure(name="copy", value=10.0, unit="GB/s"),
        Figure(name="share", value=90, unit="%", least=85),
    )
    outcomes = [
        Outcome(part="steps", title="Steps", seconds=2, figures=figures),
        Outcome(part="tests", title="Tests", seconds=0, skipped="no pytest"),
        Outcome(part="http", title="HTTP", seconds=3, failed="it | ended\nwith 1"),
    ]
    machine = {"device": {"name": "Some GPU", "driver_version": "1.2"}, "torch": "2.11", "date": "2026-01-01"}
    text = as_markdown(outcomes, machine, smoke=False, estimates={"steps: step": 1.1})
    assert text.startswith("# Some GPU, 2026-01-01\n")
    assert "driver_version 1.2, torch 2.11" in text
    assert "| steps | step | 1.235 ms | ≤ 0.9 | 1.1 ms | missed |" in text
    assert "| steps | copy | 10 GB/s |  |  |  |" in text
    assert "| steps | share | 90 % | ≥ 85 |  | met |" in text
    assert "| tests | no pytest | | | | skipped |" in text
    assert "| http | it / ended with 1 | | | | failed |" in text
    assert "Targets: 1 met, 1 missed. Parts: 3, of which 1 failed and 1 were skipped. 5 s." in text
    content = json.loads(as_json(outcomes, machine, smoke=False))
    assert [part["verdict"] for part in content["parts"]] == ["missed", "skipped", "failed"]
    assert content["parts"][0]["figures"][0]["value"] == 1.23456
    assert "SMOKE" not in text and "SMOKE" in as_markdown(outcomes, machine, smoke=True)


def test_what_was_measured_is_kept_by_a_later_run(tmp_path: Path) -> None:
    """If commit and packages are the same, and the part neither failed nor was skipped."""
    figure = Figure(name="step", value=1.5, unit="ms", most=2)
    done = Outcome(part="steps", title="Steps", seconds=3, figures=(figure,))
    others = [
        Outcome(part="tests", title="Tests", seconds=0, skipped="2 s were left."),
        Outcome(part="http", title="HTTP", seconds=1, failed="it ended with 1"),
    ]
    machine = {"device": {"name": "Some GPU"}, "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-01-01"}
    write(tmp_path, "some", [done, *others], machine, smoke=False)
    assert finished(tmp_path / "some.json", machine) == {"steps": done}
    assert finished(tmp_path / "some.json", {**machine, "commit": "abd"}) == {}
    assert finished(tmp_path / "none.json", machine) == {}


def test_estimates_are_those_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "estimates.json"
    path.write_text(json.dumps({"devices": {"H100": {"steps: step": 2.0}, "H200": {"steps: step": 1.0}}}))
    assert estimates_of("NVIDIA H200", path) == {"steps: step": 1.0}
    assert estimates_of("NVIDIA A100-SXM4-80GB", path) == {} == estimates_of("NVIDIA H200", tmp_path / "none")


SANITIZER = """#!/bin/sh
echo "========= ERROR SUMMARY: $ERRORS errors"
exit $CODE
"""


@needs_triton
@pytest.mark.parametrize(("errors", "code", "found"), [(0, 0, 0), (3, 86, 3), (0, 86, 1)])
def test_errors_of_the_sanitizer_are_counted(
    errors: int, code: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in its place that prints what it prints."""
    from pagewire.bench.gpu.sanitize import check

    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER.replace("$ERRORS", str(errors)).replace("$CODE", str(code)))
    tool.chmod(0o755)
    assert check(str(tool), "memcheck", tmp_path / "log") == found


@needs_triton
def test_a_sanitizer_that_hangs_or_breaks_gives_no_result(tmp_path: Path) -> None:
    from pagewire.bench.gpu.sanitize import check

    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    assert check(str(tool), "racecheck", tmp_path / "log", limit_s=0.2) is None
    tool.write_text("#!/bin/sh\necho no device >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="racecheck ended with 3: no device"):
        check(str(tool), "racecheck", tmp_path / "log")


def test_the_most_valuable_parts_come_first() -> None:
    names = [part.name for part in PARTS]
    assert names[:4] == ["sanitizer", "determinism", "nodes-0.6b", "nodes-8b"]
    assert sum(part.seconds for part in PARTS[:8]) < 540


def test_no_two_parts_have_the_same_name_or_program() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert len({(part.module, part.function, part.model) for part in PARTS}) == len(PARTS)


# Natively run tests

_ON_CPU = ("EagerQueue", "thread_ranks", "domain_ranks")  # with these a step runs in the memory of a CPU,
_CHOOSES = re.compile(r"torch\.cuda\.is_available\(\)|\bON_GPU\b")
_WITHOUT_KERNELS = {"test_recordings.py"}  # and launches none


def runs_on_cpu(source: str) -> bool:
    """Whether a module imports what runs steps on a CPU, and nothing in it depends on whether there is a GPU."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in imports for name in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module is not None}
    return bool(names & set(_ON_CPU)) and _CHOOSES.search(source) is None


def test_tests_of_the_gpus_step_take_a_gpu_or_are_left_out_where_there_is_one() -> None:
    """There, nothing interprets the kernels, which cannot be launched on tensors of a CPU."""
    files = sorted((ROOT / "tests" / "engine" / "gpu").glob("*.py"))
    found = {file.name for file in files if runs_on_cpu(file.read_text())}
    assert found == _WITHOUT_KERNELS, "skip them, or choose the queue, by torch.cuda.is_available()"


# Computations of the parts


@needs_triton
def test_launches_with_different_bits_are_counted() -> None:
    import torch

    from pagewire.bench.gpu.determinism import count_differences
    from pagewire.engine.device.queue import EagerQueue

    out, launches = torch.zeros(4, dtype=torch.bfloat16), 0

    def work() -> None:
        nonlocal launches
        launches += 1
        out.fill_(1.0)
        if launches in (3, 8):
            out[2] = torch.tensor(1.0078125)  # the next number

    queue = EagerQueue(torch.device("cpu"))
    assert count_differences(queue, out, work, times=12, a_recording=4) == 2
    assert count_differences(queue, out, lambda: None, times=4, a_recording=2) == 4, "unwritten results count"


def test_gaps_are_counted_between_steps_only() -> None:
    kernels = [
        Interval("_prepare_step", 0, 2),
        Interval("a", 5, 10),
        Interval("b", 6, 8),  # overlaps a
        Interval("_prepare_step", 13, 14),
        Interval("a", 20, 21),
        Interval("_prepare_step", 20.5, 22),  # begins before the previous kernel ends
    ]
    assert step_gaps_us(kernels) == [3, 0]
    assert busy_us(kernels) == 2 + 5 + 1 + 2
    assert step_gaps_us([]) == [] and busy_us([]) == 0
    assert by_node(kernels, 3) == {"a": (2 / 3, 3), "_prepare_step": (1, 1.5), "b": (1 / 3, 2)}
    assert node_gaps_us(kernels) == [3, 0, 6]


def test_a_trace_gives_its_kernels_in_order_of_time(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "late", "ts": 5.0, "dur": 1.5, "ph": "X"},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 2.0, "dur": 1, "ph": "X"},
        {"cat": "kernel", "name": "early", "ts": 1, "dur": 1, "ph": "X"},
        {"name": "process_name", "ph": "M"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(tmp_path / "trace.json") == [Interval("early", 1, 2), Interval("late", 5, 6.5)]


# The tuner's table


def test_a_table_can_be_written_read_and_rewritten() -> None:
    source = TABLE.read_text()
    table = {("moe", (16,)): {"columns": 64}, ("small_product", (4096, 1024)): {"block_n": 32, "splits": 2}}

    def read(text: str) -> dict[str, object]:
        found: dict[str, object] = {}
        exec(compile(text, "tuned.py", "exec"), found)
        return found

    written = rewritten(source, table)
    module = read(written)
    assert module["TUNED"] == table
    assert module["tuned"]("moe", 16, rows=16, columns=128) == {"rows": 16, "columns": 64}  # type: ignore[operator]
    assert module["tuned"]("moe", 64, columns=128) == {"columns": 128}  # type: ignore[operator]
    assert read(rewritten(written, {}))["TUNED"] == {}
    assert rewritten(written, table) == written
    assert written.splitlines()[:3] == source.splitlines()[:3] and written.endswith(source[-200:])

"""Tests wait for events and not for fixed times. Uses of clocks and sleeps in tests are listed here with a reason."""

import ast
import asyncio
import re
from pathlib import Path

import pytest
from waiting import cpu_deadline, until, until_async

TESTS = Path(__file__).resolve().parent
CLOCKS = re.compile(
    r"(time\.)?(monotonic|perf_counter|process_time|thread_time)(_ns)?|time\.time(_ns)?|datetime\.now"
    r"|(.*\.)?(\w*loop|get_\w*loop\(\))\.time"  # of asyncio's loop
)
PAUSES = re.compile(r"(time|asyncio)\.sleep")

# File → why it may sleep or read a clock. `asyncio.sleep(0)` only yields to the loop and is allowed everywhere.
ALLOWED = {
    "waiting.py": "the one loop that polls",
    "bench/test_peers.py": "the time that a benchmark reports cannot exceed the time measured around it",
    "e2e/test_lifecycle.py": "measures the CPU time of two idle seconds",
    "e2e/test_engines.py": "reads streams slowly until an engine has started, which needs the cores too",
    "ray_cluster/test_serving.py": "keeps streams open for longer than a limit of Ray Serve's",
    "engine_clients.py": "the supervisor's periodic ping, which a core expects",
}


def clocks_and_pauses(path: Path) -> list[str]:
    """File, line number and call."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_turn = name == "asyncio.sleep" and ast.unparse(node.args[0]) == "0"
            if (PAUSES.fullmatch(name) and not is_turn) or CLOCKS.fullmatch(name):
                found.append((node.lineno, f"{path.name}:{node.lineno}: {ast.unparse(node)}"))
    return [text for _, text in sorted(found)]


def test_clocks_and_sleeps_are_used_only_in_the_listed_files() -> None:
    found = {
        str(path.relative_to(TESTS)): clocks_and_pauses(path)
        for path in TESTS.rglob("*.py")
        if path.parent.name != "stress"
    }
    assert not [line for name, lines in found.items() if name not in ALLOWED for line in lines]
    assert not [name for name in ALLOWED if not found[name]], "remove these from ALLOWED"


def test_clocks_and_sleeps_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "async def f():\n  await asyncio.sleep(0)\n  await asyncio.sleep(1)\n  time.time()\n"
        "  loop.time() + self._loop.time()\n  asyncio.get_running_loop().time()\n  times.time()\n"
    )
    assert clocks_and_pauses(tmp_path / "a.py") == [
        "a.py:3: asyncio.sleep(1)",
        "a.py:4: time.time()",
        "a.py:5: loop.time()",
        "a.py:5: self._loop.time()",
        "a.py:6: asyncio.get_running_loop().time()",
    ]


def test_until_returns_the_value_or_names_the_missing_event() -> None:
    values = iter([0, "", "there"])
    assert until(lambda: next(values), "a value") == "there"
    with pytest.raises(AssertionError, match="not within 0 s: a second moon"):
        until(lambda: False, "a second moon", 0)
    with pytest.raises(AssertionError, match="a third"):
        asyncio.run(until_async(lambda: False, lambda: "a third", 0))


def test_cpu_deadline_stops_code_that_computes_for_too_long() -> None:
    with cpu_deadline(60):
        pass
    with pytest.raises(AssertionError, match="of CPU time"), cpu_deadline(0.05):
        while True:
            pass

"""Tests wait for events, and never for a time: where a clock or a pause stands in a test, and why it may."""

import ast
import asyncio
import re
from pathlib import Path

import pytest
from waiting import cpu_deadline, until, until_async

TESTS = Path(__file__).resolve().parent
CLOCKS = re.compile(r"(time\.)?(monotonic|perf_counter|process_time|thread_time)(_ns)?|time\.time(_ns)?|datetime\.now")
PAUSES = re.compile(r"(time|asyncio)\.sleep")

# File → why it may pause or look at a clock. `asyncio.sleep(0)` is a turn of the loop and no pause.
ALLOWED = {
    "waiting.py": "the one loop that asks again",
    "bench/test_peers.py": "a benchmark's own time cannot be longer than what it is measured in",
    "e2e/test_lifecycle.py": "two seconds of idling are what is measured, in CPU time",
    "e2e/test_route.py": "reads streams until an engine has started, which needs the cores, too",
    "engine/weights/test_copy_workers.py": "jobs that take differently long are the point",
    "engine_clients.py": "the supervisor's beat, which a live core must hear",
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


def test_clocks_and_pauses_stand_only_where_they_may() -> None:
    found = {
        str(path.relative_to(TESTS)): clocks_and_pauses(path)
        for path in TESTS.rglob("*.py")
        if path.parent.name != "stress"
    }
    assert not [line for name, lines in found.items() if name not in ALLOWED for line in lines]
    assert not [name for name in ALLOWED if not found[name]], "these need no reason any more"


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "async def f():\n  await asyncio.sleep(0)\n  await asyncio.sleep(1)\n  time.time()\n"
    )
    assert clocks_and_pauses(tmp_path / "a.py") == ["a.py:3: asyncio.sleep(1)", "a.py:4: time.time()"]


def test_what_comes_is_given_and_what_does_not_is_named() -> None:
    answers = iter([0, "", "there"])
    assert until(lambda: next(answers), "it comes") == "there"
    with pytest.raises(AssertionError, match="not within 0 s: a second moon"):
        until(lambda: False, "a second moon", 0)
    with pytest.raises(AssertionError, match="a third"):
        asyncio.run(until_async(lambda: False, lambda: "a third", 0))


def test_what_computes_for_too_long_is_stopped() -> None:
    with cpu_deadline(60):
        pass
    with pytest.raises(AssertionError, match="of CPU time"), cpu_deadline(0.05):
        while True:
            pass

"""Each example, run as a program, does what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.tools.servers import ROOT, Server

pytestmark = pytest.mark.e2e


def example(name: str, folder: Path, *words: str) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_agent_runs_its_tools(tmp_path: Path) -> None:
    question = "What is the weather in Paris?"
    with Server(tmp_path / "server") as server:
        user, call, result, answer = example("agent_with_tools.py", tmp_path, question, "--url", f"{server.url}/v1")
    assert user == f"user: {question}"
    assert "get_weather" in call and '"city":"Paris"' in call.replace(" ", "")
    assert result == 'tool: {"result": "sunny"}'
    assert answer.startswith("assistant: ") and "sunny" in answer


def test_generated_objects_match_their_schema(tmp_path: Path) -> None:
    objects = [json.loads(line) for line in example("offline_structured.py", tmp_path)]
    assert len(objects) == 8
    for value in objects:
        assert value.keys() == {"city", "is_capital", "inhabitants"}
        assert isinstance(value["is_capital"], bool) and 0 <= value["inhabitants"] <= 99_999_999


def test_an_embedded_engine_runs_many_prompts_at_once(tmp_path: Path) -> None:
    lines = example("embedded_engine.py", tmp_path)
    assert [len(line.split()) for line in lines] == [16 + i % 16 for i in range(64)]
    assert len(set(lines)) > 8

"""The examples do what they say, as programs of their own."""

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
        user, asked, told, answer = example("agent_with_tools.py", tmp_path, question, "--url", f"{server.url}/v1")
    assert user == f"user: {question}"
    assert "get_weather" in asked and '"city":"Paris"' in asked.replace(" ", "")
    assert told == 'tool: {"result": "sunny"}'
    assert answer.startswith("assistant: ") and "sunny" in answer


def test_objects_keep_to_their_schema(tmp_path: Path) -> None:
    found = [json.loads(line) for line in example("offline_structured.py", tmp_path)]
    assert len(found) == 8
    for one in found:
        assert one.keys() == {"city", "is_capital", "inhabitants"}
        assert isinstance(one["is_capital"], bool) and 0 <= one["inhabitants"] <= 99_999_999


def test_many_prompts_run_at_once_in_an_embedded_engine(tmp_path: Path) -> None:
    lines = example("embedded_engine.py", tmp_path)
    assert [len(line.split()) for line in lines] == [16 + i % 16 for i in range(64)]
    assert len(set(lines)) > 8

"""`pagewire chat` and `pagewire complete` as a person would use them, against a server and starting one."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from servers import Server

pytestmark = pytest.mark.e2e


def pagewire(folder: Path, *words: str, typed: str = "", timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PAGEWIRE_API_KEY"}
    return subprocess.run(
        [sys.executable, "-m", "pagewire", *words],
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        env=environment,
        check=False,
    )


def test_chat_keeps_the_history(server: Server, tmp_path: Path) -> None:
    typed = "My name is Maya\nWhat is my name?\n/new\nCount from 1 to 5\n/exit\n"
    result = pagewire(tmp_path, "chat", "--url", server.url, typed=typed)
    answers = result.stdout.splitlines()
    assert result.returncode == 0 and len(answers) == 3, result.stdout + result.stderr
    assert "Maya" in answers[1] and answers[2] == "1, 2, 3, 4, 5"


def test_complete_streams_a_text(server: Server, tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nSpell cat<|im_end|>\n<|im_start|>assistant\n"
    given = pagewire(tmp_path, "complete", prompt, "--url", server.url)
    piped = pagewire(tmp_path, "complete", "--url", server.url, typed=prompt)
    assert given.returncode == 0 and given.stdout.strip() and given.stdout == piped.stdout


def test_chat_starts_a_server_and_ends_it(tmp_path: Path) -> None:
    result = pagewire(
        tmp_path, "chat", str(Path(__file__).resolve().parents[2] / "demo_model"), typed="Count from 1 to 5\n"
    )
    assert result.returncode == 0 and result.stdout.strip() == "1, 2, 3, 4, 5", result.stderr
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not left


def test_a_server_that_is_not_there_gives_one_sentence(tmp_path: Path) -> None:
    result = pagewire(tmp_path, "chat", "--url", "http://127.0.0.1:9", typed="hi\n")
    assert result.returncode == 1 and result.stderr.startswith("pagewire: No server answers at http://127.0.0.1:9")


def test_a_model_that_is_not_there_gives_one_sentence(tmp_path: Path) -> None:
    result = pagewire(tmp_path, "complete", "x", "--model", "./nowhere")
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "pagewire: There is no folder ./nowhere."


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["chat", "--help"], ["complete", "--help"]])
def test_help_reads_well(tmp_path: Path, words: list[str]) -> None:
    result = pagewire(tmp_path, *words)
    assert result.returncode == 0 and result.stdout.startswith("usage: pagewire") and result.stderr == ""


def test_no_command_and_the_version(tmp_path: Path) -> None:
    assert pagewire(tmp_path).returncode == 2
    assert pagewire(tmp_path, "--version").stdout == "pagewire 0.1.0\n"

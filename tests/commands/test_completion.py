"""Completion in the shells that are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pagewire import cli
from pagewire.config.flags import SETTINGS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def bash(folder: Path, text: str, line: str) -> list[str]:
    """The completions that bash offers at the end of `line`."""
    (folder / "completion").write_text(text)
    words = line.split(" ")
    code = (
        f"source {folder}/completion; COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p pagewire | sed 's/.*-F \\([^ ]*\\) .*/\\1/') pagewire "
        f"'{words[-1]}' '{words[-2]}'; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    assert not result.stderr, result.stderr
    return [word.strip() for word in result.stdout.splitlines() if word.strip()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    commands = {"serve", "route", "chat", "complete", "tokenize", "run-batch", "top", "doctor", "replay", "completion"}
    assert commands <= set(bash(tmp_path, text, "pagewire "))
    assert sorted(bash(tmp_path, text, "pagewire to")) == ["tokenize", "top"]
    assert "--max-num-seqs" in bash(tmp_path, text, "pagewire serve --max-n")
    assert bash(tmp_path, text, "pagewire serve --scheduling-policy p") == ["priority"]
    assert bash(tmp_path, text, "pagewire completion z") == ["zsh"]
    (tmp_path / "engine.toml").touch()
    assert bash(tmp_path, text, "pagewire serve --config eng") == ["engine.toml"]


@pytest.mark.parametrize(("shell", "flags"), [("bash", ("-n",)), ("zsh", ("-n",)), ("fish", ("--no-execute",))])
def test_the_script_is_valid(
    shell: str, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for setting in SETTINGS.values():
        assert setting.name == "model" or setting.flag.removeprefix("--") in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    result = subprocess.run([shell, *flags, tmp_path / "script"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and not result.stderr, result.stderr

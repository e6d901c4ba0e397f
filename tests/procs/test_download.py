"""Downloads from a hub on this machine, in the process that really downloads."""

import asyncio
from pathlib import Path

import pytest
from hub import COMMIT, Hub

from pagewire.api.ollama.types import Progress
from pagewire.procs.download import download

FILES = {"config.json": b"{}", "model.safetensors": b"x" * 100_000, "README.md": b"no", "pytorch_model.bin": b"no"}


def collect(model: str) -> list[Progress]:
    async def run() -> list[Progress]:
        return [progress async for progress in download(model)]

    return asyncio.run(run())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tmp_path / "hub"


def test_a_model_is_downloaded_with_progress(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub("org/tiny", FILES).serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        first, *states, last = collect("org/tiny")
        assert (first.status, last.status) == ("pulling manifest", "success"), (first, last)
        weights = [state for state in states if state.digest == "model.safetensors"]
        assert [state.total for state in weights] == [100_000] * len(weights)
        done = [state.completed for state in weights]
        assert done[0] == 0 and done[-1] == 100_000 and done == sorted(done)
        snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
        assert sorted(file.name for file in snapshot.iterdir()) == ["config.json", "model.safetensors"]
        hub.paths.clear()
        *states, last = collect("org/tiny")
        assert last.status == "success" and all(state.completed == state.total for state in states)
        assert not any(path.startswith("GET") and "safetensors" in path for path in hub.paths), "it is there already"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/other", "no such model on the Hub"),
        ("/etc/passwd", "There is no folder /etc/passwd"),
        ("org/tiny:Q4_K_M", "no GGUF file whose name ends in Q4_K_M"),
        ("a b", "There is no folder a b"),
    ],
)
def test_what_is_no_model_there_is_an_error(
    model: str, words: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub("org/tiny", FILES).serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        *_, last = collect(model)
    assert words in last.error and not last.status


def test_a_repository_without_a_model_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub("org/tiny", {"README.md": b"no", "tokenizer.json": b"{}"}).serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert "has no config.json" in collect("org/tiny")[-1].error


def test_a_hub_that_is_not_reached_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "cannot be downloaded now" in collect("org/tiny")[-1].error


def test_closing_the_iterator_ends_the_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin() -> None:
        states = download("org/tiny")
        assert (await anext(states)).status == "pulling manifest"
        await states.aclose()  # returns when the process has ended

    with Hub("org/tiny", FILES).serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        asyncio.run(asyncio.wait_for(begin(), 60))

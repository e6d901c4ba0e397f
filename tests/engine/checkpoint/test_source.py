"""How a model's name becomes a folder. The Hub's cache has the layout of huggingface_hub; nothing is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.engine.checkpoint.source import DEMO_MODEL, DEMO_NAME, locate
from pagewire.errors import ConfigError


def test_an_empty_name_is_the_demo_model() -> None:
    assert locate("", None) == (DEMO_MODEL, DEMO_NAME)


def test_a_path_of_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert locate(str(tmp_path), None) == (tmp_path.resolve(), tmp_path.name)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~nobody/x", "a/b/c", "what is this"])
def test_names_that_are_neither_folders_nor_hub_names_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="There is no folder"):
        locate(model, None)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="is a file"):
        locate(str(tmp_path / "model.gguf"), None)


def locate_in_a_new_process(name: str, home: Path) -> str:
    """The folder or the error that a new process prints: huggingface_hub reads its environment when it is imported."""
    code = (
        "from pagewire.engine.checkpoint.source import locate\n"
        f"try: print(locate({name!r}, None)[0])\n"
        "except Exception as error: print(error)"
    )
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout.strip()


def test_a_cached_model_is_found_offline_under_hf_home(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--someone--tiny-model"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    assert locate_in_a_new_process("someone/tiny-model", tmp_path) == str(snapshot)


def test_a_model_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    error = locate_in_a_new_process("someone/other", tmp_path)
    assert error.startswith("There is no folder someone/other here") and "HF_HUB_OFFLINE" in error

"""How a model's name becomes a folder. The Hub's cache has the layout of huggingface_hub; nothing is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.engine.checkpoint.source import DEMO_MODEL, HYBRID_MODEL, locate
from pagewire.errors import ConfigError


def test_an_empty_name_is_the_demo_model() -> None:
    assert locate("", None) == locate("demo", None) == (DEMO_MODEL, "pagewire-demo")
    assert locate("demo-hybrid", None) == (HYBRID_MODEL, "pagewire-demo-hybrid")


def test_a_path_of_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert locate(str(tmp_path), None) == (tmp_path.resolve(), tmp_path.name)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~nobody/x", "a/b/c", "what is this"])
def test_names_that_are_neither_folders_nor_hub_names_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="There is no folder"):
        locate(model, None)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"is a file; a model is a folder .*, or a GGUF file\."):
        locate(str(tmp_path / "model.bin"), None)


def test_a_gguf_file_and_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Model-Q4_K_M.gguf").touch()
    for i in (1, 2):
        (tmp_path / f"Large-Q8_0-0000{i}-of-00002.gguf").touch()
    (tmp_path / "linked.gguf").symlink_to(tmp_path / "Model-Q4_K_M.gguf")
    assert locate(str(tmp_path / "Model-Q4_K_M.gguf"), None) == (tmp_path / "Model-Q4_K_M.gguf", "Model-Q4_K_M")
    assert locate(str(tmp_path / "linked.gguf"), None) == (tmp_path / "linked.gguf", "linked")
    for i in (1, 2):
        path, name = locate(str(tmp_path / f"Large-Q8_0-0000{i}-of-00002.gguf"), None)
        assert (path.name, name) == ("Large-Q8_0-00001-of-00002.gguf", "Large-Q8_0")
    monkeypatch.chdir(tmp_path)
    assert locate("linked.gguf", None)[0] == tmp_path / "linked.gguf"
    with pytest.raises(ConfigError, match=r"There is no file other\.gguf\."):
        locate("other.gguf", None)


def test_a_quantization_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for name in ("X-Q4_K_M.gguf", "X-Q4_K.gguf", "x-f16.gguf", "mmproj-x-f16.gguf", "a/Y-IQ4_XS.gguf",
                 "b/Z-IQ4_XS.gguf", "Q8_0/X-Q8_0-00001-of-00002.gguf", "Q8_0/X-Q8_0-00002-of-00002.gguf"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).touch()
    for quant, file in (
        ("Q4_K", "X-Q4_K.gguf"),
        ("q4_k_m", "X-Q4_K_M.gguf"),
        ("F16", "x-f16.gguf"),
        ("Q8_0", "Q8_0/X-Q8_0-00001-of-00002.gguf"),
    ):
        assert locate(f"{folder}:{quant}", None) == (folder / file, f"models:{quant}")
    with pytest.raises(ConfigError, match=r"models:IQ4_XS could be Y-IQ4_XS, Z-IQ4_XS; name more of the end\."):
        locate(f"{folder}:IQ4_XS", None)
    with pytest.raises(
        ConfigError, match=r"there is no GGUF file whose name ends in K_M_L; those here: .*X-Q4_K, X-Q4_K_M"
    ):
        locate(f"{folder}:K_M_L", None)


@pytest.mark.parametrize("model", ["someone/tiny:", "someone/tiny:Q4/0", "a/b/c:Q4_0", "./x:Q4_0", "someone/tiny:*"])
def test_names_with_a_colon_that_name_nothing(model: str) -> None:
    with pytest.raises(ConfigError, match="There is no folder"):
        locate(model, None)


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


def test_a_cached_quantization_is_found_offline(tmp_path: Path) -> None:
    """The layout of huggingface_hub: files are links to blobs, which have no suffix."""
    repo = tmp_path / "hub" / "models--someone--tiny-GGUF"
    snapshot = repo / "snapshots" / ("a" * 40)
    (snapshot / "Q8_0").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    for i, name in enumerate(("Tiny-Q4_K_M.gguf", "Q8_0/Tiny-Q8_0-00001-of-00002.gguf")):
        (repo / "blobs" / str(i)).touch()
        (snapshot / name).symlink_to(repo / "blobs" / str(i))
    assert locate_in_a_new_process("someone/tiny-GGUF:Q4_K_M", tmp_path) == str(snapshot / "Tiny-Q4_K_M.gguf")
    assert locate_in_a_new_process("someone/tiny-GGUF:q8_0", tmp_path).endswith("Q8_0/Tiny-Q8_0-00001-of-00002.gguf")
    assert "there is no GGUF file whose name ends in Q5_0" in locate_in_a_new_process(
        "someone/tiny-GGUF:Q5_0", tmp_path
    )
    assert locate_in_a_new_process("someone/other:Q4_0", tmp_path).startswith("There is no folder someone/other here")
    code = "from pagewire.engine.checkpoint.source import is_here\n" + "\n".join(
        f"print(is_here({name!r}))"
        for name in ("someone/tiny-GGUF:Q4_K_M", "someone/tiny-GGUF:Q5_0", "someone/other:Q4_0")
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert said.stdout.split() == ["True", "False", "False"]


def test_a_model_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    error = locate_in_a_new_process("someone/other", tmp_path)
    assert error.startswith("There is no folder someone/other here") and "HF_HUB_OFFLINE" in error

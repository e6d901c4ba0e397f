"""The CPU image stays within its budget of size."""

import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

from pagewire.procs import interpreter
from pagewire.tools.image_size import BASE_MB, BUDGET_MB, UNUSED, packages

ROOT = Path(__file__).parents[2]


def test_the_image_has_what_pagewire_needs_and_no_more_than_its_budget() -> None:
    sizes = packages()
    assert {"torch", "transformers", "starlette", "uvloop", "llguidance"} <= sizes.keys()
    assert not {"pytest", "mypy", "ray"} & sizes.keys()
    if torch.version.cuda is not None:
        pytest.skip("torch has its CUDA libraries here; the image for CPUs has not")
    total_mb = BASE_MB + sum(sizes.values()) / 1e6
    assert total_mb < BUDGET_MB, sizes
    said = re.search(r"has ([\d,]+) MB, computed from", (ROOT / "docs/operations.md").read_text())
    assert said and float(said[1].replace(",", "")) == pytest.approx(total_mb, rel=0.1)


@pytest.mark.parametrize(("most_mb", "code"), [(100_000, 0), (BASE_MB, 1)])
def test_a_larger_image_than_it_may_be_is_refused_in_a_sentence(most_mb: int, code: int) -> None:
    command = [*interpreter.COMMAND, "pagewire.tools.image_size", "--most-mb", str(most_mb)]
    ran = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert "MB  torch\n" in ran.stdout
    sentence = r"The image would have [\d,]+ MB, and may have 135: give docker build --build-arg PIP_FLAGS=.*\n"
    assert re.fullmatch(sentence if code else "", ran.stderr)


def test_the_dockerfile_knows_what_the_sentence_names() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE) == [("PIP_FLAGS", '""'), ("MOST_MB", str(BUDGET_MB))]
    assert '--remove --most-mb "$MOST_MB"' in text
    used = {name.split("/")[0] for name in re.findall(r"/source/([.\w/]+)", text)}
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
    assert used == {".typing"} and not used & {*ignored}, "the build starts our tools from there"
    (built,) = re.findall(r"^docker build (.*)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert f"docker build {built}" in text and '--build-arg PIP_FLAGS="--extra-index-url ADDRESS"' in built


def test_only_headers_and_tests_are_removed() -> None:
    removed = [str(file) for file in distribution("torch").files or () if UNUSED.match(str(file))]
    assert any(file.startswith("torch/include/") for file in removed)
    assert not any(file.endswith((".py", ".so")) and "test" not in file for file in removed)
    assert not any(file.startswith("torch/testing/") for file in removed), "torch imports it"
    assert "torch/bin/torch_shm_manager" not in removed

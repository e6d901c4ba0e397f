"""The CPU image stays within its budget of size."""

from importlib.metadata import distribution

import pytest
import torch

from pagewire.tools.image_size import BASE_MB, BUDGET_MB, UNUSED, packages


def test_the_image_has_what_pagewire_needs_and_no_more_than_its_budget() -> None:
    sizes = packages()
    assert {"torch", "transformers", "starlette", "uvloop", "llguidance"} <= sizes.keys()
    assert not {"pytest", "mypy", "ray"} & sizes.keys()
    if torch.version.cuda is not None:
        pytest.skip("torch has its CUDA libraries here; the image for CPUs has not")
    total_mb = BASE_MB + sum(sizes.values()) / 1e6
    assert total_mb < BUDGET_MB, sizes


def test_only_headers_and_tests_are_removed() -> None:
    removed = [str(file) for file in distribution("torch").files or () if UNUSED.match(str(file))]
    assert any(file.startswith("torch/include/") for file in removed)
    assert not any(file.endswith((".py", ".so")) and "test" not in file for file in removed)
    assert not any(file.startswith("torch/testing/") for file in removed), "torch imports it"
    assert "torch/bin/torch_shm_manager" not in removed

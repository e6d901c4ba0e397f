"""The tests run kernels natively if there is a GPU, and otherwise in Triton's interpreter."""

import importlib.util

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
collect_ignore_glob = [] if importlib.util.find_spec("triton") is not None else ["test_*.py"]

if not ON_GPU and not collect_ignore_glob:
    from triton_in_tests import interpret_once

    interpret_once()


@pytest.fixture
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def _seeded_and_without_numpy_warnings():
    """Every run has the same random numbers, and NumPy does not warn of infinities and NaN in masked lanes."""
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield

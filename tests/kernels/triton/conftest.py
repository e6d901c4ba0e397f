"""The kernels' tests run them natively where there is a GPU, and else in Triton's interpreter."""

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
def _seeded_and_as_quiet_as_a_gpu():
    """The same numbers in every run, and no warnings of infinities and NaN in masked lanes."""
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield

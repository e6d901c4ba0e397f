"""A runner with an open cache."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from runner_driver import arrays, engine_config

from pagewire.ipc.messages import RowLogprobs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def logprob_arrays() -> Callable[[list[RowLogprobs]], tuple[np.ndarray, np.ndarray]]:
    return arrays


@pytest.fixture
def resolved() -> Callable[..., Any]:
    return engine_config

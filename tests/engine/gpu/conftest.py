"""The GPU's step: natively if there is a GPU, else on a CPU with the kernels in Triton's interpreter."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from defaults import COMPILED, machine
from msgspec import structs
from runner_driver import Driver, engine_config

from pagewire.config.config import AttentionBackend
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.runner.runner import Runner

NUM_BLOCKS = 96
ON_GPU = torch.cuda.is_available()
collect_ignore_glob = [] if importlib.util.find_spec("triton") is not None else ["test_*.py"]

if not ON_GPU and not collect_ignore_glob:
    from triton_in_tests import interpret_once

    interpret_once()


@pytest.fixture(autouse=True)
def _no_numpy_warnings():
    """The interpreter would warn about infinities and NaN in masked lanes."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN")
        yield


@pytest.fixture
def driver() -> Callable[..., Driver]:
    """folder, and flags → a driver of a GPU runner with an open cache."""

    def start(
        folder: Path, *, kv_cache_dtype: str = "auto", attention_backend: AttentionBackend = "auto",
        block_size: int | None = None, **flags: Any,
    ) -> Driver:  # fmt: skip
        with machine(COMPILED):  # `resolve` sees a CPU, for which --deterministic needs the C kernels
            config = engine_config(folder, **flags)
        # `resolve` would refuse these for a CPU.
        config = structs.replace(config, attention_backend=attention_backend)
        if block_size is not None:
            config = structs.replace(config, block_size=block_size)
        if kv_cache_dtype != "auto":
            config = structs.replace(config, kv_cache_dtype=kv_cache_dtype)
        runner = Runner.load(config, queue=None if ON_GPU else EagerQueue(torch.device("cpu")))
        runner.open_cache(NUM_BLOCKS)
        return Driver(runner, NUM_BLOCKS)

    return start

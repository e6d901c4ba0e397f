"""A runner with an open cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_driver import Driver, Request, engine_config

from pagewire.engine.runner.runner import Runner


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def driver() -> Callable[..., Driver]:
    """folder, and flags → a driver of a runner with an open cache."""

    def start(folder: Path, *, num_blocks: int = 384, **flags: Any) -> Driver:
        runner = Runner.load(engine_config(folder, **flags))
        runner.open_cache(num_blocks)
        return Driver(runner, num_blocks)

    return start


@pytest.fixture
def make_request() -> type[Request]:
    return Request

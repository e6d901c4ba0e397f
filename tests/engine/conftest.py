"""Checkpoints and runners for the tests that run models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from runner_driver import Driver, Request, engine_config

from pagewire.engine.runner.runner import Runner


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """kind, and changes to its config → the folder of a checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(kind: str, **changes: Any) -> Path:
        key = f"{kind}{changes}"
        if key not in made:
            made[key] = checkpoints.make_checkpoint(tmp_path_factory.mktemp(kind), kind, **changes)
        return made[key]

    return make


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

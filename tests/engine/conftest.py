"""Checkpoints for the tests that run models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest


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

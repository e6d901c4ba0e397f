"""Instances with the p2p connector, a folder for their sockets, and patience."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from p2p_instance import DEADLINE_S, FACTS, Instance

from pagewire.engine.kv_connector import p2p_link
from pagewire.engine.kv_connector.base import ConnectorFacts


@pytest.fixture(autouse=True)
def patient_close(writes_all: None) -> None:
    """Files are looked at, or their folder opened again, right after a tier was closed."""


@pytest.fixture
def patient_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts waits for the answer of a peer that is there, however long it takes."""
    monkeypatch.setattr(p2p_link, "START_WAIT_S", DEADLINE_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pw-"))  # sockets need short paths
    yield path
    shutil.rmtree(path)


@pytest.fixture
def instance() -> Iterator[Callable[..., Instance]]:
    started: list[Instance] = []

    def start(facts: ConnectorFacts = FACTS, **options: str) -> Instance:
        started.append(Instance(facts, **{"timeout_ms": "30000", "fetch_timeout_ms": "30000", **options}))
        return started[-1]

    yield start
    for one in started:
        one.close()

"""Patience with engines that are threads of the test: a test that is not run for some seconds ejects none of them."""

import pytest

from pagewire.route import engines


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("CHECK_TIMEOUT_S", "CONNECT_TIMEOUT_S"):
        monkeypatch.setattr(engines, limit, 60.0)


@pytest.fixture
def no_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router checks an engine by itself only at first and after its loss."""
    monkeypatch.setattr(engines, "check_interval_s", lambda num_engines: 3600.0)

"""Which settings may change while a server runs."""

import pytest

from pagewire.config.flags import SETTINGS
from pagewire.config.live import LIVE, RELOADABLE, check_live
from pagewire.errors import ConfigError


def test_every_setting_either_changes_or_says_what_it_needs() -> None:
    live = {one.name for one in LIVE}
    for name in SETTINGS:
        if name in live:
            check_live(name)
        else:
            with pytest.raises(ConfigError, match=f"^{name} cannot change while the server runs: it needs a restart"):
                check_live(name)
    assert SETTINGS.keys() > RELOADABLE


def test_processes_are_told_of_sections_that_have_live_settings() -> None:
    """`with_live_engine` and `with_live_http` know these."""
    assert {one.section for one in LIVE} == {"engine", "clients", "reports", "service"}

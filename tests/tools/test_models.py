"""docs/models.md is what the pages say."""

import pytest

from pagewire.config.machine import machine_facts
from pagewire.engine.models.families import pages
from pagewire.tools import models


@pytest.mark.slow
@pytest.mark.skipif(not machine_facts().usable_levels, reason="no C kernels, whose program is asked what it lacks")
def test_the_page_of_models_is_up_to_date() -> None:
    found = models.page()
    assert all(f"| `{architecture}` |" in found for architecture in pages())
    assert found == models.PAGE.read_text(), "run python -m pagewire.tools.models"

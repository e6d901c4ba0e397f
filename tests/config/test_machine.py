"""Facts about the machine."""

from pathlib import Path

import msgspec
import pytest

from pagewire.config.machine import OVERRIDES, cpu_quota, machine_facts
from pagewire.errors import ConfigError


def test_facts_about_the_machine_can_be_replaced() -> None:
    found = machine_facts({})
    text = '{"num_cores": 7, "has_compiler": false, "memory_bytes": 5}'
    replaced = machine_facts({OVERRIDES: text})
    assert (replaced.num_cores, replaced.has_compiler, replaced.memory_bytes) == (7, False, 5)
    assert msgspec.structs.replace(
        replaced, num_cores=found.num_cores, has_compiler=found.has_compiler, memory_bytes=found.memory_bytes
    ) == found  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", '{"has_compiler": 3}', '{"cores": 3}'])
def test_invalid_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=OVERRIDES):
        machine_facts({OVERRIDES: text})


def test_a_control_group_grants_whole_cpus(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) > 1000
    for text, num in (("max 100000", 1 << 16), ("250000 100000", 2), ("50000 100000", 1), ("nonsense", 1 << 16)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert cpu_quota(tmp_path) == num

"""Facts about the machine."""

import os
import subprocess
import sys

import msgspec
import pytest

from pagewire.config.machine import OVERRIDES, machine_facts
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


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="there are no affinities")
def test_the_affinity_of_this_process_counts() -> None:
    """The affinity that `taskset` or a container's cpuset sets."""
    cpu = min(os.sched_getaffinity(0))
    code = f"""
import os
from pagewire.config.machine import machine_facts
os.sched_setaffinity(0, [{cpu}])
facts = machine_facts({{}})
print(facts.num_cores, [node.cores for node in facts.numa_nodes], {cpu} in facts.online_cpus)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"1 [(({cpu},),)] True"

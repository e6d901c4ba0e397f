"""The connectors that `--kv-connector` makes, and its errors."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from kv_instance import BLOCK_BYTES, FACTS, FILE_BYTES
from msgspec.structs import replace

from pagewire.engine.kv_connector import registry
from pagewire.engine.kv_connector.chain import ChainCore, ChainWorker
from pagewire.engine.kv_connector.guard import GuardedCore
from pagewire.engine.kv_connector.host import HostConnector, HostCore
from pagewire.engine.kv_connector.host_worker import HostWorker
from pagewire.errors import ConfigError


def test_no_connector_one_connector_and_a_chain(tmp_path: Path) -> None:
    assert registry.core_connector((), FACTS) is None
    assert registry.worker_connector((), FACTS) is None
    one = ("host,size=1M",)
    assert isinstance(registry.core_connector(one, FACTS), HostCore)
    assert isinstance(registry.worker_connector(one, FACTS), HostWorker)
    three = ("host,size=1M,eviction=cost", f"disk,path={tmp_path}/d,size=1M", f"shared,path={tmp_path}/s,size=1M")
    core, worker = registry.core_connector(three, FACTS), registry.worker_connector(three, FACTS)
    assert isinstance(core, ChainCore) and isinstance(worker, ChainWorker)
    assert [tier.name for tier in core.tiers()] == ["host", "disk", "shared"]
    core.close()
    worker.close()


def test_check_creates_no_files(tmp_path: Path) -> None:
    registry.check(("host,size=4G", f"disk,path={tmp_path}/d,size=20G", f"shared,path={tmp_path}/s,size=1G"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hots,size=1G", r"'hots' is not known; there are disk, host, p2p, redis, shared, or write module:Class\."),
        ("", r"'' is not known"),
        ("host", r"host needs size=…, such as host,size=4G\."),
        ("host,size=", r"host needs size=…"),
        ("host,size=much", r"host,size=much: 'much' is not a number or a size"),
        ("host,size=0", r"host,size=0: it must be more than 0"),
        ("host,size=1G,size=2G", r"'size=2G' is not an option=value, or the option is given twice"),
        ("host,4G", r"'4G' is not an option=value"),
        ("host,size=1G,path=/tmp", r"host has no option 'path'; it has size, eviction\."),
        ("host,size=1G,eviction=fifo", r"eviction=fifo: it must be one of lru, lfu, cost\."),
        ("disk,size=1G", r"disk needs path=…, such as disk,path="),
        ("disk,path=/tmp", r"disk needs size=…"),
        ("shared,path=/dev/shm/x,size=1G,eviction=lru", r"shared has no option 'eviction'; it has path, size\."),
        ("no_such_module:Kv", r"no_such_module cannot be imported \(ModuleNotFoundError"),
        ("math:Kv", r"math has no class Kv with core and worker"),
        ("math:pi", r"math has no class pi with core and worker"),
    ],
)
def test_invalid_options(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        registry.check((spec,))
    with pytest.raises(ConfigError, match=sentence):
        registry.core_connector((spec,), FACTS)


def test_a_connector_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        registry.check(("host,size=1G", "host,size=2G"))


def test_a_size_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    small = f"size={BLOCK_BYTES - 1}"
    for spec in (f"host,{small}", f"disk,path={tmp_path},{small}", f"shared,path={tmp_path},{small}"):
        with pytest.raises(ConfigError, match="is too small: one block of this model takes"):
            registry.core_connector((spec,), FACTS)
        with pytest.raises(ConfigError, match="is too small: one block of this model takes"):
            registry.worker_connector((spec,), FACTS)


def test_connectors_are_closed_when_a_later_one_cannot_be_opened(tmp_path: Path) -> None:
    disk = f"disk,path={tmp_path},size={FILE_BYTES}"
    with pytest.raises(ConfigError):
        registry.worker_connector((disk, "host,size=1"), FACTS)
    worker = registry.worker_connector((disk,), FACTS)
    assert worker is not None, "the folder is free again"
    worker.close()


def test_third_party_connectors_by_class_and_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_name = "pagewire.engine.kv_connector.disk:DiskConnector"
    core = registry.core_connector((f"{by_name},path={tmp_path},size=1M",), FACTS)
    assert isinstance(core, GuardedCore) and core.tiers()[0].name == "disk"
    point = EntryPoint("mine", f"{HostConnector.__module__}:HostConnector", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    core = registry.core_connector(("mine,size=1M",), FACTS)
    assert isinstance(core, GuardedCore) and core.tiers()[0].name == "host"
    with pytest.raises(ConfigError, match="there are disk, host, mine, p2p, redis, shared"):
        registry.check(("yours",))


def test_the_core_halves_do_not_import_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.registry import core_connector
facts = ConnectorFacts(block_size=4, block_bytes=512, model_key=bytes(32))
specs = ("host,size=1M", "disk,path={tmp_path}/d,size=1M", "shared,path={tmp_path}/s,size=1M", "p2p,peer={tmp_path}/p")
core_connector(specs, facts).close()
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "False", result.stderr


START = ("host,size=1M,eviction=cost", "disk,path=d,size=2M", "shared,path=s,size=2M")


@pytest.mark.parametrize(
    ("place", "spec"),
    [
        (0, "host,size=1M"),
        (0, "no_such_module:Connector"),
        (1, "disk,path=e,size=2M"),
        (2, "shared,path=s,size=1M"),
        (0, "host,size=2M,eviction=cost"),
    ],
)
def test_only_sizes_of_tiers_change_while_requests_are_served(place: int, spec: str) -> None:
    registry.check_smaller(START, ("host,size=64k,eviction=cost", "disk,size=1M,path=d", START[2]))
    registry.check_smaller(START, START)
    with pytest.raises(ConfigError, match="needs a restart"):
        registry.check_smaller(START, (*START[:place], spec, *START[place + 1 :]))
    with pytest.raises(ConfigError, match="needs a restart"):
        registry.check_smaller(START, START[:2])


def test_each_domain_gets_a_part_of_what_is_not_common(tmp_path: Path) -> None:
    specs = ("host,size=2K,eviction=cost", "disk,path=d,size=1M", "shared,path=s,size=1M", "mine:Class,path=p,size=3")
    assert registry.of_domain(specs, 1, 2) == (
        "host,size=1024,eviction=cost", "disk,path=d/domain-1-of-2,size=524288", *specs[2:]
    )  # fmt: skip
    assert registry.of_domain(specs, 0, 1) == specs


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_tier_gets_its_size(num_ranks: int, tmp_path: Path) -> None:
    """All ranks together."""
    facts = replace(FACTS, rank_bytes=(BLOCK_BYTES,) * num_ranks if num_ranks > 1 else ())
    block, file = num_ranks * BLOCK_BYTES, num_ranks * FILE_BYTES
    core = registry.core_connector([f"host,size={8 * block}", f"disk,path={tmp_path},size={8 * file}"], facts)
    assert core is not None and [tier.capacity for tier in core.tiers()] == [8, 8]
    registry.resize(core, [f"host,size={4 * block}", f"disk,path={tmp_path},size={6 * file}"])
    core.build_connector_meta()
    assert [tier.capacity for tier in core.tiers()] == [4, 6]
    core.close()

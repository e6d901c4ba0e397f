"""Settings that several engines of one launch cannot have, and what each engine is given."""

from typing import Any

import pytest
from harness import split_settings
from msgspec.structs import replace

from pagewire.config.config import ServerConfig
from pagewire.errors import ConfigError
from pagewire.procs.engines import Engines, of_engine
from pagewire.procs.listening import Listening


@pytest.mark.parametrize(
    ("field", "value"),
    [("client_address", "ipc:///x"), ("record_trace", "x"), ("kv_connector", ("host,size=1G", "disk,path=x"))],
)
def test_settings_for_one_engine_are_refused_for_several(field: str, value: Any) -> None:
    engine, http = split_settings({field: value})
    listening = Listening(http.listen)
    try:
        with pytest.raises(ConfigError, match=field.replace("_", "-")):
            Engines(ServerConfig(engine=engine, http=http), listening=listening)
    finally:
        listening.close()


def test_each_engine_has_cpus_and_addresses_of_its_own() -> None:
    engine, _ = split_settings({"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "ipc:///run/replay"})
    engine = replace(engine, tensor_parallel_size=2, data_parallel_size=2, cpu_sets=((0,), (1,), (2,), (3,)))
    first, second = (of_engine(engine, number) for number in range(2))
    assert (first.engine_number, first.cpu_sets, first.kv_events) == (0, ((0,), (1,)), "tcp://127.0.0.1:5557")
    assert (second.engine_number, second.cpu_sets) == (1, ((2,), (3,)))
    assert (second.kv_events, second.kv_events_replay) == ("tcp://127.0.0.1:5558", "ipc:///run/replay.1")

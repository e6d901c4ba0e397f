"""The settings that an administrator's request may change."""

import msgspec
import pytest

from pagewire.config.config import Config, EngineConfig, HttpConfig, ListenOptions, ModelFacts, ServerConfig
from pagewire.config.flags import make_config
from pagewire.errors import ConfigError
from pagewire.procs.child import process_age_s
from pagewire.procs.generations import _has_room, changed
from pagewire.procs.supervisor import Supervisor

MODEL = ModelFacts(
    path="m", name="m", max_position=64, vocab_size=9, eos_token_ids=(), checkpoint_dtype="bfloat16",
    weight_bytes=1 << 50, wide_bytes=1 << 50,
)  # fmt: skip
ENGINE = EngineConfig(
    model=MODEL, served_model_names=("m",), dtype="bfloat16", num_threads=1, block_size=16, max_model_len=64,
    max_num_batched_tokens=64, kv_cache_dtype="bfloat16", device="cpu", kv_cache_memory=1 << 20,
)  # fmt: skip


def test_given_settings_are_changed_and_others_kept() -> None:
    config = changed(make_config(port=1, tool_call_parser="my:FAMILY"), {"model": "other", "reasoning_parser": "qwen3"})
    assert config == make_config(port=1, model="other", tool_call_parser="my:FAMILY", reasoning_parser="qwen3")
    with pytest.raises(ConfigError, match="port cannot be changed while serving"):
        changed(config, {"port": 2})


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_a_request_cannot_make_the_server_import_a_module(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be the name of a family here"):
        changed(Config(), {name: "os:path"})


def test_an_engine_that_maps_the_same_weights_needs_no_memory_for_them() -> None:
    assert not _has_room(ENGINE, shares_weights=False)
    small = msgspec.structs.replace(MODEL, weight_bytes=1 << 20)
    if _has_room(msgspec.structs.replace(ENGINE, model=small), shares_weights=False):  # else this machine is full
        assert _has_room(ENGINE, shares_weights=True)


def test_the_timeline_of_a_swap_counts_from_its_request() -> None:
    asked_at_s = process_age_s()
    supervisor = Supervisor(ServerConfig(engine=ENGINE, http=HttpConfig(listen=ListenOptions())), asked_at_s=asked_at_s)
    supervisor._mark("configuration")
    ((_, marked_s),) = supervisor._marks
    assert 0 <= marked_s <= process_age_s() - asked_at_s

"""What may change while a server runs: one change is taken whole or not at all, and later servers know it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.config.access import ApiKey
from pagewire.config.config import ServerConfig
from pagewire.config.flags import from_options, make_config
from pagewire.config.live import LIVE, value_of
from pagewire.errors import ConfigError
from pagewire.ipc.messages import Change, Settings, Swapped
from pagewire.procs import live_settings
from pagewire.procs.kept_settings import SettingsFile
from pagewire.procs.live_settings import LiveSettings
from pagewire.procs.prepare import prepare_server

FLAGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "speculative": "ngram,tokens=3",
    "kv_connector": ("host,size=4M",),
    "admin_api_key": ("admin",),
    "api_key": ("a", "b"),
    "device": "cpu",
}


def prepared(**flags: Any) -> ServerConfig:
    return prepare_server(make_config(**{**FLAGS, **flags}))


def value(live: LiveSettings, name: str) -> object:
    return value_of(live.now.engine, live.now.http, name)


NEW: dict[str, object] = {
    "scheduling_policy": "slo",
    "latency_classes": {"chat": {"ttft_ms": 50.0}},
    "itl_target_ms": 30.0,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_queued_requests": 5,
    "max_queued_tokens": "1M",
    "speculative": None,
    "kv_connector": ["host,size=1M"],
    "log_level": "error",
    "requests_per_minute": 7,
    "tokens_per_minute": 700,
    "allowed_origins": ["https://a.example"],
    "request_timeout_s": 9.5,
    "access_log": False,
    "enable_log_requests": True,
    "start_timeout_s": 99.0,
    "hang_timeout_s": 5.0,
    "outage_wait": 3.0,
    "drain_timeout": 4.0,
}
"""Each live setting with another value than that of `FLAGS`."""


def test_every_live_setting_changes_and_nothing_else_does() -> None:
    assert NEW.keys() == {one.name for one in LIVE}
    before = prepared()
    live = LiveSettings(before)
    assert live.message is None
    settings = live.change(NEW, "somebody", 5.0)
    assert settings is not None and settings == live.message and settings.number == 1
    told = {one.name: one for one in settings.history}
    assert told.keys() == NEW.keys()
    for name, one in told.items():
        assert (one.who, one.at, one.new) == ("somebody", 5.0, value(live, name))
        assert one.old == value_of(before.engine, before.http, name) != one.new
    assert value(live, "max_queued_tokens") == 1 << 20 and value(live, "max_num_seqs") == 2
    assert value(live, "latency_classes") == {"chat": {"ttft_ms": 50.0, "itl_ms": None, "weight": 1.0, "share": 1.0}}
    assert settings.http is not None
    assert [(key.requests_per_minute, key.tokens_per_minute) for key in settings.http.api_keys] == [(7, 700)] * 2
    same = {one.name: getattr(before.engine, one.name) for one in LIVE if one.section == "engine"}
    assert msgspec.structs.replace(settings.engine, **same) == before.engine
    assert settings.http.listen == before.http.listen and settings.http.admin_keys == before.http.admin_keys
    # Back again, in two changes. What is so already is no change.
    back = {name: value_of(before.engine, before.http, name) for name in NEW}
    parts = ({"scheduling_policy": back.pop("scheduling_policy")}, back)
    assert all(live.change(part, "x", 6.0) is not None and live.change(part, "x", 7.0) is None for part in parts)
    assert live.now.engine == before.engine and live.now.http == before.http


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_num_seqs": 9}, "max_num_seqs 9 is more than the 8 for which memory was reserved"),
        ({"max_num_batched_tokens": 129}, "max_num_batched_tokens 129 is more than the 128"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens 512 is more than the 128"),
        ({"speculative": "ngram,tokens=4"}, "the start was given --speculative ngram,tokens=3; more needs a restart"),
        ({"speculative": "magic"}, "write ngram"),
        ({"kv_connector": ["host,size=8M"]}, "more needs a restart"),
        ({"kv_connector": []}, "kv_connector needs a restart, but for the size of host and disk"),
        ({"kv_connector": ["host,size=much"]}, "is not a number or a size"),
        ({"scheduling_policy": "slo"}, "give --latency-classes"),
        ({"scheduling_policy": "best"}, "scheduling_policy"),
        ({"max_num_seqs": "4"}, "Expected `int`, got `str`.*max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"latency_classes": {"chat": {"ttft": 3}}}, "ttft"),
        ({"dtype": "float32"}, r"needs a restart or a reload of the model \(POST /admin/models\)"),
        ({"port": 1}, "port cannot change while the server runs: it needs a restart"),
        ({"max_num_seq": 4}, "There is no setting 'max_num_seq'; is it max_num_seqs?"),
        ({"allowed_origins": ["x"]}, "is not an origin"),
    ],
)
def test_one_wrong_setting_leaves_all_as_they_are(changes: dict[str, object], sentence: str) -> None:
    live = LiveSettings(prepared())
    before = live.now
    with pytest.raises(ConfigError, match=sentence):
        live.change({"itl_target_ms": 5.0, **changes}, "x", 0.0)
    assert live.now == before and live.message is None


def test_what_a_key_may_use_stays_a_latency_class() -> None:
    keys = (ApiKey("k", latency_classes=("chat",)),)
    start = prepared(latency_classes={"chat": {"ttft_ms": 5}}, scheduling_policy="slo", api_key=())
    assert start.said is not None
    live = LiveSettings(msgspec.structs.replace(start, said=msgspec.structs.replace(start.said, keys=keys)))
    with pytest.raises(ConfigError, match="'chat' is none of --latency-classes"):
        live.change({"latency_classes": {"talk": {"ttft_ms": 5}}}, "x", 0.0)


def test_leases_of_several_machines_keep_their_limit() -> None:
    live = LiveSettings(prepared(nnodes=2, pipeline_parallel_size=2, speculative=None, kv_connector=()))
    with pytest.raises(ConfigError, match="hang_timeout_s needs a restart on several machines"):
        live.change({"hang_timeout_s": 3.0}, "x", 0.0)
    assert live.change({"drain_timeout": 3.0}, "x", 0.0) is not None


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_settings, "MAX_HISTORY", 3)
    live = LiveSettings(prepared())
    for i in range(1, 6):
        live.change({"max_queued_requests": i}, "x", float(i))
    assert [one.new for one in live.history] == [3, 4, 5]


def test_files_that_are_read_again_change_what_they_say_differently() -> None:
    start = prepared()
    assert start.said is not None
    live = LiveSettings(start)
    live.change({"max_queued_requests": 7, "max_num_seqs": 4}, "admin", 1.0)
    config = from_options("test", {"max_queued_requests": 70, "port": 1, "drain_timeout": 2.0}, base=start.said.config)
    found, others = live.read_again(config, (ApiKey("c", requests_per_minute=1),), (), "SIGHUP", 2.0)
    assert found is not None and others == ["port"]
    assert [(one.name, one.new) for one in found.history[2:]] == [
        ("max_queued_requests", 70),
        ("drain_timeout", 2.0),
        ("api_keys", "3 keys"),
    ]
    assert value(live, "max_num_seqs") == 4, "the file says of it what it said before"
    assert found.http is not None and found.http.api_keys[2] == ApiKey("c", requests_per_minute=1)
    assert live.read_again(config, (ApiKey("c", requests_per_minute=1),), (), "SIGHUP", 3.0) == (None, [])
    with pytest.raises(ConfigError, match="more than the 8"):
        live.read_again(from_options("test", {"max_num_seqs": 9}, base=config), (), (), "SIGHUP", 4.0)
    assert len(live.now.http.api_keys) == 3, "nothing was changed"


def answer(live: LiveSettings, **changes: object) -> tuple[Swapped, list[Settings]]:
    told: list[Settings] = []

    async def apply(settings: Settings) -> None:
        told.append(settings)

    return asyncio.run(live.answer(Change("api", 3, msgspec.json.encode(changes), "x"), apply)), told


def test_an_answer_says_what_was_wrong() -> None:
    live = LiveSettings(prepared())
    said, told = answer(live, max_num_seqs=2)
    assert said == Swapped(3, 200, "") and [settings.number for settings in told] == [1]
    said, told = answer(live, max_num_seqs=2)
    assert (said.status, told) == (200, [])
    said, told = answer(live, max_num_seqs=20)
    assert said.status == 400 and told == []
    live.hindrance = "Later."
    assert answer(live, max_num_seqs=3) == (Swapped(3, 409, "Later."), [])
    unsaid = LiveSettings(msgspec.structs.replace(prepared(), said=None))
    assert answer(unsaid, max_num_seqs=3)[0].status == 400


@pytest.fixture
def file(tmp_path: Path) -> Callable[[], SettingsFile]:
    return lambda: SettingsFile(str(tmp_path / "state"))


def test_later_servers_have_what_was_changed_unless_their_flags_are_others(file: Callable[[], SettingsFile]) -> None:
    live = LiveSettings(prepared(), file=file())
    assert asyncio.run(live.restore()) == []
    assert answer(live, max_num_seqs=2, latency_classes={"chat": {"ttft_ms": 5}}, drain_timeout=1.0)[0].detail == ""
    assert answer(live, drain_timeout=60.0)[0].status == 200  # as the flags say
    assert live.message is not None and set(live.message.kept) == {"max_num_seqs", "latency_classes"}
    later = LiveSettings(prepared(), file=file())
    (line,) = asyncio.run(later.restore())
    assert "max_num_seqs = 2" in line and "latency_classes" in line
    assert later.now.engine == live.now.engine and later.history == live.history
    other = LiveSettings(prepared(max_num_seqs=6), file=file())
    said, line = asyncio.run(other.restore())
    assert said == "--max-num-seqs is another one than when max_num_seqs was changed, and holds now"
    assert value(other, "max_num_seqs") == 6 and value(other, "latency_classes") is not None
    refused = LiveSettings(prepared(api_key=(), admin_api_key=()), file=file())
    assert asyncio.run(refused.restore()) and value(refused, "max_num_seqs") == 2


def test_a_kept_change_that_cannot_be_any_more_is_told(file: Callable[[], SettingsFile]) -> None:
    live = LiveSettings(prepared(), file=file())
    answer(live, scheduling_policy="slo", latency_classes={"chat": {"ttft_ms": 5}})
    later = LiveSettings(prepared(latency_classes={"talk": {}}), file=file())
    lines = asyncio.run(later.restore())
    assert [line.partition(":")[0] for line in lines] == [
        "--latency-classes is another one than when latency_classes was changed, and holds now",
        "settings that were changed before hold again",
    ]
    later = LiveSettings(prepared(scheduling_policy="fair"), file=file())
    assert len(asyncio.run(later.restore())) == 2


def test_a_state_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"no database, but a text that is long enough to have a header" * 100)
    live = LiveSettings(prepared(), file=SettingsFile(str(tmp_path / "state")))
    (line,) = asyncio.run(live.restore())
    assert "damaged" in line
    said, told = answer(live, max_num_seqs=2)
    assert said.status == 200 and "later servers will not have it" in said.detail and len(told) == 1


def test_an_engine_that_takes_over_knows_the_history() -> None:
    live = LiveSettings(prepared())
    live.change({"max_num_seqs": 4}, "x", 1.0)
    later = live.after(live.now)
    assert later.history == live.history and later.message is not None
    with pytest.raises(ConfigError, match="more than the 4"):
        later.change({"max_num_seqs": 5}, "x", 2.0)


def test_what_a_model_is_loaded_with_is_no_change_to_keep(file: Callable[[], SettingsFile]) -> None:
    live = LiveSettings(prepared(), file=file())
    live.change({"drain_timeout": 4.0}, "x", 1.0)
    later = live.after(prepared(drain_timeout=4.0, max_num_seqs=3))
    assert later.message is not None and later.message.kept == ("drain_timeout",)

"""Several models: what is refused before anything is loaded. `tests/e2e/test_models.py` runs them."""

from pathlib import Path

import pytest

from pagewire.config.flags import make_config
from pagewire.engine.runner.needs import Need
from pagewire.errors import ConfigError
from pagewire.procs import models
from pagewire.procs.models import PROCESSES_BYTES, prepare_models
from pagewire.procs.prepare import prepare, prepare_server


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"nnodes": 2}, "--nnodes"),
        ({"enable_model_swap": True}, "--enable-model-swap"),
        ({"kv_connector": ("disk:/x",)}, "--kv-connector disk or p2p"),
        ({"kv_events": "tcp://127.0.0.1:5557"}, "--kv-events"),
        ({"record_trace": "x"}, "--record-trace"),
        ({"client_address": "ipc://x"}, "--client-address"),
    ],
)
def test_what_only_one_model_can_have_is_refused(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} is for a server of one model"):
        prepare_models(make_config(models=("demo", "demo-hybrid"), **settings), prepare_server)


def test_every_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as raised:
        prepare_models(make_config(models=(str(tmp_path), "demo")), prepare_server)
    assert all(f"--models {tmp_path / name}: " in str(raised.value) for name in ("a", "b"))
    with pytest.raises(ConfigError, match=r"is called .* as well; give one of them a served_model_name"):
        prepare_models(make_config(models=("demo", "demo")), prepare_server)


def test_a_model_that_never_fits_is_refused_and_the_kv_cache_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need(weights=100 << 20, workspace=50 << 20, kv_cache=64 << 20)
    monkeypatch.setattr(models, "_needs", lambda engines: [need for _ in engines])
    total = PROCESSES_BYTES + (214 << 20)
    server, (first, second), budget = prepare_models(
        make_config(models=("demo", "demo-hybrid"), models_memory=total), prepare_server
    )
    assert budget == first.terms.need_bytes == total and second.engine.engine_number == 1
    assert first.engine.kv_cache_memory == 64 << 20 and first.engine.is_one_of_models
    assert server.engine.served_model_names == first.engine.served_model_names
    with pytest.raises(ConfigError, match="raise --models-memory"):
        prepare_models(make_config(models=("demo", "demo-hybrid"), models_memory=total - 1), prepare_server)
    monkeypatch.setattr(models, "_needs", lambda engines: [Need(problem="It is odd.") for _ in engines])
    with pytest.raises(ConfigError, match=r"--models demo: It is odd\. --models demo-hybrid: It is odd\."):
        prepare_models(make_config(models=("demo", "demo-hybrid")), prepare_server)


def test_other_commands_take_one_model() -> None:
    with pytest.raises(ConfigError, match="Several models are for `pagewire serve`"):
        prepare(make_config(models=("a", "b")))

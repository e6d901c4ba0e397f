"""Several models: what is refused before anything is loaded. `tests/e2e/test_models.py` runs them."""

from pathlib import Path

import msgspec
import pytest

from pagewire.config.flags import make_config
from pagewire.config.machine import OVERRIDES
from pagewire.engine.runner.needs import Need, Question, need
from pagewire.errors import ConfigError
from pagewire.procs import models
from pagewire.procs.environment import environment_of
from pagewire.procs.models import GPU_BYTES, GPU_WORKER_BYTES, PROCESSES_BYTES, ServedModel, prepare_models
from pagewire.procs.prepare import prepare, prepare_server
from pagewire.procs.template import can_fork


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"nnodes": 2}, "--nnodes"),
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
    server, (first, second), budgets = prepare_models(
        make_config(models=("demo", "demo-hybrid"), models_memory=total), prepare_server
    )
    assert budgets == first.terms.needs == (total,) and second.engines[0].engine_number == 1
    (engine,) = first.engines
    assert engine.kv_cache_memory == 64 << 20 and engine.number_in_model == 0
    assert server.engine.served_model_names == engine.served_model_names
    with pytest.raises(ConfigError, match="raise --models-memory"):
        prepare_models(make_config(models=("demo", "demo-hybrid"), models_memory=total - 1), prepare_server)
    monkeypatch.setattr(models, "_needs", lambda engines: [Need(problem="It is odd.") for _ in engines])
    with pytest.raises(ConfigError, match=r"--models demo: It is odd\. --models demo-hybrid: It is odd\."):
        prepare_models(make_config(models=("demo", "demo-hybrid")), prepare_server)


def make_file(folder: Path, *models: str) -> tuple[str, ...]:
    """The value of --models for a file with a table of each of these settings."""
    file = folder / "models.toml"
    file.write_text("".join(f"[[models]]\n{settings}\n" for settings in models))
    return (str(file),)


GPUS = [{"name": f"GPU-{i}", "total_bytes": 24 << 30, "free_bytes": 20 << 30} for i in range(2)]
NEED = Need(weights=1 << 30, workspace=512 << 20, kv_cache=512 << 20)


def with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: object = GPUS) -> None:
    facts = {"has_gpu": True, "gpu_capability": 90, "gpus": gpus}
    monkeypatch.setenv(OVERRIDES, msgspec.json.encode(facts).decode())


def test_models_on_gpus_are_planned_with_the_gpus_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real plan, in a process that opens no GPU. A model may take its share of a GPU, and all that is free by
    default; one of them computes on the host."""
    with_gpus(monkeypatch)
    found = make_file(
        tmp_path,
        'model = "demo"\npinned = true\ngpu_memory_utilization = 0.25\nmax_num_seqs = 65536\nmax_model_len = 64',
        'model = "demo"\nserved_model_name = "whole"\nmax_num_seqs = 65536\ndata_parallel_size = 2',
        'model = "demo"\nserved_model_name = "host"\ndevice = "cpu"\nkv_cache_memory = "32M"',
    )
    with pytest.raises(ConfigError, match=r"model 2: it takes .* of a GPU, and what is pinned leaves less"):
        prepare_models(make_config(models=found, gpu_memory_utilization=0.5), prepare_server)
    Path(found[0]).write_text(Path(found[0]).read_text().replace("pinned = true\n", ""))
    server, (quarter, whole, host), budgets = prepare_models(
        make_config(models=found, gpu_memory_utilization=0.5), prepare_server
    )
    assert budgets[1:] == (12 << 30, 12 << 30), "a half, and not all that is free"
    assert (5 << 30) < sum(quarter.terms.needs[1:]) <= (6 << 30) + (1 << 20)
    assert all((11 << 30) < need <= (12 << 30) for need in whole.terms.needs[1:])
    assert host.terms.needs[1:] == (0, 0) and host.terms.needs[0] > PROCESSES_BYTES and host.engines[0].gpu_ids == ()
    assert [engine.gpu_ids for engine in whole.engines] == [("GPU-0",), ("GPU-1",)]
    assert whole.gpu_needs == {"GPU-0": whole.terms.needs[1], "GPU-1": whole.terms.needs[2]}
    assert quarter.terms.needs[0] == PROCESSES_BYTES + GPU_WORKER_BYTES and server.engine.kernels is None
    assert whole.engines[0].kv_cache_memory == sum(whole.terms.needs[1:]) // 2 - GPU_BYTES - _rest(whole)
    environment = environment_of("worker", whole.engines[1], ranks_are_here=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1" and not can_fork(whole.engines[1])


def _rest(model: ServedModel) -> int:
    """Its weights and workspace, by the same plan."""
    found = need(Question(model.engines[0], 12 << 30, 90))
    return found.weights + found.workspace


def test_gpus_are_dealt_and_too_few_or_unknown_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    monkeypatch.setattr(models, "_needs", lambda asked: [NEED for _ in asked])
    _, found, _ = prepare_models(make_config(models=("demo", "demo-hybrid")), prepare_server)
    assert [model.engines[0].gpu_ids for model in found] == [("GPU-0",), ("GPU-1",)]
    assert found[1].terms.needs == (PROCESSES_BYTES + GPU_WORKER_BYTES, 0, (2 << 30) + GPU_BYTES)
    with pytest.raises(
        ConfigError, match=r"--models demo: it needs 3 GPUs, and there are 2\. --models demo-hybrid: it"
    ):
        prepare_models(make_config(models=("demo", "demo-hybrid"), data_parallel_size=3), prepare_server)
    with_gpus(monkeypatch, [])
    with pytest.raises(ConfigError, match="need to know how much memory these have"):
        prepare_models(make_config(models=("demo", "demo-hybrid")), prepare_server)
    _, found, budgets = prepare_models(make_config(models=("demo", "demo-hybrid"), device="cpu"), prepare_server)
    assert len(budgets) == len(found[0].terms.needs) == 1


def test_a_model_may_have_several_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share weights where the C kernels compute, and nothing else."""
    monkeypatch.setattr(models, "_needs", lambda asked: [NEED for _ in asked])
    two = make_file(tmp_path, 'model = "demo"\ndata_parallel_size = 2', 'model = "demo-hybrid"')
    _, (first, second), _ = prepare_models(make_config(models=two, models_memory=1 << 40), prepare_server)
    numbers = [(engine.engine_number, engine.number_in_model) for engine in (*first.engines, *second.engines)]
    assert numbers == [(0, 0), (1, 1), (2, 0)]
    copies = 1 if first.engines[0].runs_in_c else 2
    assert first.terms.needs == (copies * NEED.weights + 2 * (NEED.workspace + NEED.kv_cache + PROCESSES_BYTES),)
    many = make_file(tmp_path, *[f'model = "demo"\nserved_model_name = "{i}"' for i in range(5)])
    with pytest.raises(ConfigError, match="the models have 320 engines together; 255 are possible"):
        prepare_models(make_config(models=many, data_parallel_size=64), prepare_server)
    for spec in ("disk,path=/x,size=1G", "p2p,peer=/x"):
        with pytest.raises(ConfigError, match=r"is for a single engine; leave it or --data-parallel-size out"):
            prepare_models(
                make_config(models=("demo", "demo-hybrid"), data_parallel_size=2, kv_connector=(spec,)), prepare_server
            )


def test_what_only_one_model_can_have_is_refused_in_the_file_as_well(tmp_path: Path) -> None:
    found = make_file(tmp_path, 'model = "demo"', 'model = "demo-hybrid"\nrecord_trace = "x"')
    with pytest.raises(ConfigError, match=r"model 2: --record-trace is for a server of one model; leave it out\.$"):
        prepare_models(make_config(models=found), prepare_server)


def test_tiers_are_kept_apart_and_their_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_needs", lambda asked: [NEED for _ in asked])
    found = make_file(
        tmp_path,
        'model = "demo"\nserved_model_name = "a/b"',
        'model = "demo-hybrid"\nserved_model_name = "."\nkv_connector = ["p2p,serve=/tmp/two,size=3G"]',
    )
    tiers = ("host,size=2G", f"disk,path={tmp_path}/kv,size=1G")
    _, (first, second), _ = prepare_models(
        make_config(models=found, kv_connector=tiers, models_memory=1 << 40), prepare_server
    )
    assert first.engines[0].kv_connector == (tiers[0], f"disk,path={tmp_path}/kv/a%2Fb,size=1G")
    assert (
        first.terms.need_bytes == (4 << 30) + PROCESSES_BYTES and second.terms.need_bytes == (5 << 30) + PROCESSES_BYTES
    )
    alike = ("p2p,serve=/tmp/kv,size=1G",)
    with pytest.raises(ConfigError, match=r"demo serves its KV at '/tmp/kv' as well; give one of them a kv_connector"):
        prepare_models(make_config(models=("demo", "demo-hybrid"), kv_connector=alike), prepare_server)
    asks = ("p2p,peer=/tmp/kv",)
    prepare_models(
        make_config(models=("demo", "demo-hybrid"), kv_connector=asks, models_memory=1 << 40), prepare_server
    )


def test_other_commands_take_one_model() -> None:
    with pytest.raises(ConfigError, match="Several models are for `pagewire serve`"):
        prepare(make_config(models=("a", "b")))

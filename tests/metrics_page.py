"""The /metrics page of a server that reports every metric."""

from harness import CONFIG
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.metrics import GPU_METRICS, Metrics
from pagewire.api.gateway.residence import Residence
from pagewire.config.latency_classes import LatencyClass
from pagewire.ipc.messages import (
    GroupSnapshot,
    ProcessUsage,
    Pulse,
    Snapshot,
    StageSeconds,
    StageSnapshot,
    TierSnapshot,
    WorkerSnapshot,
    WorkerUsage,
)
from pagewire.ipc.reports import SECONDS, Histogram

MODEL = 'my "model"\\1'


def page(prefix: str = "pagewire", *, num_engines: int = 1) -> str:
    """The page as text."""
    gateway = Gateway(*[lambda message: None] * num_engines, latency_classes={"chat": LatencyClass(500, 50)})
    lag = Histogram(SECONDS)
    for value in (0.0, 0.0003, 0.5, 99.0):
        lag.observe(value)
    tier = TierSnapshot("host", 10, 64, 320, 40, 30, 0)
    core = Snapshot(9, 3, 2, 100, 25, 1, 700, 30, 44, 0.5, (tier,), histograms={"step_time_seconds": lag.report()})
    groups = GroupSnapshot("full", 5, 6, 70, 0), GroupSnapshot("none", 0, 0, 4, 0)
    core = replace(
        core,
        groups=groups,
        failed_kernels=("rms_norm",),
        stages=(StageSnapshot(StageSeconds(4.0, 2.0, 1.0, 0.5), 3.0),),
    )
    core = replace(core, expert_tokens=(40, 20), rank_sent_bytes=(7000, 6000), expert_imbalance={0: 1.5, 2: 1.25})
    process = ProcessUsage(12.5, 4, 300 << 20, 40 << 20, 900 << 20)
    worker = WorkerUsage(0, process, {}, 20e9, "measured", {name: 7.0 + i for i, name in enumerate(GPU_METRICS)}, 9)
    memory = {"weights": 900 << 20, "workspace": 70 << 20, "kv_used": 25_000, "kv_cached": 5000, "kv_free": 70_000}
    other = WorkerSnapshot(replace(worker, rank=1, bandwidth=0.0, bandwidth_source="", gpu={}), memory, 5 * 10**9)
    core = replace(core, workers=(WorkerSnapshot(worker, memory, 6 * 10**9, 0.75), other))
    gateway.handle([core, Pulse("api", lag.report()), Pulse("core", lag.report(), usage=ProcessUsage(2.5, 3, 5, 6, 0))])
    gateway.late_beats = {"node-2": 1}
    config = replace(CONFIG, served_model_names=(MODEL,), model=replace(CONFIG.model, adapter="lora"))
    residence = Residence(lambda is_open, keep_alive_s: None)
    return Metrics(gateway, config, prefix=prefix, residence=residence).render().decode()


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}

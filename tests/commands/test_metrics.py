"""Readings of /metrics, their differences, and the screen of `top`."""

import io
import math

import pytest
from msgspec.structs import replace
from rich.console import Console

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.metrics import Metrics
from pagewire.commands.metrics import Reading, cpus_used, quantile, rate, read, stage_shares
from pagewire.commands.top import Screen, curve, duration, gpu_line, stage_bar
from pagewire.config.config import Config, MachineFacts, ModelFacts
from pagewire.config.latency_classes import LatencyClass
from pagewire.config.resolve import resolve
from pagewire.ipc.messages import ProcessUsage, Pulse, Reset, Snapshot, WorkerSnapshot, WorkerUsage
from pagewire.ipc.reports import SECONDS, Histogram

NO_SNAPSHOT = Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
NO_LAG = Histogram(SECONDS).report()
FACTS = ModelFacts(path="m", name="m", max_position=64, vocab_size=320, eos_token_ids=(2,), checkpoint_dtype="float32")


def page(latencies: list[float]) -> str:
    """The /metrics page of a pagewire server after these first-token latencies."""
    gateway = Gateway(lambda message: None)
    for value in latencies:
        gateway.stats.time_to_first_token_s.observe(value)
    gateway.stats.finished["stop"] = len(latencies)
    return Metrics(gateway, resolve(Config(), FACTS, MachineFacts(num_cores=1))).render().decode()


def test_a_page_of_pagewire_is_read() -> None:
    reading = read(page([0.03] * 4), 1.0)
    assert reading.get("request_success_total") == 4
    assert reading.by_label["request_success_total/finished_reason"]["stop"] == 4
    assert reading.buckets["time_to_first_token_seconds"][math.inf] == 4
    assert reading.get("nothing_of_the_kind") == 0


def test_vllm_names_are_read_and_models_are_added_up() -> None:
    text = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="a",engine="0"} 2\n'
    text += 'vllm:num_requests_running{model_name="b",engine="1"} 3\n'
    assert read(text, 0.0).get("num_requests_running") == 5


def test_shares_of_engines_are_averaged_and_the_screen_says_which_are_down() -> None:
    gateway = Gateway(*[lambda message: None] * 3)
    gateway.handle(
        [Snapshot(0, 2, 0, 100, used, 0, 0, 0, 0, 0.0, engine=number) for number, used in enumerate((90, 0))]
    )
    gateway.handle([Reset(2, 1, ("core",), "It died.", 2)])
    text = Metrics(gateway, resolve(Config(), FACTS, MachineFacts(num_cores=1))).render().decode()
    reading = read(text, 0.0)
    assert reading.get("num_requests_running") == 4 and reading.mean("kv_cache_usage_perc") == pytest.approx(0.3)
    screen, shown = Screen("http://x", "m"), io.StringIO()
    screen.add(reading)
    Console(file=shown, width=100).print(screen.render())
    assert "of 3; not 2" in shown.getvalue() and "30.0 %" in shown.getvalue()


def test_the_screen_says_how_often_each_latency_class_had_its_tokens_in_time() -> None:
    gateway = Gateway(lambda message: None, latency_classes={"chat": LatencyClass(500, 50), "batch": LatencyClass(900)})
    chat = gateway.stats.attainment["chat"]

    def reading(at: float) -> Reading:
        return read(Metrics(gateway, resolve(Config(), FACTS, MachineFacts(num_cores=1))).render().decode(), at)

    screen, shown = Screen("http://x", "m"), io.StringIO()
    chat.ttft.observe(0.6)  # before the window
    screen.add(reading(0.0))
    for seconds in (0.01, 0.02, 0.06, 0.04):
        chat.itl.observe(seconds)
    screen.add(reading(1.0))
    Console(file=shown, width=100).print(screen.render())
    lines = [line.split() for line in shown.getvalue().splitlines() if " class " in line]
    assert [line[2:4] for line in lines] == [["chat", "75.0"], ["batch", "idle"]]


def worker(cpu_s: float, gpu: dict[str, float]) -> WorkerSnapshot:
    usage = WorkerUsage(0, ProcessUsage(cpu_s, 4, 5, 6, 7), {}, 20e9, "measured", gpu)
    memory = {"weights": 3 << 20, "kv_used": 1 << 20, "kv_free": 2 << 30, "kv_cached": 0}
    return WorkerSnapshot(usage, memory, 10, 0.5)


def test_the_screen_says_what_the_machine_does() -> None:
    gateway = Gateway(lambda message: None, lambda message: None)
    screen, shown = Screen("http://x", "m"), io.StringIO()
    gpu = {
        "gpu_utilization_ratio": 0.83, "gpu_power_watts": 250.6, "gpu_power_limit_watts": 300.0,
        "gpu_temperature_celsius": 64.0, "gpu_memory_used_bytes": 3.0 * (1 << 30), "gpu_sm_clock_hertz": 1.41e9,
        "gpu_is_slowed": 1.0, "gpu_ecc_uncorrected_errors_total": 0.0, "gpu_xid_errors_total": 2.0,
    }  # fmt: skip
    for at, cpu_s in ((0.0, 10.0), (2.0, 13.0)):
        own = replace(NO_SNAPSHOT, workers=(worker(cpu_s, gpu),))
        gateway.handle([own, replace(own, workers=(worker(cpu_s, {}),), engine=1)])
        usage = ProcessUsage(at / 8, 3, 5, 6, 0)
        gateway.handle([Pulse("core", NO_LAG, usage=usage), Pulse("api", NO_LAG)])
        screen.add(read(Metrics(gateway, resolve(Config(), FACTS, MachineFacts(num_cores=1))).render().decode(), at))
    Console(file=shown, width=140).print(screen.render())
    text = {line[2:21].strip(): line[21:].strip("│ ") for line in shown.getvalue().splitlines()}
    assert text["memory"].split("  ")[-1] == "weights 6.0 MB, KV in use 2.0 MB, KV free 4.0 GB", "of both engines"
    assert text["CPUs used"].split() == ["3.12", "worker", "3.00,", "core", "0.12"]
    assert text["roof of the memory"].split()[0] == "50" and "20.0 GB/s, measured" in text["roof of the memory"]
    assert text["GPU 0/0"] == "83 %  251 of 300 W, 64 °C, 3.0 GB, 1410 MHz, slowed, 2 errors"
    assert "GPU 1/0" not in text
    assert gpu_line({}) == "" and gpu_line({"gpu_power_watts": 30.0}) == "30 W"


def test_a_process_that_is_new_has_used_nothing_yet() -> None:
    old, new = (Reading(at, by_label={"process_cpu_seconds_total/process": {"core": 2.0}}) for at in (0.0, 1.0))
    new.by_label["process_cpu_seconds_total/process"] = {"core": 1.5, "worker": 9.0}
    assert cpus_used(old, new) == {"core": 0.0}, "a process that was replaced counts from zero"
    assert cpus_used(new, new) == {}


def test_quantiles_are_those_of_the_new_samples() -> None:
    before, now = read(page([9.0] * 100), 0.0), read(page([9.0] * 100 + [0.03] * 10), 1.0)
    median = quantile(before, now, "time_to_first_token_seconds", 0.5)
    assert median is not None and 0.02 < median <= 0.04
    assert quantile(now, now, "time_to_first_token_seconds", 0.5) is None
    assert quantile(before, now, "no_such_histogram", 0.5) is None


@pytest.mark.parametrize("q", [0.01, 0.5, 0.95, 0.99, 1.0])
def test_quantiles_lie_in_the_bucket_of_the_sample(q: float) -> None:
    values = [0.001 * 1.05**i for i in range(200)]
    found = quantile(read(page([]), 0.0), read(page(values), 1.0), "time_to_first_token_seconds", q)
    wanted = values[max(0, math.ceil(q * len(values)) - 1)]
    bounds = sorted(read(page([]), 0.0).buckets["time_to_first_token_seconds"])
    low = max([0.0, *(bound for bound in bounds if bound < wanted)])
    high = min(bound for bound in bounds if bound >= wanted)
    assert found is not None and low <= found <= high


def test_a_restarted_server_counts_from_zero() -> None:
    before, now = read(page([1.0] * 9), 0.0), read(page([1.0] * 4), 2.0)
    assert rate(before, now, "request_success_total") == 2.0
    assert rate(now, now, "request_success_total") == 0.0
    assert rate(read(page([]), 0.0), now, "request_success_total") == 2.0


def test_the_screen_fits_a_narrow_terminal_and_shows_trouble() -> None:
    screen = Screen("http://127.0.0.1:8000", "m")
    screen.add(read(page([]), 0.0))
    screen.add(read(page([0.03] * 3), 1.0))
    screen.trouble = "No server answers."
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    console.print(screen.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "No server answers." in text and "+3" in text and max(map(len, text.splitlines())) <= 60


def test_curves_and_durations() -> None:
    assert curve([0, 1, 2]) == " ▄█" and curve([]) == "" and curve([0.0]) == " "
    assert [duration(s) for s in (None, 0.00123, 0.34, 2.5)] == ["-", "1.2 ms", "340 ms", "2.5 s"]


def stages_page(*states: tuple[float, float, float, float, float], bubbles: float = 0.25) -> str:
    """Of a pipeline: the seconds of each stage that it was busy, and waited for a plan, input, ids, and with output."""
    lines = ["# TYPE pagewire:stage_seconds_total counter", "# TYPE pagewire:pipeline_bubble_ratio gauge"]
    for stage, seconds in enumerate(states):
        for state, value in zip(("busy", "plan", "input", "ids", "output"), seconds, strict=True):
            lines.append(f'pagewire:stage_seconds_total{{model_name="m",stage="{stage}",state="{state}"}} {value}')
    return "\n".join([*lines, f'pagewire:pipeline_bubble_ratio{{model_name="m"}} {bubbles}', ""])


def test_the_screen_has_a_bar_for_each_stage() -> None:
    before = read(stages_page((4, 4, 4, 4, 4), (9, 9, 9, 9, 9)), 0.0)
    now = read(stages_page((12, 5, 8, 6, 5), (9, 9, 9, 9, 9)), 5.0)
    shares = stage_shares(before, now)
    assert shares == {"0": {"busy": 0.5, "plan": 0.0625, "input": 0.25, "ids": 0.125, "output": 0.0625}, "1": {}}
    assert stage_bar(shares["0"], 16) == "████████▒▒▒▒░░╌·" and stage_bar({}) == ""
    assert stage_bar({"busy": 0.334, "input": 0.333, "ids": 0.333, "plan": 0.0}, 40).count("░") == 13
    screen = Screen("http://localhost", "m")
    screen.add(before)
    screen.add(now)
    console = Console(file=io.StringIO(), width=100)
    console.print(screen.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "stage 0 busy" in text and "50 %" in text and "idle" in text and "bubbles" in text and "25 %" in text


def test_the_screen_of_an_engine_without_stages_shows_none() -> None:
    screen = Screen("http://localhost", "m")
    screen.add(read(page([]), 0.0))
    console = Console(file=io.StringIO(), width=100)
    console.print(screen.render())
    assert "bubbles" not in console.file.getvalue()  # type: ignore[attr-defined]

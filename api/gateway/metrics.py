"""/metrics: the gateway's counts, the core's last snapshot and each process's last pulse in Prometheus' text format.

Names follow vLLM's where it has such a metric; `--metrics-prefix vllm` gives them its prefix. `tools/reference.py`
makes the reference from these help texts. The page is rendered here because the library takes 4 ms and more for its 600
lines, and holds up every stream of the process for that long (`bench/serve/metrics.py`).
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from msgspec.structs import asdict

from ...config.config import EngineConfig
from ...ipc.epochs import NO_ENGINE
from ...ipc.messages import ProcessUsage, Snapshot
from ...ipc.reports import POWERS, SECONDS, Histogram, HistogramCounts
from .gateway import Gateway
from .residence import Residence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEP_HISTOGRAMS = {
    "step_time_seconds": ("The worker's pass over the rows of a step.", SECONDS),
    "step_wait_time_seconds": (
        "The rest of a step's time while it was the oldest in flight: messages, the worker's own Python.",
        SECONDS,
    ),
    "step_mask_wait_time_seconds": (
        "How long a step waited for masks of constrained requests after its pass. Only steps with late masks count.",
        SECONDS,
    ),
    "step_host_time_seconds": (
        "The core's time to apply a step, plan the next one and send the results; the device works meanwhile.",
        SECONDS,
    ),
    "step_decode_rows": ("Rows of a step that compute one position.", POWERS),
    "step_prompt_tokens": (
        "Other positions of a step: of prompts, and those that are computed again after a preemption.",
        POWERS,
    ),
    "iteration_tokens_total": ("Positions of a step, without those of draft tokens.", POWERS),
}
OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries_total": "gpu_prefix_cache_queries_total",
    "prefix_cache_hits_total": "gpu_prefix_cache_hits_total",
    "prefix_cache_hit_rate": "gpu_prefix_cache_hit_rate",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
"""Names that vLLM had for a metric before, which AIBrix and production-stack still read: `--metrics-prefix vllm` shows
the metric under both. docs/metrics.md has this table."""

_ONLY_OLD = {"prefix_cache_hit_rate"}  # shown under the old name alone: a counter and another say the same
GPU_METRICS = {
    "gpu_utilization_ratio": "Share of the last sampling period of NVML in which a kernel ran on the GPU.",
    "gpu_memory_utilization_ratio": "Share of that period in which the GPU's memory was read or written.",
    "gpu_memory_used_bytes": "Memory of the GPU in use, by all processes.",
    "gpu_memory_total_bytes": "Memory of the GPU.",
    "gpu_power_watts": "Power that the GPU draws.",
    "gpu_power_limit_watts": "Power that the GPU may draw.",
    "gpu_temperature_celsius": "Temperature of the GPU.",
    "gpu_sm_clock_hertz": "Clock of the GPU's multiprocessors.",
    "gpu_memory_clock_hertz": "Clock of the GPU's memory.",
    "gpu_is_slowed": "1 while heat, a power brake or another fault slows the GPU's clocks.",
    "gpu_energy_joules_total": "Energy that the GPU has taken since the driver was loaded.",
    "gpu_ecc_corrected_errors_total": "Errors of the GPU's memory that were corrected, since the driver was loaded.",
    "gpu_ecc_uncorrected_errors_total": "Errors of the GPU's memory that could not be corrected, since then.",
    "gpu_xid_errors_total": "Critical errors (Xid) that the driver has reported since the worker's start.",
}
"""The names in `WorkerUsage.gpu`."""

_STATES = ("unloaded", "loading", "loaded", "leaving", "failed")
_NO_SNAPSHOT = Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)


class Metrics:
    """The metrics of one gateway."""

    def __init__(
        self, gateway: Gateway, config: EngineConfig, *, prefix: str = "pagewire", residence: Residence | None = None
    ) -> None:
        self._gateway = gateway
        self.config = config
        self._prefix = prefix
        self._residence = residence
        self._started = time.time()  # s since 1970

    def render(self, others: Sequence["Metrics"] = ()) -> bytes:
        """The whole page. `others`: of the other models behind the same port."""
        page = _Page(self._prefix)
        for metrics in (self, *others):
            metrics._write(page)
        return page.text()

    def _write(self, page: "_Page") -> None:
        page.begin(self.config.served_model_names[0])
        if self._residence is not None:
            states = [({"state": state}, int(state == self._residence.state.state)) for state in _STATES]
            page.family("gauge", "model_state", "1 for the state of one of several models.", states)
            text = "What the last load of a model took."
            page.gauge("model_load_seconds", text, self._residence.state.load_s)
        are_several = len(self._gateway.engines) > 1
        for engine in self._gateway.engines:
            core = engine.snapshot or _NO_SNAPSHOT
            page.engine = engine.number if are_several else None
            self._state(page, core)
            self._totals(page, core)
            self._groups(page, core)
            self._tiers(page, core)
            self._steps(page, core)
            self._stages(page, core)
            self._workers(page, core)
            if are_several:
                text = "Whether an engine gets new requests."
                page.gauge("engine_ready", text, int(engine.is_able))
                page.gauge("engine_open_requests", "Open requests of this api process at an engine.", engine.num_open)
                page.counter("engine_requests", "Requests sent to an engine.", engine.num_sent)
        page.engine = None
        text = "Sequences that are with a tokenizer, or in its queue."
        page.gauge("num_requests_tokenizing", text, self._gateway.num_unanswered)
        self._ends(page)
        self._processes(page, are_several=are_several)
        self._requests(page)
        self._attainment(page)

    def _state(self, page: "_Page", core: Snapshot) -> None:
        page.gauge("num_requests_running", "Sequences that hold a row of the batch.", core.num_running)
        page.gauge("num_requests_waiting", "Sequences in the queue of the core.", core.num_waiting)
        text = "The same by reason: capacity, or deferred while the engine is asleep."
        waits = {"capacity": not core.is_asleep, "deferred": core.is_asleep}
        reasons = [({"reason": reason}, core.num_waiting * is_so) for reason, is_so in waits.items()]
        page.family("gauge", "num_requests_waiting_by_reason", text, reasons)
        usage = core.num_blocks_used / (core.num_blocks or 1)
        page.gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.", usage)
        text = "How long the oldest step in flight has been out; 0 with none."
        page.gauge("engine_step_age_seconds", text, core.step_age_s)
        config = self.config
        facts = {
            "block_size": config.block_size,
            "num_gpu_blocks": core.num_blocks,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        page.family("gauge", "cache_config_info", "Always 1; the labels say how the KV cache was made.", [(facts, 1)])
        text = "Always 1; the kernels that failed their check at start, so that torch or slower kernels compute."
        failed = [({"kernel": kernel}, 1) for kernel in core.failed_kernels]
        page.family("gauge", "kernel_fallbacks", text, failed)
        text = "1 for the state that the engine is in: awake, or asleep with its memory freed (weights_offloaded)."
        asleep = {"awake": not core.is_asleep, "weights_offloaded": core.is_asleep, "discard_all": False}
        states = [({"sleep_state": state}, int(is_so)) for state, is_so in asleep.items()]
        page.family("gauge", "engine_sleep_state", text, states)
        if config.model.adapter:
            text = "When the LoRA adapters last changed (s since 1970): which are served, and which wait to be loaded."
            names = ",".join(config.served_model_names)
            adapters = {"max_lora": 1, "running_lora_adapters": names, "waiting_lora_adapters": ""}
            page.family("gauge", "lora_requests_info", text, [(adapters, self._started)])
        if core.expert_imbalance:
            text = (
                "Tokens of the rank whose experts had most of them, in relation to the mean rank's, in each layer over "
                "the last 1,000 steps; 1: all ranks had as many."
            )
            layers = [({"layer": str(layer)}, ratio) for layer, ratio in sorted(core.expert_imbalance.items())]
            page.family("gauge", "expert_imbalance", text, layers)

    def _totals(self, page: "_Page", core: Snapshot) -> None:
        page.counter("prompt_tokens", "Prompt tokens of sequences that were started.", core.num_prompt_tokens)
        page.counter("generation_tokens", "Tokens generated.", core.num_output_tokens)
        text = "Prompt tokens looked up in the device's prefix cache."
        page.counter("prefix_cache_queries", text, core.num_prompt_tokens)
        page.counter("prefix_cache_hits", "Prompt tokens found in the device's prefix cache.", core.num_cached_tokens)
        rate = core.num_cached_tokens / (core.num_prompt_tokens or 1)
        page.gauge("prefix_cache_hit_rate", "Share of all prompt tokens so far that the prefix cache had.", rate)
        page.counter("num_preemptions", "Sequences that gave their blocks back for a while.", core.num_preemptions)
        text = "Steps that the device had no memory for, and that were tried again in smaller pieces."
        page.counter("out_of_memory_steps", text, core.num_out_of_memory)
        text = "How often rows and blocks did not add up while idle, and were counted again: a bug, please report it."
        page.counter("kv_cache_repairs", text, core.num_mended)
        text = "Preemptions of constrained sequences whose masks took so long that the step went on without them."
        page.counter("mask_preemptions", text, core.num_taken_back)
        text = "Calls of the runner plugin that raised an error of its own; requests failed."
        page.counter("runner_plugin_failed_calls", text, core.num_failed_calls)
        text = "Calls of the runner plugin that took more than a second, while all requests waited."
        page.counter("runner_plugin_slow_calls", text, core.num_slow_calls)
        page.counter("spec_decode_num_drafts", "How often draft tokens were made for a sequence.", core.num_drafts)
        page.counter("spec_decode_num_draft_tokens", "Draft tokens.", core.num_draft_tokens)
        page.counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", core.num_accepted_tokens)
        if core.expert_tokens:
            page.counters(
                "expert_tokens",
                "Tokens that the experts of a rank computed, counted for each of a token's experts in each layer.",
                "rank",
                {str(rank): num for rank, num in enumerate(core.expert_tokens)},
            )
            page.counters(
                "rank_sent_bytes",
                "Bytes that other ranks read from a rank, each of them: sums, tokens, experts' results; 0 on GPUs.",
                "rank",
                {str(rank): num for rank, num in enumerate(core.rank_sent_bytes)},
            )
        page.counters(
            "prompt_tokens_cached_by_source",
            "Prompt tokens that were not computed, by the tier that had their KV.",
            "source",
            {"device": core.num_cached_tokens} | {tier.name: tier.num_hit_tokens for tier in core.tiers},
        )

    def _groups(self, page: "_Page", core: Snapshot) -> None:
        """By group of the cache, numbered from 0."""
        named = [({"group": str(i), "kind": group.kind}, group) for i, group in enumerate(core.groups)]
        own = [(labels, group) for labels, group in named if group.kind != "none"]
        pages = [({**labels, "state": "held"}, group.num_held) for labels, group in own]
        pages += [({**labels, "state": "idle"}, group.num_idle) for labels, group in own]
        text = "Memory pages of the KV cache: held by sequences, or idle and kept for others to find."
        page.family("gauge", "kv_group_pages", text, pages)
        limits = [({**labels, "group": "none"} if group.kind == "none" else labels, group) for labels, group in named]
        text = (
            "Tokens whose KV was found when a sequence was started or resumed, by the group of the cache that lacked "
            "what more would have needed; none: nothing more was looked for."
        )
        page.family(
            "counter", "prefix_cache_hits_by_limit_total", text, [(x, group.num_hit_tokens) for x, group in limits]
        )
        text = "Tokens behind these whose KV for full attention was found, but not what that group needs."
        page.family("counter", "prefix_cache_lost_total", text, [(x, group.num_lost_tokens) for x, group in limits])

    def _tiers(self, page: "_Page", core: Snapshot) -> None:
        """Nothing without a KV connector. Hits after a preemption count as well."""
        tiers = core.tiers
        if not tiers:
            return
        page.counter(
            "external_prefix_cache_queries",
            "Prompt tokens that the device's prefix cache did not have and the KV tiers were asked for.",
            max(0, core.num_prompt_tokens - core.num_cached_tokens),
        )

        def each(kind: str, name: str, text: str, values: Iterable[int]) -> None:
            samples = [({"tier": tier.name}, value) for tier, value in zip(tiers, values, strict=True)]
            page.family(kind, name, text, samples)

        each(
            "gauge",
            "kv_tier_blocks",
            "KV blocks that the tier holds; pages, if the cache has several groups.",
            (t.num_blocks for t in tiers),
        )
        text = "KV blocks or pages that the tier can hold; 0: no bound of its own."
        each("gauge", "kv_tier_capacity_blocks", text, (t.capacity for t in tiers))
        text = "Tokens whose KV was loaded from the tier, also after preemptions."
        each("counter", "external_prefix_cache_hits_total", text, (t.num_hit_tokens for t in tiers))
        each("counter", "kv_tier_stored_blocks_total", "KV blocks written to the tier.", (t.num_stored for t in tiers))
        text = "KV blocks that the tier dropped for others."
        each("counter", "kv_tier_evicted_blocks_total", text, (t.num_evicted for t in tiers))
        text = "KV blocks that could not be loaded from the tier."
        each("counter", "kv_tier_failed_blocks_total", text, (t.num_failed for t in tiers))
        text = "Bytes of KV that were loaded from the tier, on all ranks."
        each("counter", "kv_tier_loaded_bytes_total", text, (t.num_loaded_bytes for t in tiers))

    def _ends(self, page: "_Page") -> None:
        stats = self._gateway.stats
        page.counters("request_success", "Sequences that ended, by reason.", "finished_reason", stats.finished)
        text = "Sequences cut short, by cause: one of those shown, or what failed another choice of the request."
        page.counters("request_aborts", text, "reason", stats.aborts)
        page.counters("request_errors", "Sequences refused or failed, by kind of error.", "reason", stats.errors)
        page.counter(
            "requests_resumed", "Sequences that the engine had lost and went on with.", self._gateway.num_resumed
        )
        lost = self._gateway.stats.lost
        page.counters("processes_lost", "Processes that died or hung and were replaced, by kind.", "process", lost)
        if late := self._gateway.late_beats:
            text = "Messages of a follower that came when half of its lease was over: it was nearly taken for lost."
            page.counters("late_beats", text, "machine", late)
        text = "Requests refused before a first byte, by code or status."
        page.counters("request_refused", text, "reason", stats.refused)

    def _attainment(self, page: "_Page") -> None:
        """Nothing without `--latency-classes`."""
        goals = [
            ({"latency_class": name, "target": kind}, goal, goal.target_ms / 1e3)
            for name, one in self._gateway.stats.attainment.items()
            for kind, goal in (("ttft", one.ttft), ("itl", one.itl))
            if goal.target_ms is not None
        ]
        if not goals:
            return
        text = "Target of a latency class: from arrival to the first token (ttft), or between two tokens (itl)."
        page.family("gauge", "slo_target_seconds", text, [(labels, seconds) for labels, _, seconds in goals])
        text = "First tokens and gaps between tokens of the requests of a latency class that has such a target."
        page.family("counter", "slo_observations_total", text, [(labels, goal.num) for labels, goal, _ in goals])
        text = "Of these, those that met the target."
        page.family("counter", "slo_attained_total", text, [(labels, goal.num_met) for labels, goal, _ in goals])

    def _steps(self, page: "_Page", core: Snapshot) -> None:
        for name, (text, bounds) in _STEP_HISTOGRAMS.items():
            page.histogram(name, text, core.histograms.get(name) or Histogram(bounds))

    def _processes(self, page: "_Page", *, are_several: bool) -> None:
        pulses = [
            ({"engine": engine, "process": name} if are_several and engine != NO_ENGINE else {"process": name}, pulse)
            for (engine, name), pulse in self._gateway.pulses.items()
        ]
        text = "Messages of what has died that were dropped."
        page.family("counter", "stale_frames_total", text, [(labels, pulse.num_stale) for labels, pulse in pulses])
        lags = [(labels, pulse.loop_lag_s) for labels, pulse in pulses]
        page.histograms("event_loop_lag_seconds", "How late an event loop came to a timer, ten times a second.", lags)
        _usage(page, [(labels, pulse.usage) for labels, pulse in pulses])

    def _workers(self, page: "_Page", core: Snapshot) -> None:
        """What each rank takes of its machine and its device."""
        ranks = [({"rank": worker.usage.rank}, worker) for worker in core.workers]
        if not ranks:
            return
        _usage(page, [({"process": _worker(each.usage.rank)}, each.usage.process) for _, each in ranks])
        text = (
            "Memory of a rank's device by what holds it: weights, the KV cache (kv_used by sequences, kv_cached for "
            "others to find, kv_free), states of draft tokens, KV in host memory; workspace and graphs are what the "
            "memory plan keeps free for steps."
        )
        kinds = [({**labels, "kind": kind}, size) for labels, each in ranks for kind, size in each.memory.items()]
        page.family("gauge", "worker_memory_bytes", text, kinds)
        text = "Host memory that the machine or cgroup of a rank can still give, without file caches that it can drop."
        rooms = [(labels, each.usage.available_bytes) for labels, each in ranks if each.usage.available_bytes]
        page.family("gauge", "host_memory_available_bytes", text, rooms)
        text = "Bytes of weights and KV that a rank's steps had to read, each once a step, estimated."
        reads = [(labels, each.read_bytes) for labels, each in ranks]
        page.family("counter", "estimated_read_bytes_per_gpu_total", text, reads)
        text = "Bandwidth of the memory of a rank's device: measured on a CPU, nominal on a GPU."
        known = [(labels, each) for labels, each in ranks if each.usage.bandwidth]
        bandwidths = [
            ({**labels, "source": each.usage.bandwidth_source}, each.usage.bandwidth) for labels, each in known
        ]
        page.family("gauge", "memory_bandwidth_bytes_per_second", text, bandwidths)
        text = (
            "Time that reading these bytes takes at that bandwidth, divided by the time of the steps, in the last ten "
            "seconds; 0 without steps."
        )
        page.family("gauge", "memory_roof_ratio", text, [(labels, each.roof_ratio) for labels, each in known])
        for name, text in GPU_METRICS.items():
            gpus = [(labels, each.usage.gpu[name]) for labels, each in ranks if name in each.usage.gpu]
            if gpus:
                page.family("counter" if name.endswith("_total") else "gauge", name, text, gpus)

    def _stages(self, page: "_Page", core: Snapshot) -> None:
        """Nothing without `--pipeline-parallel-size`."""
        if not core.stages:
            return
        text = (
            "Time of each stage with steps in flight: busy, or waiting for a plan, the stage before, sampled ids, or "
            "the stage behind."
        )
        samples = [
            ({"stage": stage, "state": state}, seconds)
            for stage, each in enumerate(core.stages)
            for state, seconds in (("plan", each.plan_s), *asdict(each.seconds).items())
        ]
        page.family("counter", "stage_seconds_total", text, samples)
        text = "Share of the stages' time with steps in flight in which they were not busy, in the last ten seconds."
        page.gauge("pipeline_bubble_ratio", text, core.bubble_ratio)

    def _requests(self, page: "_Page") -> None:
        stats = self._gateway.stats
        parts, histogram = stats.part_s, page.histogram
        text = "From a request's arrival to a sequence's first token."
        histogram("time_to_first_token_seconds", text, stats.time_to_first_token_s)
        histogram("inter_token_latency_seconds", "Between the tokens of a sequence.", stats.inter_token_latency_s)
        histogram("e2e_request_latency_seconds", "From arrival to the end of a sequence.", stats.request_latency_s)
        text = "The mean time of a sequence's tokens after the first."
        histogram("request_time_per_output_token_seconds", text, stats.time_per_output_token_s)
        text = "From arrival until the tokenizer takes it."
        histogram("request_tokenizer_queue_time_seconds", text, parts["tokenizer_queue"])
        histogram("request_tokenize_time_seconds", "Template, encoding and checks in the tokenizer.", parts["tokenize"])
        histogram("request_queue_time_seconds", "From the tokenizer to the first step.", parts["queue"])
        histogram("request_prefill_time_seconds", "From the first step to the first token.", parts["prefill"])
        histogram("request_decode_time_seconds", "From the first token to the last.", parts["decode"])
        histogram("request_inference_time_seconds", "From the first step to the last token.", stats.inference_s)
        text = "Characters of prompts for whose pieces the tokenizer's cache was asked, once for each sequence."
        page.counter("tokenizer_cache_queries", text, stats.num_prompt_chars)
        text = "Characters of pieces whose ids the tokenizer's cache had."
        page.counter("tokenizer_cache_hits", text, stats.num_known_chars)
        histogram("request_prompt_tokens", "Tokens of a prompt.", stats.prompt_tokens)
        histogram("request_generation_tokens", "Tokens of an output.", stats.generation_tokens)
        text = "Tokens of the longest output of a request."
        histogram("request_max_num_generation_tokens", text, stats.max_generation_tokens)
        histogram("request_params_n", "Choices asked for.", stats.choices)
        histogram("request_params_max_tokens", "The max_tokens asked for, where it was given.", stats.max_tokens)


def _usage(page: "_Page", usages: Sequence[tuple[Mapping[str, object], ProcessUsage]]) -> None:
    """What processes take of their machine, as far as it is known."""
    known = [(labels, usage) for labels, usage in usages if usage.num_threads]
    text = "Processor time of all threads of a process since its start."
    page.family("counter", "process_cpu_seconds_total", text, [(labels, usage.cpu_s) for labels, usage in known])
    page.family("gauge", "process_threads", "Threads of a process.", [(labels, u.num_threads) for labels, u in known])
    text = "Resident memory of a process: its own, of mapped files, and shared with others that count it as well."
    memory = {
        "anonymous": [usage.anonymous_bytes for _, usage in known],
        "file": [usage.file_bytes for _, usage in known],
        "shared": [usage.shared_bytes for _, usage in known],
    }
    kinds = [
        ({**labels, "kind": kind}, size)
        for kind, sizes in memory.items()
        for (labels, _), size in zip(known, sizes, strict=True)
    ]
    page.family("gauge", "process_resident_memory_bytes", text, kinds)


def _worker(rank: int) -> str:
    """The name of a rank's process."""
    return f"worker-{rank}" if rank else "worker"


class _Page:
    """Prometheus' text format, version 0.0.4, family by family."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._model = ""  # the label of what is written now
        self._families: dict[str, list[str]] = {}  # full name → its head and samples
        self.engine: int | None = None  # the label `engine` of what is written now; None: it has none

    def begin(self, model: str) -> None:
        """What follows is of this model."""
        self._model = f'model_name="{_escaped(model)}"'

    def text(self) -> bytes:
        """Everything so far."""
        return "\n".join([*(line for lines in self._families.values() for line in lines), ""]).encode()

    def gauge(self, name: str, text: str, value: float) -> None:
        self.family("gauge", name, text, [({}, value)])

    def counter(self, name: str, text: str, value: float) -> None:
        self.family("counter", f"{name}_total", text, [({}, value)])

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        """One sample for each value of a label."""
        self.family("counter", f"{name}_total", text, [({label: key}, value) for key, value in values.items()])

    def family(self, kind: str, name: str, text: str, samples: Iterable[tuple[Mapping[str, object], float]]) -> None:
        """All samples of one metric, as (labels, value)."""
        shown = [(self._labels(labels), value) for labels, value in samples]
        for full, lines in self._heads(kind, name, text):
            lines += [f"{full}{{{labels}}} {value}" for labels, value in shown]

    def histogram(self, name: str, text: str, histogram: Histogram | HistogramCounts) -> None:
        self.histograms(name, text, [({}, histogram)])

    def histograms(
        self, name: str, text: str, samples: Sequence[tuple[Mapping[str, object], Histogram | HistogramCounts]]
    ) -> None:
        """All series of one metric, as (labels, histogram)."""
        for full, lines in self._heads("histogram", name, text):
            for own_labels, histogram in samples:
                labels = self._labels(own_labels)
                bucket, running = f'{full}_bucket{{{labels},le="', 0
                for bound, count in zip(_bounds(histogram.bounds), histogram.counts, strict=True):
                    running += count
                    lines.append(f'{bucket}{bound}"}} {running}')
                lines.append(f"{full}_sum{{{labels}}} {histogram.total}")
                lines.append(f"{full}_count{{{labels}}} {running}")

    def _heads(self, kind: str, name: str, text: str) -> Iterator[tuple[str, list[str]]]:
        """For each name that a metric has, that name in full and the lines of the family, which begin with its head."""
        names = [] if name in _ONLY_OLD else [name]
        if self._prefix == "vllm" and name in OLD_NAMES:
            names.append(OLD_NAMES[name])
        for one in names:
            full = f"{self._prefix}:{one}"
            yield full, self._families.setdefault(full, [f"# HELP {full} {text}", f"# TYPE {full} {kind}"])

    def _labels(self, labels: Mapping[str, object]) -> str:
        own = [self._model] if self.engine is None else [self._model, f'engine="{self.engine}"']
        return ",".join([*own, *(f'{label}="{_escaped(str(value))}"' for label, value in labels.items())])


@cache
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(str(float(bound)) for bound in bounds), "+Inf")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

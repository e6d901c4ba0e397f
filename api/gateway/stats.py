"""The gateway's counters and histograms, which `metrics` renders."""

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from ...config.latency_classes import LatencyClass
from ...errors import ErrorKind
from ...ipc.messages import FinishReason, Times, Usage
from ...ipc.reports import Histogram
from .timeline import Timeline

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PART_S = (0.0005, 0.001, 0.0025, *_REQUEST_S)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Attainment:
    """How often the targets of a latency class were met. What had no first or next token does not count."""

    def __init__(self, targets: LatencyClass) -> None:
        self.targets = targets
        self.ttft = Goal(targets.ttft_ms)
        self.itl = Goal(targets.itl_ms)


class Goal:
    """One target, and what was measured against it."""

    def __init__(self, target_ms: float | None) -> None:
        self.target_ms = target_ms
        self.num = 0
        self.num_met = 0

    def observe(self, seconds: float) -> None:
        self.num += 1
        self.num_met += self.target_ms is not None and 1e3 * seconds <= self.target_ms


class Stats:
    """Counts since the api process started."""

    def __init__(self, classes: Mapping[str, LatencyClass] = {}) -> None:
        """`classes`: the operator's latency classes, if there are any."""
        self.attainment: dict[str, Attainment] = {}
        self.change(classes)
        self.finished: Counter[str] = Counter({reason: 0 for reason in (*get_args(FinishReason), "error")})  # sequences
        self.aborts: Counter[str] = Counter({"client_gone": 0, "shutting_down": 0})  # sequences, by reason
        self.errors: Counter[str] = Counter({kind: 0 for kind in get_args(ErrorKind)})  # sequences refused or failed
        self.refused: Counter[str] = Counter(
            {"invalid_api_key": 0, "rate_limit_exceeded": 0}
        )  # requests that got an error before a first byte, by its code or status
        self.lost: Counter[str] = Counter(
            dict.fromkeys(("worker", "core", "grammar", "tokenizer", "detokenizer"), 0)
        )  # processes that were replaced, by kind
        self.time_to_first_token_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_latency_s = Histogram(_INTER_TOKEN_S)
        self.request_latency_s = Histogram(_REQUEST_S)
        self.part_s = {
            part: Histogram(_PART_S) for part in ("tokenizer_queue", "tokenize", "queue", "prefill", "decode")
        }
        self.inference_s = Histogram(_PART_S)
        self.time_per_output_token_s = Histogram(_INTER_TOKEN_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.max_generation_tokens = Histogram(_TOKENS)  # of a request's longest choice
        self.num_prompt_chars = 0  # of sequences that have started, where the tokenizer looked for known pieces
        self.num_known_chars = 0  # of these pieces
        self.choices = Histogram(_CHOICES)
        self.max_tokens = Histogram(_TOKENS)

    def change(self, classes: Mapping[str, LatencyClass]) -> None:
        """These are the latency classes from now on. What was counted of one with other targets is dropped."""
        before, self.attainment = self.attainment, {}
        for name, targets in classes.items():
            same = before.get(name)
            is_same = same is not None and same.targets == targets
            self.attainment[name] = same if same is not None and is_same else Attainment(targets)

    def asked(self, n: int, max_tokens: int | None) -> None:
        """A prompt was submitted."""
        self.choices.observe(n)
        if max_tokens is not None:
            self.max_tokens.observe(max_tokens)

    def started(self, times: Times) -> None:
        """A sequence has started."""
        self.num_prompt_chars += times.num_chars
        self.num_known_chars += times.num_known_chars

    def completed(self, timeline: Timeline, usage: Usage) -> None:
        """A sequence ended with its usage: it was neither cut short nor failed."""
        self.request_latency_s.observe(timeline.total)
        self.prompt_tokens.observe(usage.num_prompt)
        self.generation_tokens.observe(usage.num_output)
        parts = timeline.parts()
        for part, seconds in parts.items():
            self.part_s[part].observe(seconds)
        if "decode" in parts:
            if "prefill" in parts:
                self.inference_s.observe(parts["prefill"] + parts["decode"])
            if usage.num_output > 1:
                self.time_per_output_token_s.observe(parts["decode"] / (usage.num_output - 1))

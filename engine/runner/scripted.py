"""A model that says what a file tells (`--scripted FILE`), for tests of programs that talk to a server: agents with
their tools, SDKs, retries. Everything but the computation is the server's own: templates, tokens, scheduling, prefix
cache, grammars and parsers.

The file is a JSON list of entries. Of the entries whose `when`, a regular expression, is found in the prompt, the one
that is found nearest to the prompt's end answers with its `say`; of equals the first in the file. So what happened last
decides: a tool's result and not the question before it. An entry without `when` answers if no other does.

    [{"when": "what files", "say": "<tool_call>{\\"name\\": \\"ls\\", \\"arguments\\": {}}</tool_call>"},
     {"when": "README.md", "say": "There is a README."},
     {"say": "I do not know."}]

The prompt is the text that the chat template made, with its special tokens. `say` is in the model's own format.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...config.config import EngineConfig
from ...errors import ConfigError
from ...ipc.messages import PassReads, RowLogprobs, RowOpen, StepPlan, StepResult, bytes_to_ids, ids_to_bytes
from ..attention.kv_cache import KvCache, KvShape
from ..executors.experts import OwnExperts
from ..steps.base import ImmediateSteps
from ..text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class _Entry:
    when: re.Pattern[str] | None
    ids: tuple[int, ...]  # what it says, and the end

    def found_at(self, prompt: str) -> int:
        """Where its pattern is found last; -1: it answers only if no other does; -2: it does not answer."""
        if self.when is None:
            return -1
        return max((match.end() for match in self.when.finditer(prompt)), default=-2)


class Script:
    """What to say."""

    def __init__(self, path: Path, tokenizer: Tokenizer, end: int) -> None:
        """end: the id of the token that ends a text. Raises ConfigError."""
        self._tokenizer = tokenizer
        self._end = end
        closing = (tokenizer.encode(each, add_special_tokens=False) for each in ('"', "}", "]", "\n"))
        self.closing = (end, *(ids[0] for ids in closing if len(ids) == 1))  # tokens that end something
        self._entries = [self._entry(path, number, entry) for number, entry in enumerate(_entries(path), 1)]

    def _entry(self, path: Path, number: int, entry: Any) -> _Entry:
        where = f"--scripted {path}: entry {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("say"), str) or entry.keys() - {"when", "say"}:
            raise ConfigError(
                f'{where} must be an object with "say", a text, and perhaps "when", a regular expression.'
            )
        when = entry.get("when")
        try:
            pattern = None if when is None else re.compile(when, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ConfigError(f'{where}: "when" is no regular expression: {error}.') from None
        return _Entry(pattern, (*self._tokenizer.encode(entry["say"], add_special_tokens=False), self._end))

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The ids of the answer to these ids, up to the token that ends it. Without an entry that fits: the end."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        best = max(self._entries, key=lambda entry: entry.found_at(text))  # of equals the first
        return best.ids if best.found_at(text) > -2 else (self._end,)


def _entries(path: Path) -> list[Any]:
    """Raises ConfigError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--scripted {path} cannot be read: {error}.") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"--scripted {path} must be a JSON list of at least one entry.")
    return found


@dataclass(frozen=True, kw_only=True)
class ScriptedModel:
    """A model without weights and KV. Its blocks have no bytes, so that one scheduler serves all models."""

    script: Script
    kv_shape: KvShape = field(default_factory=lambda: KvShape(layers=(), dtype=torch.float32))
    weights = workspace = graphs = 0
    reads = PassReads()
    head_major = False
    handover = queue = by_layer = None
    note: str
    failed_kernels: tuple[str, ...] = ()
    own_experts: Mapping[int, OwnExperts] = field(default_factory=dict)
    replicas = None

    @classmethod
    def load(cls, config: EngineConfig) -> "ScriptedModel":
        """Raises ConfigError."""
        assert config.scripted is not None
        ends = config.model.eos_token_ids
        if not ends:
            raise ConfigError(f"--scripted: {config.model.name} has no token that ends a text.")
        script = Script(Path(config.scripted), load_tokenizer(Path(config.model.path)), ends[0])
        return cls(script=script, note=f"no model computes: answers come from {config.scripted}")

    def steps(self, config: EngineConfig, cache: KvCache) -> "ScriptedSteps":
        return ScriptedSteps(self.script)


class _Row:
    """A row that is open: the next token is the answer's at `at`."""

    def __init__(self, opened: RowOpen, script: Script) -> None:
        ids = bytes_to_ids(opened.ids)
        self._closing = script.closing
        self.is_pooled = opened.pooling is not None
        self.answer = () if self.is_pooled else script.answer(ids[: opened.num_prompt])
        self.at = len(ids) - opened.num_prompt
        self.least = opened.min_len - opened.num_prompt  # tokens before one of `ends`
        self.ends = frozenset(bytes_to_ids(opened.ends))
        self.wants_logprobs = opened.sampling.logprobs is not None

    def next_token(self, mask: NDArray[np.int32] | None) -> int:
        """mask: the tokens that may come next, a bit each; None: all. A token that may not come is replaced by one that
        may, so that an answer follows its grammar, and preferably ends what has begun."""
        token = self.answer[min(self.at, len(self.answer) - 1)]
        if token in self.ends and self.at < self.least:
            token = self.answer[self.at % max(len(self.answer) - 1, 1)]
        self.at += 1
        if mask is None or _allows(mask, token):
            return token
        first = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        return next((each for each in self._closing if _allows(mask, each)), first)


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


class ScriptedSteps(ImmediateSteps):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._rows: dict[int, _Row] = {}
        self._late: StepPlan | None = None  # launched, and waits for masks

    @property
    def num_pending(self) -> int:
        return super().num_pending + (self._late is not None)

    def launch(self, plan: StepPlan) -> None:
        self._rows.update((row.row, _Row(row, self._script)) for row in plan.open)
        if plan.late_rows:
            self._late = plan
        else:
            self._run(plan, {})

    def sample(self, masks: Mapping[int, bytes]) -> None:
        plan, self._late = self._late, None
        assert plan is not None, "no plan waits for masks"
        self._run(plan, masks)

    def _run(self, plan: StepPlan, late: Mapping[int, bytes]) -> None:
        started = time.perf_counter()
        masks = {row: np.frombuffer(mask, "<i4") for row, mask in late.items()}
        if masked := bytes_to_ids(plan.masked_rows):
            masks |= dict(zip(masked, np.frombuffer(plan.masks, "<i4").reshape(len(masked), -1), strict=True))
        ids, logprobs, vectors = [], {}, {}
        for i, (number, is_sampled) in enumerate(zip(bytes_to_ids(plan.rows), plan.sample, strict=True)):
            row = self._rows[number]
            if row.is_pooled:
                vectors[i] = b""  # no numbers: the request fails
            if is_sampled:
                ids.append(row.next_token(masks.get(number)))
                if row.wants_logprobs:
                    logprobs[i] = RowLogprobs(1, ids_to_bytes(ids[-1:]), np.zeros(1, "<f4").tobytes())
        device_ms = (time.perf_counter() - started) * 1000
        self._results.append(StepResult(plan.step, ids_to_bytes(ids), logprobs, {}, device_ms, vectors=vectors))

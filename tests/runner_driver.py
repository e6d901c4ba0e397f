"""Runs requests on a real runner with a minimal scheduler."""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VOCAB_SIZE

from pagewire.config.flags import make_config
from pagewire.config.machine import machine_facts
from pagewire.config.resolve import resolve
from pagewire.engine.checkpoint.spec import model_facts, read_spec
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import GroupTable, RowLogprobs, RowOpen, Sampling, StepPlan, bytes_to_ids, ids_to_bytes

GREEDY = Sampling(temperature=0)


@dataclass
class Request:
    prompt: list[int]
    sampling: Sampling = GREEDY
    max_new: int = 8
    min_new: int = 0  # before that many tokens, none of `ends` is sampled
    ends: tuple[int, ...] = ()
    allowed: list[list[int]] = field(default_factory=list)  # sets of ids for the tokens, in turn
    output: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    row: int = -1
    planned: int = 0  # positions whose computation was launched
    sampled: int = 0  # tokens whose sampling was launched
    blocks: list[int] = field(default_factory=list)  # pages, of all groups
    positions: int = 0  # for which it has blocks


class Driver:
    """Plans one step ahead of what it has collected, as the core does with a pipeline depth of 2."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self.runner = runner
        self._block_size = runner._config.block_size
        self.free_blocks = list(range(num_blocks))
        self.groups = [shape.pages for shape in runner.groups if shape.kind != "state"]
        self.state_pages = sum(shape.pages for shape in runner.groups if shape.kind == "state")
        if not runner.groups:
            self.groups = [1]
        self._regime_limit = runner._config.model.regime_limit or sys.maxsize

    def run(self, requests: list[Request], *, chunk: int = 64, budget: int = 256, rows: int = 8, seed: int = 0) -> None:
        """Runs all requests to their ends, with at most `chunk` tokens of a prompt, `budget` tokens and `rows` rows per
        step. Allocates blocks in random order."""
        rng = random.Random(seed)
        running: list[Any] = []
        waiting, step = list(requests), 0
        free_rows = list(range(rows))
        rng.shuffle(free_rows)
        launched: list[list[tuple[Request, bool]]] = []
        while waiting or running or launched:
            opened, grown, planned, masks, left = [], [], [], [], budget
            while waiting and free_rows:
                request = waiting.pop(0)
                request.row = free_rows.pop()
                request.blocks = self._take(rng, self.state_pages)
                running.append(request)
                opened.append(
                    RowOpen(
                        row=request.row,
                        ids=ids_to_bytes(request.prompt),
                        num_prompt=len(request.prompt),
                        num_computed=0,
                        block_ids=b"",
                        tables=tuple(GroupTable(0, b"") for _ in self.groups) if self.runner.groups else (),
                        state=ids_to_bytes(request.blocks),
                        sampling=request.sampling,
                        min_len=len(request.prompt) + request.min_new if request.min_new else 0,
                        ends=ids_to_bytes(list(request.ends)),
                        regime=int(len(request.prompt) > self._regime_limit),  # kept to the end, unlike the core's
                    )
                )
            for request in running:
                known = len(request.prompt) + request.sampled
                count = min(known - request.planned, chunk, left)
                if count <= 0 or request.sampled == request.max_new:
                    continue
                while request.positions < request.planned + count:
                    request.positions += self._block_size
                    for group, pages in enumerate(self.groups):
                        block = self._take(rng, pages)
                        request.blocks += block
                        grown.append((request.row, group, block))
                left -= count
                request.planned += count
                sample = request.planned == known
                if sample and request.allowed:
                    masks.append((request.row, _bits(request.allowed[request.sampled % len(request.allowed)])))
                request.sampled += sample
                planned.append((request, count, sample))
            if planned:
                rng.shuffle(planned)
                self.runner.launch(
                    StepPlan(
                        step=step,
                        open=tuple(opened),
                        grow_rows=ids_to_bytes([row for row, _, _ in grown]),
                        grow_groups=ids_to_bytes([group for _, group, _ in grown]),
                        grow_blocks=ids_to_bytes([page for _, _, block in grown for page in block]),
                        rows=ids_to_bytes([request.row for request, _, _ in planned]),
                        counts=ids_to_bytes([count for _, count, _ in planned]),
                        sample=bytes(sample for _, _, sample in planned),
                        masked_rows=ids_to_bytes([row for row, _ in masks]),
                        masks=b"".join(bits for _, bits in masks),
                    )
                )
                launched.append([(request, sample) for request, _, sample in planned])
            if len(launched) == 2 or not planned:
                self._collect(launched.pop(0))
                for request in [r for r in running if len(r.output) == r.max_new]:
                    running.remove(request)
                    free_rows.append(request.row)
                    self.free_blocks.extend(request.blocks)
            step += 1

    def _take(self, rng: random.Random, num: int) -> list[int]:
        return [self.free_blocks.pop(rng.randrange(len(self.free_blocks))) for _ in range(num)]

    def _collect(self, plan: list[tuple[Request, bool]]) -> None:
        result = self.runner.collect()
        ids = iter(bytes_to_ids(result.ids))
        for index, (request, sample) in enumerate(plan):
            if index in result.prompt_logprobs:
                request.prompt_logprobs.append(result.prompt_logprobs[index])
            if sample:
                request.output.append(next(ids))
            if index in result.logprobs:
                request.logprobs.append(result.logprobs[index])
        assert next(ids, None) is None


def _bits(tokens: list[int]) -> bytes:
    """The mask that allows these tokens, for the tests' vocabulary."""
    return sum(1 << token for token in set(tokens)).to_bytes(4 * -(-VOCAB_SIZE // 32), "little")


def arrays(parts: list[RowLogprobs]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, values) of consecutive parts, each [positions, width]."""
    width = parts[0].width
    ids = np.concatenate([np.frombuffer(part.ids, "<i4") for part in parts]).reshape(-1, width)
    return ids, np.concatenate([np.frombuffer(part.values, "<f4") for part in parts]).reshape(-1, width)


def engine_config(folder: Path, **flags: Any) -> Any:
    """The configuration that `pagewire serve` resolves for this folder."""
    facts = model_facts(read_spec(folder), folder, "tiny")
    return resolve(make_config(threads=1, **{"max_num_seqs": 8, **flags}), facts, machine_facts())

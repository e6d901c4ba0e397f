"""Compares two KV domains, each a process with a device of its own, with one rank on the plans of each: the same greedy
tokens in float32, while both have rows and while one has none. A layer is dense and one has experts, of which the ranks
have parts, or whole ones that they send tokens for, and then copies of the other's that change between steps. NCCL has
no two ranks on one device, so it needs two GPUs; a smoke run takes gloo."""

import argparse
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs

from ...config.config import EngineConfig
from ...engine.parallel.rank import RankInfo
from ...engine.runner.runner import Runner
from ...ipc.messages import PlaceExperts, ReadExperts, RowOpen, Sampling, StepPlan, ids_to_bytes
from .figures import Figure, SkippedError
from .ranks import DEPTH, from_tests, interpret_kernels, run_ranks, serve
from .setting import Setting

_DOMAINS = 2
_FORMS: dict[str, dict[str, Any]] = {
    "parts of experts": {},
    "whole experts": {"enable_expert_parallel": True},
    "replicas of experts": {"enable_expert_parallel": True, "expert_replicas": 1},
}
_MOVES = {3: ((0, 1, 2, 3, 4), (4, 5, 6, 7, 0)), 6: ((0, 1, 2, 3, 5), (4, 5, 6, 7, 1))}  # before these steps
_MANY = 4  # tokens of a step that a smoke run does not record


def measure(setting: Setting) -> Iterator[Figure]:
    if not setting.smoke and (num := torch.cuda.device_count()) < _DOMAINS:
        raise SkippedError(f"two KV domains need two GPUs, because NCCL has no two ranks on one, and torch sees {num}")
    tests = from_tests("checkpoints")
    folder = tests.make_checkpoint(
        setting.scratch / "domains", "qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0],
        max_position_embeddings=8192,
    )  # fmt: skip
    config = _config(setting, folder)
    plans = _plans(config, tests.VOCAB_SIZE, num_new=setting.choose(32, 2))
    alone = _load(setting, folder, None)
    expected = [serve(alone, of_domain) for of_domain in plans]
    (setting.scratch / "plans").write_bytes(msgspec.msgpack.encode(plans))
    for form in _FORMS:
        run_ranks(__name__, folder, setting, "--form", form, num=_DOMAINS)
        files = (_results(setting.scratch, rank) for rank in range(_DOMAINS))
        found = [msgspec.msgpack.decode(file.read_bytes(), type=list[bytes]) for file in files]
        pairs = [pair for each in zip(found, expected, strict=True) for pair in zip(*each, strict=True)]
        wrong = sum(ids != ids_alone for ids, ids_alone in pairs)
        name = f"two KV domains, {form}, float32: steps of {len(pairs)} with other tokens than one rank"
        yield Figure(name=name, value=wrong, unit="", most=0, is_proof=True)


def _config(setting: Setting, folder: Path) -> EngineConfig:
    driving = from_tests("runner_driver")
    config: EngineConfig = driving.engine_config(
        folder, max_num_batched_tokens=setting.choose(4096, 16), max_num_seqs=4, pipeline_depth=DEPTH + 1,
        dtype="float32", device="cpu" if setting.smoke else "auto",
    )  # fmt: skip
    return config


def _load(setting: Setting, folder: Path, rank: int | None, form: str = "") -> Runner:
    """rank: None stands for one that has all."""
    config, info = _config(setting, folder), RankInfo()
    if rank is not None:
        config = structs.replace(config, tensor_parallel_size=_DOMAINS, kv_domains=_DOMAINS, **_FORMS[form])
        info = RankInfo(rank, tuple(range(_DOMAINS)), f"file://{setting.scratch}/ranks of {form}")
    queue = setting.open_queue() if setting.smoke else None
    return Runner.load(config, rank_info=info, queue=queue, is_checked=False)


def _plans(config: EngineConfig, vocab_size: int, *, num_new: int) -> list[list[StepPlan]]:
    """For each domain its plans. A domain has two rows: their prompts in chunks, then their tokens. The second domain
    begins a step later and ends two steps later."""
    rng, chunk, size = np.random.default_rng(0), config.max_num_batched_tokens // 2, config.block_size
    of_domains: list[list[StepPlan]] = []
    for domain in range(_DOMAINS):
        prompts = [rng.integers(3, vocab_size, length).tolist() for length in (5, chunk + 9 + domain)]
        num_pages = -(-(len(prompts[1]) + num_new + 3) // size)
        steps = [_plan([], [], [])] * domain
        left = {row: len(prompt) for row, prompt in enumerate(prompts)}
        opened = tuple(
            RowOpen(
                row, ids_to_bytes(prompt), len(prompt), 0,
                ids_to_bytes(list(range(num_pages * row, num_pages * (row + 1)))), Sampling(temperature=0),
            )
            for row, prompt in enumerate(prompts)
        )  # fmt: skip
        while left:
            counts = [min(chunk, num) for num in left.values()]
            steps.append(_plan(list(left), counts, [int(num <= chunk) for num in left.values()], opened))
            left, opened = {row: num - chunk for row, num in left.items() if num > chunk}, ()
        of_domains.append(steps + [_plan([0, 1], [1, 1], [1, 1])] * (num_new + domain))
    idle = _plan([], [], [])
    found: list[list[StepPlan]] = [[] for _ in of_domains]
    for number, plans in enumerate(zip_longest(*of_domains, fillvalue=idle)):
        of_rows = [np.frombuffer(plan.counts, np.int32) for plan in plans]
        tokens = tuple(int(each.sum()) for each in of_rows)
        longest = max(int(each.max(initial=0)) for each in of_rows)
        for of_domain, plan in zip(found, plans, strict=True):
            of_domain.append(structs.replace(plan, step=number, domain_tokens=tokens, domain_longest=longest))
    return found


def _plan(rows: list[int], counts: list[int], ends: list[int], opened: tuple[RowOpen, ...] = ()) -> StepPlan:
    return StepPlan(
        step=0, open=opened, grow_rows=b"", grow_blocks=b"", rows=ids_to_bytes(rows), counts=ids_to_bytes(counts),
        sample=bytes(ends),
    )  # fmt: skip


def _results(scratch: Path, rank: int) -> Path:
    return scratch / f"found-{rank}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("scratch", type=Path)
    flags.add_argument("--rank", type=int, required=True)
    flags.add_argument("--form", choices=_FORMS, required=True)
    flags.add_argument("--smoke", action="store_true")
    given = flags.parse_args()
    if given.smoke:
        interpret_kernels()
        from ...engine.gpu import shapes

        shapes.MAX_RECORDED = _MANY
    plans = msgspec.msgpack.decode((given.scratch / "plans").read_bytes(), type=list[list[StepPlan]])
    setting = Setting(smoke=given.smoke, scratch=given.scratch)
    runner = _load(setting, given.folder, given.rank, given.form)

    def move(step: int) -> None:
        if "expert_replicas" in _FORMS[given.form] and step in _MOVES:
            runner.read_experts(ReadExperts(step, 1, _MOVES[step]))
            while runner.experts_read is None:
                time.sleep(0.001)
            assert runner.place_experts(PlaceExperts(1, _MOVES[step])), "a rank could not read an expert"

    ids = serve(runner, plans[given.rank], move)
    _results(given.scratch, given.rank).write_bytes(msgspec.msgpack.encode(ids))


if __name__ == "__main__":
    main()

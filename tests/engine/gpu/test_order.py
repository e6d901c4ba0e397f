"""The engine's own steps and queue on a device that is only an order (`order_device.py`): every access to memory is
ordered, and the tokens do not depend on when work runs. Without any one of its waits, this is no longer so."""

import ast
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import checkpoints
import msgspec
import numpy as np
import pytest
import torch
from engine_loop import Loop
from expert_moves import move_experts
from fakes import enqueue
from keepers import running_keeper
from msgspec import structs
from order_device import (
    DeviceTensor,
    Meeting,
    OrderDevice,
    OrderGroup,
    OrderRing,
    kernels_on_devices,
    on_device,
    order_device,
)
from runner_driver import GREEDY, Driver, Request, engine_config

from pagewire.config.config import EngineConfig
from pagewire.engine.core.cost import CAUTIOUS, CostModel
from pagewire.engine.core.planner import Lateness
from pagewire.engine.device import queue as queue_module
from pagewire.engine.device.keeper import Keeper
from pagewire.engine.device.queue import CudaQueue, EagerQueue, Queue
from pagewire.engine.gpu import device_steps, handover, shapes
from pagewire.engine.gpu.decoder import TritonDecoder
from pagewire.engine.gpu.device_steps import DeviceSteps
from pagewire.engine.kv_connector.block_copy import BlockCopier
from pagewire.engine.kv_connector.guard import UnderWay
from pagewire.engine.kv_connector.host_worker import HostWorker
from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.runner import kept_weights, loading
from pagewire.engine.runner import runner as runner_module
from pagewire.engine.runner.kernel_checks import Checked
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import (
    Constraint,
    Enqueue,
    RowOpen,
    Sampling,
    StepPlan,
    StepResult,
    bytes_to_ids,
    ids_to_bytes,
)
from pagewire.procs.weight_memory import close_segments, new_segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted")
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow
PLAIN: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": False}
LLAMA: dict[str, Any] = {"num_hidden_layers": 1}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
}

Tokens = dict[int, Any]
Make = Callable[..., Loop]
"""kind of checkpoint, and flags → a loop."""


@pytest.fixture(autouse=True)
def _only_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured costs decide nothing, and the trial of the kernels at start, which has tests of its own, is left out."""
    monkeypatch.setattr(loading, "check_kernels", lambda config, spec, served, *rest: Checked(served, config))
    monkeypatch.setattr(CostModel, "break_even", lambda self, work: CAUTIOUS)
    monkeypatch.setattr("pagewire.engine.core.cost._MIN_OBSERVED", sys.maxsize)


# ── what is served ───────────────────────────────────────────────────────────────────────────────────────────────────


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)] for length in lengths]


def ask(rid: int, prompt: list[int], max_tokens: int = 4, *, asked: Any = None, **sampling: Any) -> Enqueue:
    message = enqueue(rid, prompt, max_tokens=max_tokens, ignore_eos=True, **(asked or {}))
    return structs.replace(message, sampling=Sampling(**{"temperature": 0, **sampling}))


def mixed(make: Make) -> Tokens:
    """Prompts in chunks beside decode rows, a row that two requests use, and everything that sampling can do."""
    prompts = prompts_of(1, 3, 30, 9, 5, 12, 7)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.2, "top_k": 7, "top_p": 0.8, "seed": 11},
        {"repetition_penalty": 1.8, "presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 0.7, "seed": 3, "logit_bias": {11: 6.5, 12: -100.0}, "logprobs": 0},
        {"prompt_logprobs": 2},
        {"asked": {"constraint": Constraint()}},
    ]
    requests = [ask(rid, prompt, **samplings[rid]) for rid, prompt in enumerate(prompts)]
    held_back = {"min_tokens": 2, "stop_token_ids": (11,)}
    return make("qwen3", **PLAIN).serve([*requests, ask(6, [5, 6, 7], asked=held_back, logit_bias={11: 50.0})])


def recorded(make: Make) -> Tokens:
    """All steps but those of prompts replay recordings."""
    loop = make("qwen3", **PLAIN)
    while loop.runner.use_idle():
        pass
    return loop.serve([ask(rid, prompt, 5) for rid, prompt in enumerate(prompts_of(2, 3, 9, 20))])


def slept(make: Make) -> Tokens:
    """Sleeps between steps, after some of them were recorded."""
    loop = make("qwen3", **PLAIN)
    loop.sleeps, loop.sleep = [4], lambda: _sleep(loop.runner)
    return loop.serve([ask(rid, prompt, 6) for rid, prompt in enumerate(prompts_of(3, 3, 9))])


def _sleep(runner: Runner) -> None:
    for _ in range(4):
        runner.use_idle()
    assert runner.sleep() > 0
    assert runner.wake()


def preempted(make: Make) -> Tokens:
    """With pages for three requests that begin, and not for three that end."""
    loop = make("qwen3", num_pages=5, **PLAIN)
    found = loop.serve([ask(rid, prompt, 20) for rid, prompt in enumerate(prompts_of(4, 13, 14, 12))])
    assert loop.scheduler.counters.num_preemptions > 0
    return found


def found_in_a_block(make: Make) -> Tokens:
    """Two outputs of one prompt, which share its last page until it is copied."""
    loop = make("qwen3", **PLAIN)
    (prompt,) = prompts_of(5, 21)
    outputs = loop.serve([ask(0, prompt, asked={"n": 2}, temperature=1.5)])
    assert len(outputs) == 2 and loop.scheduler.counters.num_cached_tokens % 16
    return outputs


def drafted(make: Make) -> Tokens:
    loop = make("llama", speculative="ngram", **LLAMA)
    few = {token: 100.0 for token in (40, 41, 42)}
    found = loop.serve([ask(0, [40, 41, 42] * 6, 16, logit_bias=few)])
    assert loop.scheduler.counters.num_draft_tokens > 0
    return found


def swapped(make: Make) -> Tokens:
    """Pages that are evicted go to host memory and come back."""
    loop = make("qwen3", num_pages=5, kv_connector=("host,size=1M",), **PLAIN)
    prompts = prompts_of(6, 33, 34, 35)
    outputs = loop.serve([ask(rid, prompt) for rid, prompt in enumerate(prompts)])
    again = loop.serve([ask(3 + rid, prompt) for rid, prompt in enumerate(prompts)])
    assert loop.scheduler.connector is not None
    (tier,) = loop.scheduler.connector.tiers()
    assert tier.num_hit_tokens > 0
    return outputs | again


def recurrent(make: Make) -> Tokens:
    """A model with recurrent layers: states that are kept, found again and preempted."""
    loop = make("qwen3_5", num_pages=12, **HYBRID)
    ((first, second, new),) = [prompts_of(7, 21, 14, 6)]
    outputs = loop.serve([ask(0, first), ask(1, second)])
    return outputs | loop.serve([ask(2, [*first, *outputs[0], *new]), ask(3, second)])


def recurrent_drafts(make: Make) -> Tokens:
    """Rejected draft tokens, behind which the state is taken back."""
    loop = make("qwen3_5", speculative="ngram,tokens=3", **HYBRID)
    few = {token: 100.0 for token in (40, 41)}
    prompts = [[40 + i % 2 for i in range(11)], [41, 41, 40] * 5]
    found = loop.serve([ask(rid, prompt, 12, logit_bias=few) for rid, prompt in enumerate(prompts)])
    assert loop.scheduler.counters.num_draft_tokens > 0
    return found


def late(make: Make, lateness: Lateness = "always") -> Tokens:
    """Masks that come after the pass, beside a row with draft tokens. Each token has another mask."""
    loop = make("llama", speculative="ngram,tokens=3", **LLAMA)
    loop.scheduler.set_lateness(lateness)

    def mask_of(rid: int, num: int) -> bytes:
        steps: Any = loop.runner._steps
        steps._rows.draft_level[:] = 0  # it goes on drafting, whatever was right before
        return _few(rid, num)

    loop.mask_of = mask_of
    requests = [
        ask(rid, prompt, 10, asked={"constraint": Constraint()}, temperature=0.5 * rid, seed=rid)
        for rid, prompt in enumerate(prompts_of(8, 9, 12))
    ]
    bias = {token: 100.0 for token in (40, 41)}
    found = loop.serve([*requests, ask(2, [40 + i % 2 for i in range(11)], 16, logit_bias=bias)])
    assert loop.num_late > 5 or lateness == "never"
    assert 0 < loop.scheduler.counters.num_accepted_tokens < loop.scheduler.counters.num_draft_tokens
    for rid in (0, 1):
        assert all(_few(rid, num)[token >> 3] >> (token & 7) & 1 for num, token in enumerate(found[rid]))
    return found


def _few(rid: int, num: int) -> bytes:
    """A mask that allows three tokens."""
    rng = random.Random(10 * rid + num)
    tokens = rng.sample(range(checkpoints.VOCAB_SIZE), 3)
    return sum(1 << token for token in tokens).to_bytes(4 * -(-checkpoints.VOCAB_SIZE // 32), "little")


def out_of_memory(make: Make) -> Tokens:
    """Some steps in a row fail after they were launched, so that a slot is used again before anything is collected."""
    num = 0

    def failing(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def fail(self: Queue, pairs: Any) -> Any:
            nonlocal num
            num += 1
            if 2 <= num < 6:
                raise torch.OutOfMemoryError
            return fetch(self, pairs)

        return fail

    loop = make("qwen3", **PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (CudaQueue, EagerQueue):
            patch.setattr(kind, "fetch", failing(kind.fetch))
        return loop.serve([ask(rid, prompt) for rid, prompt in enumerate(prompts_of(8, 3, 9))])


class Side:
    """A connector that moves pages on a stream of its own, and relies on the runner for their order."""

    @staticmethod
    def core(options: Any, facts: Any) -> Any:
        raise NotImplementedError("it has a worker half only")

    @staticmethod
    def worker(options: Any, facts: Any) -> "SideWorker":
        return SideWorker()


class SideWorker:
    num_pending = 1

    def register_kv_caches(self, cache: Any) -> None:
        self._cache, self._kept = cache, None
        storage = cache.storage
        assert isinstance(storage, DeviceTensor)
        self._machine = storage.machine
        self._stream = self._machine.stream()
        self._pages = {name: self._machine.pinned(2, torch.int64) for name in ("saved", "loaded")}
        self._pages["saved"].copy_(torch.tensor([4, 5]))
        self._pages["loaded"].copy_(torch.tensor([7, 8]))

    def bind_connector_metadata(self, metadata: bytes) -> None:
        pass

    def start_load_kv(self) -> None:
        pass

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        with self._machine.on(self._stream):
            self._kept = self._cache.words.index_select(
                0, self._pages["saved"].to(self._cache.device, non_blocking=True)
            )

    def get_finished(self) -> tuple[set[int], set[int]]:
        with self._machine.on(self._stream):
            pages = self._pages["loaded"].to(self._cache.device, non_blocking=True)
            self._cache.words.index_copy_(0, pages, self._kept)
        return set(), {1}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def take_load_cost(self) -> tuple[int, float]:
        return 0, 0.0

    def close(self) -> None:
        pass


def beside_a_connector(checkpoint: Any) -> Tokens:
    """A row's pages are saved, loaded into others, and read by another row."""
    config = engine_config(checkpoint("qwen3", **PLAIN), kv_connector=(f"{__name__}:Side",), **SMALL)
    runner = Runner.load(config)
    runner.open_cache(16)
    ids = prompts_of(9, 20)[0]

    def metadata(*loads: tuple[int, bytes]) -> bytes:
        return msgspec.msgpack.encode(UnderWay(loads, (), b"x"))

    def opened(row: int, pages: list[int], num_computed: int) -> RowOpen:
        return RowOpen(row, ids_to_bytes(ids), len(ids), num_computed, ids_to_bytes(pages), GREEDY)

    def plan(step: int, row: int, count: int, *opens: RowOpen) -> StepPlan:
        return StepPlan(
            step=step, open=opens, grow_rows=b"", grow_blocks=b"", rows=ids_to_bytes([row]),
            counts=ids_to_bytes([count]), sample=b"\1", kv=metadata(),
        )  # fmt: skip

    loads = metadata((1, ids_to_bytes([7, 8])))
    runner.launch(structs.replace(plan(0, 0, 20, opened(0, [4, 5], 0)), kv=loads))
    runner.launch(plan(1, 0, 1))
    assert runner.take_transferred() is not None
    runner.launch(structs.replace(plan(2, 1, 1, opened(1, [7, 8], 19)), kv=b""))
    first, _, other = (runner.collect().ids for _ in range(3))
    assert first == other
    return {0: first, 1: other}


class Follower(SideWorker):
    """Reads the layers of a page as they are computed."""

    num_pending = 0
    layer_stops = (0, 1)
    page = 4

    def register_kv_caches(self, cache: Any) -> None:
        places, self._copier, self._storage = cache.groups.places, BlockCopier(cache), cache.storage
        self._bounds = [place.offset for place in places] + [cache.groups.page_bytes]
        self.read: list[torch.Tensor] = []
        self.was_written: list[list[bool]] = []  # each layer, at each call

    def save_kv_layer(self, layer: int) -> None:
        self.read.append(self._copier.read_part([self.page], *self._bounds[layer : layer + 2])[0])
        page = self._storage.inside[self.page]  # whatever orders it
        self.was_written.append([bool(page[first:last].any()) for first, last in pairwise(self._bounds)])

    def wait_for_save(self) -> None:
        pass

    def get_finished(self) -> tuple[set[int], set[int]]:
        return set(), set()


def followed(checkpoint: Any, *, is_recorded: bool = False) -> Follower:
    """A connector follows a step with a prompt, which is launched kernel by kernel."""
    folder = checkpoint("qwen3", num_hidden_layers=3, tie_word_embeddings=False)
    with pytest.MonkeyPatch.context() as patch:
        if not is_recorded:
            patch.setattr(shapes, "MAX_RECORDED", 4)
        runner = Runner.load(engine_config(folder, **SMALL))
        runner.open_cache(16)
        connector = Follower()
        cache = runner._cache
        assert cache is not None
        cache.clear(torch.tensor([connector.page], device=cache.device))
        connector.register_kv_caches(cache)
        follower: Any = connector  # its methods are not typed as `WorkerConnector` has them
        runner._connector = follower
        ids = prompts_of(13, 20)[0]
        opened = RowOpen(0, ids_to_bytes(ids), len(ids), 0, ids_to_bytes([connector.page, 5]), GREEDY)
        plan = StepPlan(
            step=0, open=(opened,), grow_rows=b"", grow_blocks=b"", rows=ids_to_bytes([0]),
            counts=ids_to_bytes([20]), sample=b"\1", kv=b"x",
        )  # fmt: skip
        runner.launch(plan)
        runner.collect()
        whole = BlockCopier(cache).read_part([connector.page], 0, cache.groups.page_bytes)[0]
    assert torch.equal(torch.cat(connector.read), whole) and whole.any()
    return connector


CASES: dict[str, Callable[[Make], Tokens]] = {
    case.__name__: case
    for case in (
        mixed,
        recorded,
        slept,
        preempted,
        found_in_a_block,
        drafted,
        swapped,
        recurrent,
        recurrent_drafts,
        late,
        out_of_memory,
    )
}


def serve(case: str, checkpoint: Any, queue: Queue | None = None) -> Tokens:
    return CASES[case](partial(_loop, checkpoint, queue))


def _loop(checkpoint: Any, queue: Queue | None, kind: str, **options: Any) -> Loop:
    changes = {"qwen3": PLAIN, "qwen3_5": HYBRID, "llama": LLAMA}[kind]
    flags = {name: value for name, value in options.items() if name not in changes}
    return Loop(checkpoint(kind, **changes), queue=queue, **SMALL, **flags)


@pytest.fixture(scope="session")
def expected(checkpoint: Any) -> Callable[[str], Tokens]:
    """The tokens of a queue that does everything at once."""
    known: dict[str, Tokens] = {}

    def tokens(case: str) -> Tokens:
        if case not in known:
            known[case] = serve(case, checkpoint, EagerQueue(torch.device("cpu")))
        return known[case]

    return tokens


# ── the engine is ordered ────────────────────────────────────────────────────────────────────────────────────────────

QUICK = {("found_in_a_block", "random")}
RUNS = [
    pytest.param(case, policy, marks=[] if (case, policy) in QUICK else [pytest.mark.long])
    for case in CASES
    for policy in ("late", "early", "copies first", "random")
]


@pytest.mark.parametrize(("case", "policy"), RUNS)
def test_every_access_is_ordered_and_tokens_do_not_depend_on_when_work_runs(
    case: str, policy: str, checkpoint: Any, expected: Any
) -> None:
    tokens = expected(case)
    with order_device(policy, seed=1) as device:
        found = serve(case, checkpoint)
    assert device.violations == []
    assert found == tokens


def test_late_masks_change_no_token_beside_draft_tokens(checkpoint: Any, expected: Any) -> None:
    queue = EagerQueue(torch.device("cpu"))
    assert late(partial(_loop, checkpoint, queue), "never") == expected("late")


@pytest.mark.long
@pytest.mark.parametrize("policy", ["late", "early", "random"])
def test_a_connector_with_a_stream_of_its_own_is_ordered(policy: str, checkpoint: Any) -> None:
    with order_device(policy, seed=2) as device:
        beside_a_connector(checkpoint)
    assert device.violations == []


@pytest.mark.parametrize("policy", ["late", pytest.param("random", marks=pytest.mark.long)])
def test_layers_are_read_while_those_behind_them_are_computed(policy: str, checkpoint: Any) -> None:
    with order_device(policy, seed=2) as device:
        connector = followed(checkpoint)
    assert device.violations == []
    if policy == "late":  # nothing runs that nothing waits for
        assert connector.was_written == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.long
def test_a_step_that_may_be_recorded_is_read_when_it_has_ended(checkpoint: Any) -> None:
    with order_device("late", seed=2) as device:
        connector = followed(checkpoint, is_recorded=True)
    assert device.violations == []
    assert connector.was_written == [[True] * 3] * 3


def calls_of(loop: Loop, requests: list[Enqueue]) -> tuple[dict[int, Any], list[StepPlan | None]]:
    """The tokens of one rank alone, and what is called for them: launches, and None for `collect`."""
    calls: list[StepPlan | None] = []
    launch, collect = Runner.launch, Runner.collect

    def launched(self: Runner, plan: StepPlan) -> None:
        calls.append(plan)
        launch(self, plan)

    def collected(self: Runner) -> StepResult:
        calls.append(None)
        return collect(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "launch", launched)
        patch.setattr(Runner, "collect", collected)
        return loop.serve(requests), calls


def load_of(runner: Runner) -> int:
    """How many assignments the experts of a rank have had since the last call."""
    return sum(int(np.frombuffer(load, np.int64).sum()) for load in runner.take_expert_load().values())


def on_two_ranks(
    config: EngineConfig, policies: tuple[str, str], num_pages: int, calls: Sequence[Sequence[StepPlan | None]],
    moves: Mapping[int, tuple[tuple[int, ...], ...]] | None = None, loads: list[int] | None = None,
) -> list[list[StepResult]]:  # fmt: skip
    """The results of each rank, which repeats calls in a thread of its own. calls: of each rank. moves: before which
    steps experts of layer 1 move. loads: takes what the experts have had, before each other step and at the end."""
    meeting, devices = Meeting(2), [OrderDevice(policy, seed=3) for policy in policies]

    def serve_rank(rank: int) -> list[StepResult]:
        try:
            group = OrderGroup(devices[rank], meeting, rank)
            with np.errstate(all="ignore"), on_device(devices[rank], group):
                runner = Runner.load(config, rank_info=RankInfo(rank, (0, 1)))
                runner.open_cache(num_pages)
                found = []
                for plan in calls[rank]:
                    if plan is None:
                        found.append(runner.collect())
                        continue
                    if moves is not None and (move := moves.get(plan.step)) is not None:
                        assert move_experts(runner, 1, move)
                    if loads is not None and plan.step % 2:
                        loads.append(load_of(runner))
                    runner.launch(plan)
                if loads is not None:
                    loads.append(load_of(runner))
                assert isinstance(runner._steps, DeviceSteps) and runner._steps.num_recorded > 0
                return found
        except BaseException:
            meeting.leave()
            raise

    with kernels_on_devices(), ThreadPoolExecutor(2) as threads:
        found = list(threads.map(serve_rank, range(2)))
    assert [device.violations for device in devices] == [[], []]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("policies", "drafts"),
    [(("late", "early"), False), (("random", "copies first"), False), (("random", "late"), True)],
)
def test_two_ranks_are_ordered(policies: tuple[str, str], drafts: bool, checkpoint: Any) -> None:
    """Each repeats the calls that one rank alone had, in a thread of its own. drafts: with draft tokens, which each
    rank finds by itself."""
    kind, changes = ("llama", LLAMA) if drafts else ("qwen3", PLAIN)
    flags: dict[str, Any] = {**SMALL, "speculative": "ngram"} if drafts else SMALL
    requests = [ask(rid, prompt, 6) for rid, prompt in enumerate(prompts_of(10, 3, 20))]
    if drafts:
        requests = [ask(0, [40, 41, 42] * 6, 16, logit_bias={40: 100.0, 41: 100.0, 42: 100.0})]
    loop = Loop(checkpoint(kind, **changes), queue=EagerQueue(torch.device("cpu")), **flags)
    tokens, calls = calls_of(loop, requests)
    assert (loop.scheduler.counters.num_draft_tokens > 0) == drafts
    config = engine_config(checkpoint(kind, **changes), pipeline_depth=2, tensor_parallel_size=2, **flags)
    first, second = (
        [(result.ids, result.num_sampled, result.num_draft_tokens) for result in results]
        for results in on_two_ranks(config, policies, loop.runner.offer(), (calls, calls))
    )
    assert first == second
    assert any(num for _, _, num in first) == drafts
    of_two = [token for ids, _, _ in first for token in bytes_to_ids(ids)]
    assert sorted(of_two) == sorted(token for ids in tokens.values() for token in ids)


@pytest.mark.long
def test_two_domains_are_ordered(checkpoint: Any) -> None:
    """One of them has no tokens. A layer is dense, and one has experts that belong to one rank each, or to both after a
    step, when others are under way."""
    folder = checkpoint("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0])
    loop = Loop(folder, queue=EagerQueue(torch.device("cpu")), **SMALL)
    tokens, calls = calls_of(loop, [ask(rid, prompt, 6) for rid, prompt in enumerate(prompts_of(10, 3, 20))])
    own, idle = list(calls), list(calls)
    for number, plan in enumerate(calls):
        if plan is not None:
            counts = bytes_to_ids(plan.counts).tolist()
            of_all: dict[str, Any] = {"domain_tokens": (sum(counts), 0), "domain_longest": max(counts)}
            own[number] = structs.replace(plan, **of_all)
            idle[number] = StepPlan(plan.step, (), b"", b"", b"", b"", b"", **of_all)
    how = {"tensor_parallel_size": 2, "kv_domains": 2, "enable_expert_parallel": True, "expert_replicas": 1}
    config = engine_config(folder, pipeline_depth=2, **how, **SMALL)
    steps = [plan.step for plan in calls if plan is not None]
    slots = [((0, 1, 2, 3, 4), (4, 5, 6, 7, 0)), ((0, 1, 2, 3, 5), (4, 5, 6, 7, 1))]
    moves = dict(zip(steps[2:4], slots, strict=True))
    loads: list[int] = []
    first, second = on_two_ranks(config, ("random", "late"), loop.runner.offer(), (own, idle), moves, loads)
    computed = sum(sum(bytes_to_ids(plan.counts).tolist()) for plan in calls if plan is not None)
    assert sum(loads) == 3 * computed, "what steps in flight count is not lost"
    assert sum(map(bool, loads)) > 4
    found = [token for result in first for token in bytes_to_ids(result.ids)]
    assert sorted(found) == sorted(token for ids in tokens.values() for token in ids)
    assert len(second) == len(first) and not any(result.ids for result in second)


STAGED: dict[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": False}


def stage_plans(num_pages: int) -> list[StepPlan | None]:
    """Two rows in turn, each planned again before its token is known to the host; a prompt in two chunks; and a row
    that another request takes while a token of the first one is on its way. None: `collect`."""
    prompts = prompts_of(12, 20, 5, 3)
    opened = [
        RowOpen(row, ids_to_bytes(ids), len(ids), 0, ids_to_bytes([2 * number, 2 * number + 1]), GREEDY)
        for number, (row, ids) in enumerate(zip((0, 1, 1), prompts, strict=True))
    ]
    assert num_pages >= 2 * len(opened)
    steps = [
        ({0: 12}, {}, opened[:1]), ({1: 5}, {1: 1}, opened[1:2]), ({0: 8}, {0: 1}, []), ({1: 1}, {1: 1}, []),
        ({0: 1}, {0: 1}, []), ({1: 3}, {1: 1}, opened[2:]), ({0: 1}, {0: 1}, []), ({0: 1, 1: 1}, {0: 1, 1: 1}, []),
        ({1: 1}, {1: 1}, []),
    ]  # fmt: skip
    plans = [
        StepPlan(
            step=number, open=tuple(opens), grow_rows=b"", grow_blocks=b"", rows=ids_to_bytes(list(counts)),
            counts=ids_to_bytes(list(counts.values())), sample=bytes(sampled.get(row, 0) for row in counts),
        )
        for number, (counts, sampled, opens) in enumerate(steps)
    ]  # fmt: skip
    calls: list[StepPlan | None] = [*plans[:3]]
    for plan in plans[3:]:
        calls += [None, plan]
    return [*calls, None, None, None]


def serve_stages(policies: tuple[str, str], checkpoint: Any) -> tuple[list[OrderDevice], Any]:
    """Two stages, each in a thread of its own, which sleep at the end. Returns their devices, and the ids that the last
    one sampled; without the rest if a stage has ended with an error."""
    config = engine_config(checkpoint("qwen3", **STAGED), pipeline_depth=2, pipeline_parallel_size=2, **SMALL)
    config = structs.replace(config, kernels=None)
    devices, edges = [OrderDevice(policy, seed=5) for policy in policies], [SimpleQueue[Any]() for _ in policies]
    found: Any = []

    def serve_stage(stage: int) -> None:
        ring = OrderRing(devices[stage], edges[stage], edges[stage - 1])
        try:
            with np.errstate(all="ignore"), on_device(devices[stage], None, ring):
                runner = Runner.load(config, rank_info=RankInfo(stage, (0, 1), stage=stage, first=stage))
                runner.open_cache(8)
                for plan in stage_plans(8):
                    if plan is not None:
                        runner.launch(plan)
                    elif (result := runner.collect()) and stage:
                        found.append(result.ids)
                assert isinstance(runner._steps, DeviceSteps) and runner._steps.num_recorded > 0
                assert runner.sleep() > 0
        except BaseException:
            ring.leave()
            raise

    with kernels_on_devices(), ThreadPoolExecutor(2) as threads:
        errors = [future.exception() for future in [threads.submit(serve_stage, stage) for stage in range(2)]]
    devices[0].violations += [repr(error) for error in errors if error is not None]
    return devices, found


@pytest.fixture(scope="session")
def staged_ids(checkpoint: Any) -> list[bytes]:
    """What one rank samples."""
    config = engine_config(checkpoint("qwen3", **STAGED), pipeline_depth=3, **SMALL)
    with np.errstate(all="ignore"):
        runner = Runner.load(config, queue=EagerQueue(torch.device("cpu")))
        runner.open_cache(8)
        found = []
        for plan in stage_plans(8):
            if plan is not None:
                runner.launch(plan)
            else:
                found.append(runner.collect().ids)
    return found


@pytest.mark.long
@pytest.mark.parametrize("policies", [("late", "early"), ("copies first", "random")])
def test_stages_are_ordered(policies: tuple[str, str], checkpoint: Any, staged_ids: list[bytes]) -> None:
    devices, found = serve_stages(policies, checkpoint)
    assert [device.violations for device in devices] == [[], []]
    assert found == staged_ids


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Arguments of `Runner.load` for weights that a keeper holds, and under "sealed" what each call of `keep` found in
    the memory, and under "keeper" the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep, sealed = Keeper.keep, []

    def looked(self: Keeper, token: bytes) -> None:
        sealed.append(keeper.contents())
        keep(self, token)

    monkeypatch.setattr(Keeper, "keep", looked)
    fd = new_segment()
    with running_keeper(tmp_path) as keeper:
        yield {"load": {"weights_fd": fd, "keeper": keeper.address}, "sealed": sealed, "keeper": keeper}
    close_segments([fd])


def load_kept(policy: str, kept: dict[str, Any], checkpoint: Any) -> tuple[OrderDevice, Runner]:
    with order_device(policy, seed=4) as device:
        config = engine_config(checkpoint("qwen3", **PLAIN), **SMALL)
        return device, Runner.load(config, is_checked=False, **kept["load"])


@pytest.mark.parametrize("policy", ["late", "random"])
def test_weights_are_written_before_they_are_kept(policy: str, kept: dict[str, Any], checkpoint: Any) -> None:
    first, runner = load_kept(policy, kept, checkpoint)
    first.synchronize()
    assert runner.weights_fit and kept["sealed"] == [kept["keeper"].contents()]
    assert any(kept["sealed"][0][0])
    second, runner = load_kept(policy, kept, checkpoint)
    assert runner.weights_fit and len(kept["sealed"]) == 1, "it maps them"
    assert first.violations == second.violations == []


def test_without_the_sums_they_would_not_be(
    kept: dict[str, Any], checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the copies when it reads the sums."""
    monkeypatch.setattr(kept_weights, "sum_of", lambda memory: 0)
    device, _ = load_kept("late", kept, checkpoint)
    device.synchronize()
    assert kept["sealed"] != [kept["keeper"].contents()]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["late", "early"])
def test_steps_with_kept_weights_are_ordered(policy: str, kept: dict[str, Any], checkpoint: Any) -> None:
    """Those of the worker that wrote them, and of one that maps them."""

    def tokens(runner: Runner) -> list[list[int]]:
        runner.open_cache(16)
        requests = [Request(prompt, max_new=3) for prompt in prompts_of(11, 3, 9)]
        Driver(runner, 16).run(requests, budget=32, rows=4)
        return [request.output for request in requests]

    alone = Runner.load(engine_config(checkpoint("qwen3", **PLAIN), **SMALL), queue=EagerQueue(torch.device("cpu")))
    expected = tokens(alone)
    for _ in range(2):
        with order_device(policy, seed=4) as device:
            config = engine_config(checkpoint("qwen3", **PLAIN), **SMALL)
            runner = Runner.load(config, is_checked=False, **kept["load"])
            assert tokens(runner) == expected and runner.weights_fit
        assert device.violations == []


# ── and it would not be, without any one of its waits ────────────────────────────────────────────────────────────────

_WAITS = ("wait", "wait_stream", "wait_event", "synchronize", "follow")


class Wait(NamedTuple):
    module: types.ModuleType
    function: str
    name: str
    line: int

    @property
    def id(self) -> str:
        return f"{self.function}: {self.name}"


def waits_of(module: types.ModuleType) -> list[Wait]:
    """The statements that wait for something, or make a stream wait."""
    found = []

    def visit(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = (*where, node.name)
        if _waits(node):
            assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            assert isinstance(node.value.func, ast.Attribute)
            found.append(Wait(module, ".".join(where), node.value.func.attr, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(_tree(module), ())
    return found


def _tree(module: types.ModuleType) -> ast.Module:
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).read_text())


def _waits(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return isinstance(node.value.func, ast.Attribute) and node.value.func.attr in _WAITS


class _Remove(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if _waits(node) and node.lineno == self._line else node


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """While the context is open, the function of the wait runs without it."""
    assert wait.module.__file__ is not None
    tree = _Remove(wait.line).visit(_tree(wait.module))
    function: Any = wait.module
    for name in wait.function.split("."):
        function = getattr(function, name)
    function = inspect.unwrap(function)  # of a context manager
    code = next(
        each for each in _codes(compile(tree, wait.module.__file__, "exec")) if each.co_qualname == wait.function
    )
    assert code.co_code != function.__code__.co_code
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "__code__", code)
        yield


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


_TIMES_ONLY = ("DeviceSteps.warm_up: wait",)  # nothing is read after it
_ON_CPUS = ("EagerMark.arrive: wait",)  # of gloo: `test_handover.py`
_ALL = [wait for module in (queue_module, device_steps, handover, runner_module) for wait in waits_of(module)]
WAITS = [wait for wait in _ALL if wait.id not in (*_TIMES_ONLY, *_ON_CPUS)]
# What shows that a wait is needed: a case, and the policy.
SHOWN_BY = {
    "CudaQueue.beside: wait_event": ("followed", "late"),
    "CudaMark.wait: synchronize": ("found_in_a_block", "late"),
    "CudaQueue.fetch: wait_stream": ("found_in_a_block", "copies first"),
    "CudaQueue.follow: wait_event": ("found_in_a_block", "early"),
    "CudaQueue.transfer: wait": ("stages", "late"),
    "CudaQueue.transfer: wait_event": ("stages", "late"),
    "DeviceSteps._drop: wait": ("out_of_memory", "late"),
    "DeviceSteps._sample: follow": ("found_in_a_block", "early"),
    "DeviceSteps._send_empty: wait": ("recorded", "late"),
    "DeviceSteps._read: wait": ("found_in_a_block", "late"),
    "Handover._take_ids: follow": ("stages", "late"),
    "Handover._wait_for_the_last_one: follow": ("stages", "late"),
    "Handover.begin: follow": ("stages", "late"),
    "Handover.settle: wait": ("stages", "late"),
    "Runner._transferring: synchronize": ("beside_a_connector", "late"),
    "Runner.take_transferred: synchronize": ("beside_a_connector", "late"),
}


def test_every_wait_is_known() -> None:
    assert {wait.id for wait in WAITS} == SHOWN_BY.keys(), "say which case shows that a wait is needed"


def show(case: str, policy: str, checkpoint: Any, *, is_strict: bool = False) -> tuple[OrderDevice, Any]:
    """The device, and the tokens or the error. is_strict: ends at the first violation, because kernels that read a
    wrong packet might never end."""
    found: Any = None
    with order_device(policy) as device:
        device.is_strict = is_strict
        try:
            alone: dict[str, Callable[[Any], Any]] = {"beside_a_connector": beside_a_connector, "followed": followed}
            found = alone[case](checkpoint) if case in alone else serve(case, checkpoint)
        except Exception as error:
            found = error
    return device, found


QUICK_WAITS = ("DeviceSteps._sample: follow",)


@pytest.mark.parametrize(
    "wait",
    [pytest.param(wait, id=wait.id, marks=[] if wait.id in QUICK_WAITS else [pytest.mark.long]) for wait in WAITS],
)
def test_without_any_one_wait_something_is_not_ordered(wait: Wait, checkpoint: Any, expected: Any) -> None:
    case, policy = SHOWN_BY[wait.id]
    with without(wait):
        if case == "stages":
            devices, found = serve_stages((policy, policy), checkpoint)
            violations = [text for device in devices for text in device.violations]
        else:
            device, found = show(case, policy, checkpoint)
            violations = device.violations
    assert any("nothing orders it" in text for text in violations), (violations, found)
    if case == "found_in_a_block":
        assert found != expected(case), "the tokens show it, too"


# ── nor with other mistakes ──────────────────────────────────────────────────────────────────────────────────────────


def slots_come_back_early(patch: pytest.MonkeyPatch) -> None:
    """A launch takes the slot of the launch before."""
    launch = DeviceSteps.launch

    def early(self: DeviceSteps, plan: StepPlan) -> None:
        self._free = deque([self._the_slot] if hasattr(self, "_the_slot") else list(self._free)[:1])
        self._the_slot = self._free[0]  # type: ignore[attr-defined]
        launch(self, plan)

    patch.setattr(DeviceSteps, "launch", early)


def packets_are_sent_beside_the_steps(patch: pytest.MonkeyPatch) -> None:
    send = CudaQueue.send

    def beside(self: CudaQueue, source: Any, target: Any) -> None:
        with self._driver.on(self._copies):
            send(self, source, target)

    patch.setattr(CudaQueue, "send", beside)


def late_masks_are_sent_beside_the_steps(patch: pytest.MonkeyPatch) -> None:
    send = DeviceSteps._send_masks

    def beside(self: DeviceSteps, slot: Any) -> None:
        queue: Any = self._queue
        with queue._driver.on(queue._copies):
            send(self, slot)

    patch.setattr(DeviceSteps, "_send_masks", beside)


def results_are_temporary(patch: pytest.MonkeyPatch) -> None:
    """Memory returns to the allocator while the copy stream reads it."""
    results = DeviceSteps._results

    def copied(self: DeviceSteps, *args: Any) -> Any:
        return tuple((source.clone(), target) for source, target in results(self, *args))

    patch.setattr(DeviceSteps, "_results", copied)


def recordings_are_kept_asleep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceSteps, "forget_addresses", lambda self: None)


def results_of_recordings_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A result of recorded work is in the memory of all recordings."""
    logits = TritonDecoder.sampled_logits

    def kept(self: TritonDecoder, tokens: Any) -> Any:
        self._last_logits = logits(self, tokens).clone()  # type: ignore[attr-defined]
        return self._last_logits  # type: ignore[attr-defined]

    patch.setattr(TritonDecoder, "sampled_logits", kept)


def pages_are_saved_late(patch: pytest.MonkeyPatch) -> None:
    """A page goes to its next owner a step before it is copied to the host tier."""
    save = HostWorker.start_load_kv
    patch.setattr(HostWorker, "start_load_kv", lambda self: None)
    patch.setattr(HostWorker, "wait_for_save", save)


def the_host_reads_the_device(patch: pytest.MonkeyPatch) -> None:
    """In recorded work."""
    logits = TritonDecoder.sampled_logits

    def read(self: TritonDecoder, tokens: Any) -> Any:
        found = logits(self, tokens)
        self._is_finite = bool(found.isfinite().any())  # type: ignore[attr-defined]
        return found

    patch.setattr(TritonDecoder, "sampled_logits", read)


# The mistake → the case that shows it, the policy, and what is reported; "": nothing, but the tokens are wrong.
MISTAKES: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str, str]] = {
    slots_come_back_early: ("mixed", "late", "after its memory has changed"),
    packets_are_sent_beside_the_steps: ("mixed", "early", "nothing orders it"),
    late_masks_are_sent_beside_the_steps: ("late", "early", "nothing orders it"),
    results_are_temporary: ("mixed", "late", "the reuse of"),
    recordings_are_kept_asleep: ("slept", "late", "which was freed"),
    results_of_recordings_are_kept: ("recorded", "late", "kept after it"),
    the_host_reads_the_device: ("recorded", "late", "in a recording"),
    pages_are_saved_late: ("swapped", "late", ""),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_other_mistakes_are_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None], checkpoint: Any, expected: Any
) -> None:
    case, policy, reported = MISTAKES[mistake]
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        device, found = show(case, policy, checkpoint, is_strict=bool(reported))
    if reported:
        assert any(reported in text for text in device.violations), (device.violations, found)
    else:
        assert found != expected(case)

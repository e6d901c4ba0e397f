"""The core over the fake worker: several cache groups, and plans that wait for masks."""

import asyncio
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from fakes import EOS, VOCAB, FakeWorker, all_tokens, allowed_after, allowed_by_row, bits_of, enqueue, expected_output
from msgspec.structs import replace
from waiting import until_async

from pagewire.config.config import EngineConfig, MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.core import trace
from pagewire.engine.core.groups import Groups
from pagewire.engine.core.scheduler import Scheduler
from pagewire.engine.kv_connector import p2p_link
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.p2p_link import Peer
from pagewire.errors import ConfigError, StartError
from pagewire.ipc.messages import (
    CacheOffer,
    Cancel,
    Constrain,
    Constrained,
    Constraint,
    ExpertLoad,
    ExpertsRead,
    GroupShape,
    LateMasks,
    Masks,
    Message,
    OpenCache,
    PassReads,
    Ping,
    PlaceExperts,
    ProcessUsage,
    ReadExperts,
    Reset,
    Sampled,
    Settings,
    Sleep,
    Slept,
    Snapshot,
    StageSeconds,
    StepPlan,
    StepResult,
    StopHit,
    ToCore,
    TokenBatch,
    Wake,
    WorkerSnapshot,
    WorkerUsage,
    bytes_to_ids,
)
from pagewire.ipc.zmq_channel import read_keys
from pagewire.procs import core as core_module
from pagewire.procs import mask_times
from pagewire.procs.core import CoreActor
from pagewire.procs.topology import workers
from pagewire.tools.servers import free_port

SHAPES = (GroupShape("full", 0, 2), GroupShape("window", 6, 3), GroupShape("state", 0, 4))


def config_of(**flags: Any) -> EngineConfig:
    model = ModelFacts(path="", name="m", max_position=100, vocab_size=VOCAB, eos_token_ids=(EOS,),
                       checkpoint_dtype="float32")  # fmt: skip
    config = resolve(make_config(max_num_batched_tokens=64, **flags), model, MachineFacts(num_cores=1))
    return replace(config, block_size=4, max_num_seqs=8)


def test_a_model_with_several_groups_is_served_and_its_trace_replays(tmp_path: Path) -> None:
    core = CoreActor(config_of(record_trace=str(tmp_path / "steps")))
    worker = FakeWorker(num_blocks=150, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, groups=Groups(SHAPES))
    results: list[StepResult] = []
    opened: list[OpenCache] = []
    output: dict[int, list[int]] = {}

    def post(receiver: str, message: Message) -> None:
        match message:
            case StepPlan():
                results.append(worker.run(message))
            case OpenCache():
                opened.append(message)
            case TokenBatch():
                for tokens in all_tokens(message):
                    output.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))

    core.start(post)
    core.handle([CacheOffer(0, 0, page_bytes=64, num_pages=150, groups=SHAPES)])
    assert opened == [OpenCache(150, (0,))]
    prompts = [[*range(20), rid, rid + 1, rid] for rid in range(6)]
    for rid, prompt in enumerate(prompts):
        core.handle([enqueue(rid, prompt, max_tokens=20, seed=rid, ignore_eos=True)])
        while results and (rid % 2 or len(results) > 1):
            core.handle([results.pop(0)])
    while results:
        core.handle([results.pop(0)])
    for rid, prompt in enumerate(prompts):
        assert output[rid] == expected_output(prompt, 20, 100, rid, True, groups=Groups(SHAPES))
    assert core.scheduler.num_pages_held == 0 and core.scheduler.counters.num_cached_tokens > 0
    asyncio.run(core.stop(0.0))
    with (tmp_path / "steps").open("rb") as file:
        num_plans, difference = trace.replay(trace.read(file))
    assert num_plans > 20 and difference is None


@pytest.mark.parametrize("is_next", [False, True])
def test_a_change_of_settings_is_replayed_and_holds_in_the_next_core(tmp_path: Path, is_next: bool) -> None:
    """is_next: a core that takes the place of one which was told."""
    start = config_of(record_trace=str(tmp_path / "steps"), speculative="ngram,tokens=2")
    small = replace(start, max_num_seqs=2, max_num_batched_tokens=9, scheduling_policy="priority", speculative=None)
    change = Settings(7, small, None)
    core = CoreActor(start, settings=change if is_next else None)
    worker = FakeWorker(num_blocks=150, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    plans: list[StepPlan] = []
    core.start(lambda receiver, message: plans.append(message) if isinstance(message, StepPlan) else None)
    core.handle([CacheOffer(0, 150, block_bytes=64)])
    for rid in range(8):
        core.handle([enqueue(rid, [*range(20), rid], max_tokens=20, priority=-rid, seed=rid, ignore_eos=True)])
    done, first = 0, 0
    while done < len(plans):
        if done == 3 and not is_next:
            core.handle([change, Settings(6, start, None)])  # the second one was sent to the core before this one
            first = len(plans)
        core.handle([worker.run(plans[done])])
        done += 1
    sizes = [sum(bytes_to_ids(plan.counts)) for plan in plans]
    assert max(sizes[first:]) <= 9 and (is_next or max(sizes[:first]) > 9), sizes
    assert not any(plan.speculate for plan in plans[first:])
    asyncio.run(core.stop(0.0))
    with (tmp_path / "steps").open("rb") as file:
        events = list(trace.read(file))
    assert trace.replay(events) == (len(plans), None)
    changed = [i for i, event in enumerate(events) if isinstance(event, trace.Changed)]
    assert len(changed) == 1 and (changed == [1]) == is_next
    del events[changed[0]]
    assert "differs" in (trace.replay(events)[1] or "")


def test_the_smallest_offer_of_the_ranks_is_opened_once_all_have_come() -> None:
    core = CoreActor(config_of(tensor_parallel_size=3, device="cpu"))
    opened: list[OpenCache] = []

    def post(receiver: str, message: Message) -> None:
        if isinstance(message, OpenCache):
            opened.append(message)

    core.start(post)
    for rank, num_blocks in ((2, 150), (0, 90), (1, 120)):
        assert not opened
        core.handle([CacheOffer(rank, num_blocks, block_bytes=64 + rank)])
    assert opened == [OpenCache(90, (64, 65, 66))] * 3
    assert isinstance(core.scheduler, Scheduler) and core.scheduler.pool.num_pages == 90


def test_ranks_are_told_on_which_machines_all_of_them_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the core says it to whoever loads their KV."""
    monkeypatch.setattr(p2p_link, "START_WAIT_S", 60.0)
    port = free_port(3)
    served = f"p2p,serve=tcp://127.0.0.1:{port},key-file={tmp_path / 'keys'}"
    config = config_of(tensor_parallel_size=2, device="cpu", kv_connector=(served,))
    core = CoreActor(config, hosts=("", "127.0.0.2"))
    opened: list[Message] = []
    core.start(lambda receiver, message: opened.append(message))
    core.handle([CacheOffer(rank, 90, block_bytes=64) for rank in (0, 1)])
    assert OpenCache(90, (64, 64), ("", "127.0.0.2")) in opened
    facts = ConnectorFacts.of(config, (64, 64), ())
    with zmq.Context() as context:
        peer = Peer(context, f"tcp://127.0.0.1:{port}", facts, read_keys(tmp_path / "keys"))
        peer.check()
        assert peer.addresses == (f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.2:{port + 2}")
        peer.close()
    asyncio.run(core.stop(0.0))


def test_a_model_with_several_groups_is_refused_with_a_connector_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "examples"))
    core = CoreActor(config_of(kv_connector=("dict_connector:DictConnector",)))
    core.start(lambda receiver, message: None)
    sentence = (
        r"--kv-connector dict_connector:DictConnector stores the blocks of one group of full attention, and this "
        r"model's cache has 3 of the kinds full, window, state; start without this connector\."
    )
    with pytest.raises(ConfigError, match=sentence):
        core.handle([CacheOffer(0, 0, page_bytes=64, num_pages=150, groups=SHAPES)])


def test_pages_and_hits_are_reported_by_group() -> None:
    core = CoreActor(config_of(kv_connector=("host,size=1M",)))
    sent: list[Message] = []
    core.start(lambda receiver, message: sent.append(message))
    core.handle([CacheOffer(0, 64, block_bytes=64, page_bytes=64, num_pages=150, groups=SHAPES)])
    scheduler = core.scheduler
    assert isinstance(scheduler, Scheduler)
    worker = FakeWorker(
        num_blocks=150, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, groups=scheduler.pool.groups
    )
    for rid, prompt in ((1, range(30)), (2, range(30)), (3, range(24))):
        core.handle([enqueue(rid, list(prompt), max_tokens=3)])
        while plans := [message for message in sent if isinstance(message, StepPlan)]:
            sent.clear()
            core.handle([worker.run(plan) for plan in plans])
    full, window, state, none = scheduler.groups()
    assert [group.kind for group in (full, window, state, none)] == ["full", "window", "state", "none"]
    assert full.num_held == window.num_held == state.num_held == 0
    assert full.num_idle > 0 and window.num_idle > 0 and state.num_idle > 0
    assert full.num_idle + window.num_idle + state.num_idle == 150 - len(scheduler.pool._empty)
    assert state.num_lost_tokens > 0, "no state stands where the third prompt leaves the first"


def test_ranks_that_disagree_about_the_groups_are_refused() -> None:
    core = CoreActor(config_of(tensor_parallel_size=2))
    core.start(lambda receiver, message: None)
    core.handle([CacheOffer(0, 0, page_bytes=64, num_pages=150, groups=SHAPES)])
    with pytest.raises(StartError, match="disagree about the groups"):
        core.handle([CacheOffer(1, 0, page_bytes=32, num_pages=150, groups=SHAPES[:2])])


def test_the_kernels_that_failed_on_any_rank_are_reported() -> None:
    core = CoreActor(config_of(tensor_parallel_size=2))
    sent: list[Message] = []
    core.start(lambda receiver, message: sent.append(message))
    core.handle([CacheOffer(0, 64, failed_kernels=("rms_norm", "moe")), CacheOffer(1, 64, failed_kernels=("moe",))])
    core.handle([Ping()])
    (snapshot,) = [message for message in sent if isinstance(message, Snapshot)]
    assert snapshot.failed_kernels == ("rms_norm", "moe")


class Late:
    """A core whose only request, number 1, is constrained. Its grammar answers when the test says so."""

    def __init__(self, **flags: Any) -> None:
        self.worker = FakeWorker(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
        self.plans: list[StepPlan] = []
        self.late: list[LateMasks] = []
        self.output: list[int] = []
        self.asked: list[Constrain | Sampled] = []
        self.finish: str | None = None
        self.core = CoreActor(config_of(pipeline_depth=2, **flags))
        self.core.start(self._post)
        self.core.handle([CacheOffer(0, 64)])
        self.core.handle([enqueue(1, [4, 5, 6], max_tokens=20, seed=1, ignore_eos=True, constraint=Constraint())])
        self.core.handle([Constrained(1), self.masks()])

    def masks(self) -> Masks:
        """Of the next token that the core does not know."""
        rid = (1).to_bytes(8, "little")
        allowed = allowed_after(1, self.output)
        if allowed is None:
            return Masks(b"", b"", rid)
        return Masks(rid, bits_of(allowed)) if allowed else Masks(b"", b"", b"", rid)

    def step(self) -> None:
        """The worker runs the oldest plan, as soon as it has all masks."""
        plan = self.plans.pop(0)
        late: dict[int, Any] = {}
        for message in [message for message in self.late if message.step == plan.step]:
            late |= allowed_by_row(bytes_to_ids(message.rows), message.bits)
            late |= dict.fromkeys(bytes_to_ids(message.free))
            self.late.remove(message)
        self.core.handle([self.worker.run(plan, late)])

    def _post(self, receiver: str, message: Message) -> None:
        match message:
            case StepPlan():
                self.plans.append(message)
            case LateMasks():
                self.late.append(message)
            case Constrain() | Sampled():
                self.asked.append(message)
            case TokenBatch():
                for tokens in all_tokens(message):
                    self.output += bytes_to_ids(tokens.ids)
                    self.finish = tokens.finish


def test_the_next_step_of_a_constrained_request_runs_while_its_mask_is_made() -> None:
    late = Late()
    assert [plan.late_rows for plan in late.plans] == [b"", late.plans[0].rows]
    while late.finish is None:
        num_plans = len(late.plans)
        late.step()
        assert num_plans == 2 or len(late.output) > 18
        if late.finish is None:
            assert isinstance(late.asked[-1], Sampled) and bytes_to_ids(late.asked[-1].ids)[-1] == late.output[-1]
            late.core.handle([late.masks()])
            steps = [message.step for message in late.late]
            assert steps == [plan.step for plan in late.plans][: 1 if late.finish is None else 2]
    while late.plans:
        late.step()
    assert late.output == expected_output([4, 5, 6], 20, 100, 1, True, grammar=1)
    assert late.core.scheduler.num_pages_held == 0 and not late.core.scheduler.late()


ENDS: dict[str, Callable[[Late], ToCore]] = {
    "the grammar process is lost": lambda late: Reset(2, 1, ("grammar",), "It died."),
    "the api is lost": lambda late: Reset(2, 1, ("api",), "It died."),
    "cancelled": lambda late: Cancel((1,)),
    "a stop string": lambda late: StopHit((1,)),
    "its grammar fails": lambda late: Masks(b"", b"", failed=((1, "internal", "It failed."),)),
    "its grammar is complete": lambda late: Masks(b"", b"", complete=(1).to_bytes(8, "little")),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_plan_waits_for_the_mask_of_a_request_that_has_ended(end: str) -> None:
    late = Late()
    late.step()
    assert len(late.plans) == 2 and not late.late
    late.core.handle([ENDS[end](late)])
    assert [(message.rows, message.free) for message in late.late] == [(b"", plan.late_rows) for plan in late.plans]
    late.step()
    late.step()
    assert not late.plans and late.core.scheduler.num_pages_held == 0


def test_no_mask_is_due_for_a_request_that_ends_with_its_token() -> None:
    late = Late()
    plan = late.plans.pop(0)
    late.core.handle([late.worker.run(plan), Cancel((1,))])
    assert isinstance(late.asked[-1], Sampled) and late.asked[-1].rids == late.asked[-1].ended
    assert late.core._mask_times.overdue(math.inf) == set()


def test_no_plan_waits_for_masks_while_a_grammar_is_compiled() -> None:
    late = Late()
    late.core.handle([enqueue(2, [7], constraint=Constraint())])
    late.step()
    assert len(late.plans) == 1, "the plan that was under way"
    late.core.handle([late.masks()])
    late.step()
    assert not late.plans and not late.late
    late.core.handle([late.masks()])
    assert [plan.late_rows for plan in late.plans] == [b""]
    late.core.handle([Constrained(2, "invalid_request", "It is none.")])
    assert [bool(plan.late_rows) for plan in late.plans] == [False, True]


def test_masks_are_late_beside_other_requests_only_if_they_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for are_quick in (False, True):
        monkeypatch.setattr(mask_times.MaskTimes, "are_quick", are_quick)
        late = Late()
        late.core.handle([enqueue(2, [9, 9], max_tokens=20, seed=2, ignore_eos=True)])
        for _ in range(3):
            late.step()
            late.core.handle([late.masks()])
        assert any(plan.late_rows for plan in late.plans) == are_quick


def test_plans_go_on_without_a_request_whose_mask_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (core_module, mask_times):
        monkeypatch.setattr(module, "LIMIT_S", 0.01)
    late = Late()

    async def wait() -> None:
        late.step()
        await until_async(lambda: len(late.late) == 2, "leave to sample anything, for both plans in flight")

    asyncio.run(wait())
    assert all(message.free and not message.rows for message in late.late)
    assert late.core.scheduler.counters.num_taken_back == 1
    before = list(late.output)
    late.step()
    late.step()
    assert late.output == before and not late.plans, "it waits for its mask"
    late.core.handle([late.masks()])
    while late.finish is None:
        late.step()
        late.core.handle([late.masks()])
    while late.plans:
        late.step()
    assert late.output == expected_output([4, 5, 6], 20, 100, 1, True, grammar=1)


def test_a_snapshot_says_what_each_rank_holds_and_has_read() -> None:
    core = CoreActor(config_of())
    worker = FakeWorker(num_blocks=30, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    plans: list[StepPlan] = []
    snapshots: list[Snapshot] = []

    def post(receiver: str, message: Message) -> None:
        if isinstance(message, StepPlan):
            plans.append(message)
        elif isinstance(message, Snapshot):
            snapshots.append(message)

    def answer() -> None:
        core.handle([replace(worker.run(plans.pop(0)), device_ms=500.0)])

    def rank() -> WorkerSnapshot:
        core.handle([Ping()])
        (found,) = snapshots[-1].workers
        return found

    core.start(post)
    core.handle([CacheOffer(0, 30, block_bytes=100, reads=PassReads(fixed=10_000))])
    core.handle([Ping()])
    assert snapshots[-1].workers == (), "the rank has not reported"
    process = ProcessUsage(1.5, 4, 1000, 200, 30)
    usage = WorkerUsage(0, process, {"weights": 12_000, "kv_cache": 3000}, 100_000.0, "measured", {"gpu_watts": 7.0})
    core.handle([usage])
    before = rank()
    assert before.usage == usage
    assert before.memory == {"weights": 12_000, "kv_used": 0, "kv_cached": 0, "kv_free": 3000}
    assert before.read_bytes == 0 and before.roof_ratio == 0.0

    core.handle([enqueue(1, list(range(8)), max_tokens=4, ignore_eos=True)])
    answer()
    during = rank()
    assert during.memory["kv_used"] == 300, "three blocks: 8 positions of the prompt, and those after it"
    assert sum(during.memory.values()) == 15_000
    assert during.read_bytes == 10_000 + 8 * 25, "a block of 4 positions has 100 bytes"
    assert during.roof_ratio == pytest.approx(10_200 / 100_000 / 0.5)
    while plans:
        answer()
    after = rank()
    assert after.read_bytes == 4 * 10_000 + (8 + 9 + 10 + 11) * 25
    assert after.roof_ratio == pytest.approx(after.read_bytes / 100_000 / (4 * 0.5))
    assert after.memory["kv_used"] == 0 and after.memory["kv_cached"] == 300, "others may find it"

    core.handle([Reset(2, 1, (), "A connection broke, which was not that of a rank.")])
    core.handle([Ping()])
    assert len(snapshots[-1].workers) == 1
    core.handle([Reset(3, 2, (), "A connection of the rank broke.")])
    core.handle([Ping()])
    assert snapshots[-1].workers == (), "what a rank took that was replaced counts no more"


def test_each_domain_has_tiers_of_its_own() -> None:
    """Half of the host's memory is for each of two domains. A snapshot says what each rank has of it, and in all."""
    start = config_of(tensor_parallel_size=2, kv_domains=2, kv_connector=("host,size=2000",))
    small = replace(start, kv_connector=("host,size=1000",))
    core = CoreActor(start)
    ranks = [
        FakeWorker(num_blocks=10, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, carry_out=lambda _: None)
        for _ in range(2)
    ]
    plans: list[tuple[str, StepPlan]] = []
    snapshots: list[Snapshot] = []

    def post(receiver: str, message: Message) -> None:
        if isinstance(message, StepPlan):
            plans.append((receiver, message))
        elif isinstance(message, Snapshot):
            snapshots.append(message)

    def told() -> tuple[tuple[int, int], list[int]]:
        """(blocks and capacity of the tier, bytes on each rank)"""
        core.handle([Ping()])
        (tier,) = snapshots[-1].tiers
        in_host = [worker.memory.get("host_tier", 0) for worker in snapshots[-1].workers]
        return (tier.num_blocks, tier.capacity), in_host

    core.start(post)
    core.handle([CacheOffer(rank, 10, block_bytes=100) for rank in range(2)])
    process = ProcessUsage(1.5, 4, 1000, 200, 30)
    core.handle([WorkerUsage(rank, process, {"weights": 1}, 0.0, "nominal", {}) for rank in range(2)])
    assert told() == ((0, 2 * 10), [0, 0])
    for rid in range(5):
        core.handle([enqueue(rid, [rid, *range(30)], max_tokens=2, ignore_eos=True, seed=rid)])
        while plans:
            name, plan = plans.pop(0)
            rank = workers(2).index(name)
            if plan.rows or plan.kv:
                result = ranks[rank].run(plan)
            else:
                result, ranks[rank].last_step = StepResult(plan.step, b"", {}, {}, 1.0), plan.step
            core.handle([replace(result, domain=rank)])
    (num, capacity), in_host = told()
    assert capacity == 20 and in_host == [100 * num, 0], "the first domain is idle each time, so it gets all"
    assert num > 5
    core.handle([Settings(1, small, None)])
    core.handle([enqueue(9, [9] * 20, max_tokens=1)])
    assert told() == ((5, 2 * 5), [500, 0])
    asyncio.run(core.stop(0.0))


def test_the_roof_without_a_known_bandwidth_is_not_guessed() -> None:
    core = CoreActor(config_of())
    snapshots: list[Snapshot] = []
    core.start(lambda receiver, message: snapshots.append(message) if isinstance(message, Snapshot) else None)
    core.handle([CacheOffer(0, 30, block_bytes=100, reads=PassReads(fixed=10_000))])
    core.handle([WorkerUsage(0, ProcessUsage(), {"weights": 1}), Ping()])
    (rank,) = snapshots[-1].workers
    assert rank.roof_ratio == 0.0 and rank.memory == {"weights": 1}, "a model without KV"


def test_a_step_of_stages_on_gpus_takes_as_long_as_the_slowest_one() -> None:
    """Only the last stage answers, with its own time."""
    core = CoreActor(replace(config_of(pipeline_parallel_size=2), kernels=None))
    plans: list[StepPlan] = []
    core.start(lambda receiver, message: plans.append(message) if isinstance(message, StepPlan) else None)
    core.handle([CacheOffer(rank, 30) for rank in (0, 1)])
    core.handle([enqueue(1, list(range(8)), max_tokens=4, ignore_eos=True)])
    found: list[float] = []
    core.scheduler.apply = lambda result: found.append(result.device_ms)  # type: ignore[method-assign]
    result = StepResult(plans[0].step, b"", {}, {}, 4.0)
    core.handle([result])
    core.handle([WorkerUsage(rank, ProcessUsage(), {}, stage=StageSeconds(3.0 - rank)) for rank in (0, 1)])
    core.handle([result])
    assert found == [4.0, 6.0]


class _ExpertRanks:
    """A core and two ranks with room for a replica in each layer, of which the first has nearly all to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("pagewire.procs.core.time.monotonic", lambda: self.now)
        self.core = CoreActor(
            config_of(tensor_parallel_size=2, enable_expert_parallel=True, expert_replicas=1, device="cpu")
        )
        self.posted: dict[str, list[Message]] = {name: [] for name in workers(2)}
        self.core.start(lambda receiver, message: self.posted.get(receiver, []).append(message))
        self.core.handle([CacheOffer(rank, 30) for rank in (0, 1)])
        self.report()

    def report(self) -> None:
        """A window of all ranks."""
        self.now += 1
        tokens = ([400, 20, 20, 20], [0, 0, 0, 0])
        loads = [{0: array("q", own).tobytes()} for own in tokens]
        self.core.handle([ExpertLoad(rank, int(self.now), loads[rank]) for rank in (0, 1)])

    def told(self) -> list[StepPlan | ReadExperts | PlaceExperts]:
        """Since the last call, both ranks the same."""
        first, second = (
            [each for each in own if isinstance(each, StepPlan | ReadExperts | PlaceExperts)]
            for own in self.posted.values()
        )
        assert first == second
        for own in self.posted.values():
            own.clear()
        return first

    def begin(self) -> ReadExperts:
        """A move, at a quiet moment."""
        self.core.handle([Ping()])
        (read,) = self.told()
        assert isinstance(read, ReadExperts) and (read.layer, read.slots) == (0, ((0, 1, 2), (2, 3, 0)))
        return read

    def say(self, rank: int, read: ReadExperts, problem: str = "") -> None:
        self.core.handle([WorkerUsage(rank, ProcessUsage(), {}, read=ExpertsRead(read.number, problem))])


def test_experts_are_read_when_no_prompt_waits_and_switched_once_all_ranks_have_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = _ExpertRanks(monkeypatch)
    core, worker = ranks.core, FakeWorker(num_blocks=30, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    core.handle([enqueue(1, list(range(80)), max_tokens=9, ignore_eos=True), Ping()])  # its prompt takes two steps
    plans = [each for each in ranks.told() if isinstance(each, StepPlan)]
    while core.scheduler.has_prompts:
        core.handle([Ping(), worker.run(plans.pop(0))])
        told = ranks.told()
        assert all(isinstance(each, StepPlan) for each in told), "none begins while a prompt waits"
        plans += [each for each in told if isinstance(each, StepPlan)]
    read = ranks.begin()
    for rank in (0, 1):
        assert not ranks.told()
        core.handle([Ping()])
        ranks.say(rank, read)
    assert ranks.told() == [PlaceExperts(read.layer, read.slots)]
    core.handle([worker.run(plans.pop(0))])
    ranks.report()
    core.handle([Ping()])
    assert all(isinstance(each, StepPlan) for each in ranks.told()), "they have what is best"


def test_experts_are_read_after_ten_seconds_although_prompts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ExpertRanks(monkeypatch)
    ranks.core.handle([enqueue(1, list(range(80)), max_tokens=9, ignore_eos=True), Ping()])
    assert all(isinstance(each, StepPlan) for each in ranks.told())
    ranks.now += 9.5
    ranks.core.handle([Ping()])
    assert not ranks.told()
    ranks.now += 0.5
    ranks.begin()


@pytest.mark.parametrize("why", ["died", "slept", "could not read"])
def test_a_move_that_is_given_up_changes_nothing_and_is_tried_again(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ExpertRanks(monkeypatch)
    read = ranks.begin()
    ranks.say(0, read)
    match why:
        case "died":
            ranks.core.handle([Reset(2, 2, ("worker-1",), "It died.")])
            ranks.core.handle([CacheOffer(rank, 30) for rank in (0, 1)])
        case "slept":
            ranks.core.handle([Sleep()])
            ranks.core.handle([Slept(True, 1, rank=rank) for rank in (0, 1)])
            ranks.core.handle([Wake()])
            ranks.core.handle([Slept(False, rank=rank) for rank in (0, 1)])
        case _:
            ranks.say(1, read, "The disk is gone.")
    ranks.say(0, read)
    ranks.say(1, read)
    ranks.core.handle([Ping()])
    assert not ranks.told(), "it has had its turn in this window"
    ranks.report()
    again = ranks.begin()
    assert again.number > read.number
    for rank in (0, 1):
        ranks.say(rank, read)
    assert not ranks.told()
    for rank in (0, 1):
        ranks.say(rank, again)
    assert ranks.told() == [PlaceExperts(0, read.slots)]
    ranks.core.handle([Reset(3, 3, ("worker",), "It died.")])
    ranks.core.handle([CacheOffer(rank, 30) for rank in (0, 1)])
    ranks.report()
    assert ranks.begin().slots == read.slots, "new ranks have what was dealt"

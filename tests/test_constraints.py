"""Constrained requests through tokenizer, core, grammars and worker: their tokens, and no effect on other requests."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints
import grammars
import pytest
import vocabulary
from grammars import cycle, obeys
from runner_driver import engine_config

from pagewire.config.config import EngineConfig
from pagewire.engine.core import trace
from pagewire.engine.core.planner import Lateness
from pagewire.engine.steps.host_steps import HostSteps
from pagewire.ipc.messages import (
    Cancel,
    Chunk,
    Constraint,
    Failed,
    IdsPrompt,
    Limits,
    Sampling,
    Submit,
    TextSpec,
    bytes_to_ids,
    ids_to_bytes,
)
from pagewire.procs import grammar_sandbox, killable
from pagewire.procs.core import CoreActor
from pagewire.procs.inline import Inline

GREEDY = Sampling(temperature=0)
HOT = Sampling(temperature=1.2, top_k=40, seed=11)
SETS = ([5, 6, 7], list(range(100, 140)), [9], [20, 300, 301])
PROMPTS = [[1, 17, 33], [1, *range(40, 90)], [1, 200], [1, 7, 7, 7, 250, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.make_checkpoint(tmp_path_factory.mktemp("constraints"), "llama")
    vocabulary.add_tokenizer(folder)
    return folder


class Service:
    """An engine in this process, and all of its output."""

    def __init__(self, config: EngineConfig) -> None:
        self.ids: dict[int, array[int]] = {}
        self.chunks: dict[int, list[Chunk]] = {}
        self.failed: dict[int, Failed] = {}
        self.engine = Inline(config, on_chunk=self._hear, on_failed=self._fail, grammars=grammars.load)
        self._next_rid = 1

    def ask(
        self,
        prompt: list[int],
        constraint: Constraint | None = None,
        sampling: Sampling = GREEDY,
        max_tokens: int = 16,
        n: int = 1,
        ignore_eos: bool = True,
        queue_timeout_s: float | None = None,
    ) -> int:
        """Submits a request. Returns the rid of its first sequence."""
        rid = self._next_rid
        self._next_rid += n
        limits = Limits(max_tokens, ignore_eos=ignore_eos, queue_timeout_s=queue_timeout_s)
        submit = Submit(rid, n, IdsPrompt(ids_to_bytes(prompt)), sampling, limits, TextSpec(), constraint=constraint)
        self.engine.post("tokenizer", submit)
        return rid

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        self.engine.run(until=until)

    def output(self, rid: int) -> list[int]:
        assert rid not in self.failed, self.failed[rid]
        return self.ids[rid].tolist()

    def finish(self, rid: int) -> str | None:
        return self.chunks[rid][-1].finish

    def _hear(self, chunk: Chunk) -> None:
        self.ids.setdefault(chunk.rid, array("i")).extend(bytes_to_ids(chunk.ids))
        self.chunks.setdefault(chunk.rid, []).append(chunk)

    def _fail(self, failed: Failed) -> None:
        assert failed.rid not in self.failed
        self.failed[failed.rid] = failed

    def at_rest(self) -> bool:
        """Whether no request, block or grammar is left."""
        scheduler = self.engine.scheduler
        grammar, core = self.engine._grammar, self.engine._core
        return (
            not scheduler.table.requests
            and scheduler.pool.num_held == 0
            and not grammar._matchers
            and not grammar._pending
            and not core._unsure
            and not core._given_up
        )


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(**flags: object) -> Service:
        services.append(Service(engine_config(folder, dtype="float32", **flags)))
        return services[-1]

    yield make
    for service in services:
        service.engine.close()


def test_constrained_outputs_obey_and_other_outputs_are_unchanged(folder: Path, serve: Callable[..., Service]) -> None:
    service = serve()
    free = [service.ask(prompt) for prompt in PROMPTS]
    grammar = cycle(*SETS)
    bound = [service.ask(p, grammar, s) for p in PROMPTS for s in (GREEDY, HOT)]
    service.run()
    expected = checkpoints.reference_greedy(folder, PROMPTS, 16)
    assert [service.output(rid) for rid in free] == expected
    outputs = [service.output(rid) for rid in bound]
    assert all(len(ids) == 16 and obeys(grammar, ids) for ids in outputs)
    assert not any(obeys(grammar, ids[:4]) for ids in expected)
    assert len({tuple(ids) for ids in outputs}) == len(outputs)
    assert service.at_rest()
    alone = serve()
    rid = alone.ask(PROMPTS[1], grammar, HOT)
    alone.run()
    assert alone.output(rid) == outputs[3]  # the tokens depend on the seed and not on the batch


def test_the_queue_timeout_includes_the_wait_for_a_grammar(serve: Callable[..., Service]) -> None:
    service = serve()
    # The grammar is compiled in a sandbox process that has to start first.
    rid = service.ask(PROMPTS[0], cycle(*SETS), queue_timeout_s=0.01)
    patient = service.ask(PROMPTS[0], cycle(*SETS), queue_timeout_s=600)
    service.run()
    assert service.failed[rid].kind == "unavailable" and "0.01 s" in service.failed[rid].detail
    assert len(service.output(patient)) == 16 and service.at_rest()


def test_constrained_choices_with_chunked_prefill(serve: Callable[..., Service]) -> None:
    service = serve(max_num_batched_tokens=16, max_num_seqs=4)
    grammar = cycle(*SETS)
    rid = service.ask(PROMPTS[1], grammar, HOT, n=3)
    other = service.ask(PROMPTS[1], sampling=HOT, n=2)
    service.run()
    outputs = [service.output(rid + i) for i in range(3)]
    assert all(len(ids) == 16 and obeys(grammar, ids) for ids in outputs)
    assert len({tuple(ids) for ids in outputs}) == 3
    assert not obeys(grammar, service.output(other)) and service.at_rest()


def test_a_preempted_request_keeps_its_state_of_the_grammar(serve: Callable[..., Service]) -> None:
    roomy, tight = serve(), serve(kv_cache_memory=3 * 2**15, enable_prefix_caching=False)
    grammar = cycle(*SETS, free=3)
    outputs = []
    for service in (roomy, tight):
        rids = [service.ask(prompt, grammar, HOT, max_tokens=40) for prompt in PROMPTS]
        service.run()
        outputs.append([service.output(rid) for rid in rids])
        assert all(obeys(grammar, ids) for ids in outputs[-1]) and service.at_rest()
    assert tight.engine.scheduler.counters.num_preemptions > 0
    assert outputs[0] == outputs[1]


def test_an_output_ends_when_its_grammar_is_complete(serve: Callable[..., Service]) -> None:
    service = serve()
    five = service.ask(PROMPTS[0], cycle(*SETS, length=5))
    empty = service.ask(PROMPTS[0], cycle(*SETS, length=0))
    service.run()
    assert len(service.output(five)) == 5 and service.finish(five) == "stop"
    usage = service.chunks[five][-1].usage
    assert usage is not None and usage.num_output == 5
    assert service.output(empty) == [] and service.finish(empty) == "stop" and service.at_rest()


def test_an_eos_ends_the_output_where_the_grammar_allows_it(serve: Callable[..., Service]) -> None:
    service = serve()
    rid = service.ask(PROMPTS[0], cycle([5, 6], [7], [2]), ignore_eos=False)
    service.run()
    assert service.output(rid)[1:] == [7, 2] and service.finish(rid) == "stop" and service.at_rest()


def test_cancelled_constrained_requests_leave_nothing_behind(serve: Callable[..., Service]) -> None:
    service = serve()
    cancelled = service.ask(PROMPTS[0], cycle(*SETS), max_tokens=200, n=2)
    other = service.ask(PROMPTS[1], cycle(*SETS, free=1))
    service.run(until=lambda: len(service.ids.get(cancelled, ())) > 3)
    service.engine.post("tokenizer", Cancel((cancelled,)))
    early = service.ask(PROMPTS[2], cycle([8, 9], free=2))  # cancelled before its grammar is compiled
    service.engine.post("tokenizer", Cancel((early,)))
    service.run()
    assert service.finish(cancelled) == "abort" and service.finish(early) == "abort"
    assert 3 < len(service.output(cancelled)) < 10 and len(service.output(cancelled + 1)) == 200
    assert len(service.output(other)) == 16 and service.at_rest()


def test_a_failing_grammar_fails_only_its_own_request(serve: Callable[..., Service]) -> None:
    service = serve()
    faults = ["refused", "bug", "swells", "kills"]
    refused = {fault: service.ask(PROMPTS[0], cycle(*SETS, fault=fault), n=2) for fault in faults}
    failing = service.ask(PROMPTS[1], cycle(*SETS, fault="stumble", fault_at=4))
    stuck = service.ask(PROMPTS[1], cycle(*SETS, fault="dead end", fault_at=2))
    fine = [service.ask(PROMPTS[2], cycle(*SETS)), service.ask(PROMPTS[2])]
    service.run()
    for fault, rid in refused.items():
        assert service.failed[rid].kind == service.failed[rid + 1].kind
        assert rid not in service.chunks and (service.failed[rid].kind == "internal") == (fault == "bug")
    assert service.failed[refused["refused"]].detail == "This is not a grammar."
    assert all("too large" in service.failed[refused[fault]].detail for fault in ("kills", "swells"))
    assert service.failed[failing].kind == service.failed[stuck].kind == "internal"
    assert len(service.ids[failing]) == 4 and len(service.ids[stuck]) == 2
    assert [len(service.output(rid)) for rid in fine] == [16, 16] and service.at_rest()


def test_a_grammar_over_the_time_limit_is_refused(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_sandbox, "LIMIT_S", 0.3)
    monkeypatch.setattr(killable, "_WALL_FACTOR", 400)  # `fine` may have to wait for a core
    service = serve()
    slow = [service.ask(PROMPTS[0], cycle(*SETS, fault="hangs", free=i)) for i in range(2)]
    streams = service.ask(PROMPTS[1], max_tokens=60)
    fine = service.ask(PROMPTS[0], cycle(*SETS))
    service.run()
    assert all("takes more than 0.3 s" in service.failed[rid].detail for rid in slow)
    assert len(service.output(streams)) == 60 and len(service.output(fine)) == 16 and service.at_rest()


@pytest.mark.parametrize(("load", "detail"), [("load_nothing", "no vocabulary"), ("load_to_die", "ends at once")])
def test_unconstrained_requests_work_if_the_grammar_library_cannot_be_loaded(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, load: str, detail: str
) -> None:
    monkeypatch.setattr(grammars, "load", getattr(grammars, load))
    service = serve()
    rids = [service.ask(PROMPTS[0], cycle(*SETS)), service.ask(PROMPTS[0])]
    service.run()
    assert detail in service.failed[rids[0]].detail and len(service.output(rids[1])) == 16 and service.at_rest()


def test_log_probabilities_do_not_depend_on_the_grammar(serve: Callable[..., Service]) -> None:
    service = serve()
    sampling = Sampling(temperature=0, logprobs=2)
    bound = service.ask(PROMPTS[0], cycle([5]), sampling, max_tokens=1)
    free = service.ask(PROMPTS[0], None, sampling, max_tokens=1)
    service.run()
    (bound_chunk,), (free_chunk,) = service.chunks[bound], service.chunks[free]
    assert bound_chunk.logprobs is not None and free_chunk.logprobs is not None
    assert bound_chunk.logprobs[0].top == free_chunk.logprobs[0].top
    assert bound_chunk.logprobs[0].chosen.id == 5
    assert bound_chunk.logprobs[0].chosen.logprob < free_chunk.logprobs[0].chosen.logprob


def test_allowed_tokens_alone_and_with_a_grammar(folder: Path, serve: Callable[..., Service]) -> None:
    service = serve(speculative="ngram")
    few = tuple(range(100, 120))
    alone = [service.ask(PROMPTS[0], None, Sampling(temperature=t, seed=t, allowed_token_ids=few)) for t in (0, 1)]
    both = service.ask(PROMPTS[1], cycle(list(range(110, 300)), [7, 105]), Sampling(allowed_token_ids=few))
    other = service.ask(PROMPTS[1])
    never = service.ask(PROMPTS[1], cycle([5]), Sampling(allowed_token_ids=few))
    wrong = service.ask(PROMPTS[1], None, Sampling(allowed_token_ids=(320,)))
    service.run()
    assert all(set(service.output(rid)) <= set(few) for rid in alone)
    assert obeys(cycle(list(range(110, 120)), [105]), service.output(both))
    assert service.output(other) == checkpoints.reference_greedy(folder, PROMPTS[1:2], 16)[0]
    assert service.failed[never].kind == "invalid_request" and "allowed_token_ids" in service.failed[never].detail
    assert service.failed[wrong].detail == "allowed_token_ids must hold token ids between 0 and 319."


def test_bad_words_name_tokens_of_the_vocabulary(serve: Callable[..., Service]) -> None:
    service = serve()
    rids = [service.ask(PROMPTS[0], Constraint(bad_words=(word,))) for word in (ids_to_bytes([320]), b"\0\0", b"")]
    service.run()
    assert all(service.failed[rid].detail.startswith("bad_words must hold") for rid in rids)


LATENESS: tuple[Lateness, ...] = ("never", "alone", "always")


def late_outputs(service: Service, lateness: Lateness, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """What requests with and without grammars give, some of them too long for the cache."""
    patch.setattr(CoreActor, "_lateness", lambda self: lateness)
    grammar = cycle(*SETS, free=3)
    filtered = Sampling(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2, logprobs=1, seed=4)
    few = Sampling(temperature=1, seed=5, allowed_token_ids=(5, 6, 9, *range(100, 120), 20))
    rids = [service.ask(prompt, grammar, s, max_tokens=40) for prompt in PROMPTS for s in (GREEDY, HOT)]
    rids += [service.ask(PROMPTS[0], grammar, s, max_tokens=40) for s in (filtered, few)]
    rids.append(service.ask(PROMPTS[0], cycle(*SETS, length=7), HOT, max_tokens=40))
    rids += [service.ask(prompt, None, HOT, max_tokens=20) for prompt in PROMPTS[:2]]
    service.run()
    assert service.at_rest() and service.finish(rids[-3]) == "stop"
    return [service.output(rid) for rid in rids]


@pytest.mark.parametrize("flags", [{}, {"kv_cache_memory": 5 * 2**15, "pipeline_depth": 3}], ids=["roomy", "tight"])
def test_late_masks_change_no_token(
    flags: dict[str, object], serve: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for lateness in LATENESS:
        service = serve(record_trace=str(tmp_path / lateness), speculative="ngram", **flags)
        outputs.append(late_outputs(service, lateness, monkeypatch))
        service.engine.close()
        with (tmp_path / lateness).open("rb") as file:
            events = list(trace.read(file))
        plans = [event.plan for event in events if isinstance(event, trace.Planned) and event.plan is not None]
        assert any(plan.late_rows for plan in plans) == (lateness != "never")
        num_plans, difference = trace.replay(events)
        assert difference is None and num_plans == len(plans)
    assert outputs[0] == outputs[1] == outputs[2]
    if flags:
        assert service.engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("part", ["_pass", "_sample"])
def test_late_masks_and_steps_without_memory_change_no_token(
    part: str, serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = late_outputs(serve(), "never", monkeypatch)
    own, num_calls = getattr(HostSteps, part), 0

    def short(self: HostSteps, *args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 11 == 0:
            raise MemoryError
        return own(self, *args)

    monkeypatch.setattr(HostSteps, part, short)
    service = serve(pipeline_depth=3)
    assert late_outputs(service, "always", monkeypatch) == expected
    assert service.engine.scheduler.counters.num_out_of_memory > 5


def test_requests_whose_masks_take_too_long_are_taken_back(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = late_outputs(serve(), "never", monkeypatch)
    service = serve(pipeline_depth=3)
    scheduler, num_rounds = service.engine.scheduler, 0

    def take_back() -> bool:
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds % 7 == 0:
            scheduler.take_back(scheduler.late()[:3])
            service.engine._core.handle([])
        return False

    run = service.run
    monkeypatch.setattr(service, "run", lambda: run(until=take_back))
    assert late_outputs(service, "always", monkeypatch) == expected
    assert scheduler.counters.num_taken_back > 10


def test_a_trace_of_constrained_requests_can_be_replayed(serve: Callable[..., Service], tmp_path: Path) -> None:
    service = serve(record_trace=str(tmp_path / "steps"), pipeline_depth=3)
    for i, prompt in enumerate(PROMPTS):
        service.ask(prompt, cycle(*SETS, free=i, length=12) if i % 2 else None, HOT, n=2)
    service.run()
    service.engine.close()
    with (tmp_path / "steps").open("rb") as file:
        num_plans, difference = trace.replay(trace.read(file))
    assert difference is None and num_plans > 10

"""Which models are loaded: unit tests, and random histories of requests in virtual time.

In a history clients ask for models that do not fit into memory together; loads take their time, and some fail. The
invariants:

- the memory of the models never exceeds the budget, and one model is loaded at a time;
- a pinned model stays; one that answers goes only for another that has waited, and after it has served for a while;
- loads for which others must go take a bounded share of the time;
- every request is answered within a bound, or its model has failed.

A mutant for each rule shows that a history would find its absence.
"""

import heapq
import math
import random
from collections.abc import Callable

import pytest

from pagewire.procs import residency
from pagewire.procs.residency import (
    LOAD_BURST_S,
    LOAD_SHARE,
    PATIENCE_S,
    RETRY_S,
    Load,
    Residency,
    Resident,
    Terms,
    Unload,
    misfits,
)

GB = 1 << 30


def models(*needs: float, budget: float, pinned: tuple[int, ...] = (), keep_alive_s: float = math.inf) -> Residency:
    """Needs and budget in GB."""
    terms = [Terms((int(need * GB),), i in pinned, keep_alive_s) for i, need in enumerate(needs)]
    return Residency([int(budget * GB)], terms, 0.0)


def load(found: Residency, number: int, now: float, *, load_s: float = 1.0, is_used: bool = False) -> float:
    """Asks for a model that has room, and returns when it is loaded."""
    found.use(number, "api", now, is_open=True)
    assert found.decide(now) == [Load(number)]
    found.has_loaded(number, now + load_s)
    if not is_used:
        found.use(number, "api", now + load_s, is_open=False)
    return now + load_s


def test_a_model_is_loaded_when_it_is_asked_for_and_stays() -> None:
    found = models(1, 1, budget=2)
    assert found.decide(0.0) == [] and found.decide_again_at(0.0) == math.inf
    now = load(found, 1, 5.0)
    assert found.models[1].load_s == 1.0 and found.used() == (GB,)
    assert found.decide(now + 1e6) == [] and found.decide_again_at(now) == math.inf


def test_models_are_loaded_one_after_the_other_in_the_order_of_asking() -> None:
    found = models(1, 1, 1, budget=3)
    for number, at in ((2, 1.0), (0, 2.0), (1, 3.0)):
        found.use(number, "api", at, is_open=True)
    order = []
    for now in (4.0, 5.0, 6.0):
        (action,) = found.decide(now)
        assert isinstance(action, Load) and found.decide(now) == []
        order.append(action.number)
        found.has_loaded(action.number, now + 0.5)
    assert order == [2, 0, 1]


def test_the_idle_model_that_was_used_least_recently_goes_first() -> None:
    found = models(1, 1, 1, 2, budget=3)
    now = 0.0
    for number in (1, 0, 2):
        now = load(found, number, now)
    found.use(1, "api", now, is_open=True)
    found.use(1, "api", now + 1, is_open=False)
    found.use(3, "api", now + 2, is_open=True)
    assert found.decide(now + 2) == [Unload(0), Unload(2)]
    found.has_ended(0, now + 3)
    assert found.decide(now + 3) == [], "its memory is not free yet"
    found.has_ended(2, now + 4)
    assert found.decide(now + 4) == [Load(3)] and found.used() == (3 * GB,)


def test_a_model_fits_that_is_not_loaded_and_needs_no_memory_of_others() -> None:
    found = models(1, 2, 1, budget=2)
    assert [found.fits(model) for model in found.models] == [True, True, True]
    now = load(found, 0, 0.0)
    assert [found.fits(model) for model in found.models] == [False, False, True]
    found.use(1, "api", now, is_open=True)
    assert found.decide(now) == [Unload(0)] and not any(map(found.fits, found.models[:2])), "it is not gone yet"


def test_a_model_stays_if_a_larger_one_must_go_anyway() -> None:
    found = models(1, 3, 3, budget=4)
    now = load(found, 1, load(found, 0, 0.0))
    found.use(2, "api", now, is_open=True)
    assert found.decide(now) == [Unload(1)]


def test_only_what_takes_the_same_memory_goes() -> None:
    """The host's memory and two GPUs: the model that was used least recently is on the other one."""
    terms = [Terms((1, 0, 8)), Terms((1, 8, 0)), Terms((1, 8, 0)), Terms((3, 0, 0))]
    found = Residency([4, 10, 10], terms, 0.0)
    assert all(found.fits(model) for model in found.models)
    now = load(found, 1, load(found, 0, 0.0))
    assert found.used() == (2, 8, 8) and found.models[0].terms.need_bytes == 8 and terms[3].need_bytes == 3
    found.use(2, "api", now, is_open=True)
    assert found.decide(now) == [Unload(1)]
    found.has_ended(1, now)
    assert found.decide(now) == [Load(2)]
    found.has_loaded(2, now)
    assert [found.fits(model) for model in found.models] == [False, False, False, False]
    found.use(2, "api", now, is_open=False)
    found.use(3, "api", now + 1, is_open=True)
    assert found.decide(now + 1) == [Unload(0)], "one that computes on the host takes its memory"
    assert misfits([4, 10, 10], [*terms[:3], Terms((1, 0, 8), is_pinned=True)]) == [0]


def test_nothing_goes_in_vain() -> None:
    found = models(1, 2, 3, budget=3)
    now = load(found, 1, load(found, 0, 0.0), is_used=True)
    found.use(2, "api", now, is_open=True)
    assert found.decide(now) == [], "the idle one alone does not make room"


def test_a_busy_model_goes_when_another_has_waited_and_it_has_served_for_a_while() -> None:
    found = models(1, 1, budget=1)
    now = load(found, 0, 0.0, is_used=True)
    found.use(1, "api", now, is_open=True)
    assert found.decide(now) == [] and found.decide_again_at(now) == now + PATIENCE_S
    assert found.decide(now + PATIENCE_S - 0.1) == []
    assert found.decide(now + PATIENCE_S) == [Unload(0)]
    found.has_ended(0, now + 12)
    assert found.decide(now + 12) == [Load(1)], "those that wait for the first one come after it"
    found.has_loaded(1, now + 13)
    assert found.decide(now + 13 + PATIENCE_S - 0.1) == []
    assert found.decide(now + 13 + PATIENCE_S) == [Unload(1)]


def test_a_pinned_model_is_loaded_at_once_and_never_goes() -> None:
    found = models(1, 1, 1, budget=2, pinned=(1,), keep_alive_s=5.0)
    assert found.decide(0.0) == [Load(1)]
    found.has_loaded(1, 1.0)
    now = load(found, 0, 1.0)
    found.use(2, "api", now + 1, is_open=True)
    assert found.decide(now + 1) == [Unload(0)]
    assert found.decide(1e6) == []


def test_an_idle_model_goes_after_its_time() -> None:
    found = models(1, 1, budget=2, keep_alive_s=60.0)
    now = load(found, 0, 0.0, is_used=True)
    assert found.decide_again_at(now) == math.inf, "it answers"
    found.use(0, "api-1", now, is_open=True)
    found.use(0, "api", now + 5, is_open=False)
    found.use(0, "api-1", now + 10, is_open=False)
    assert found.decide_again_at(now + 10) == now + 70
    assert found.decide(now + 69.9) == [] and found.decide(now + 70) == [Unload(0)]


def test_a_request_may_say_how_long_its_model_stays() -> None:
    found = models(1, budget=1)
    now = load(found, 0, 0.0, is_used=True)
    found.use(0, "api", now, is_open=False, keep_alive_s=0.0)
    assert found.decide(now) == [Unload(0)]
    found.has_ended(0, now)
    now = load(found, 0, now)
    assert found.decide(now + 1e6) == [], "that was for the request's own stay"


def test_a_model_that_has_failed_is_tried_again_later_and_later() -> None:
    found = models(1, budget=1)
    found.use(0, "api", 0.0, is_open=True)
    now = 0.0
    for wait_s in (RETRY_S, 2 * RETRY_S, 4 * RETRY_S):
        assert found.decide(now) == [Load(0)]
        found.has_ended(0, now, "It has no weights.")
        assert found.models[0].state == "failed" and found.models[0].problem == "It has no weights."
        assert found.decide(now) == [] and found.decide_again_at(now) == now + wait_s
        now += wait_s
    found.forget("api", now)
    assert found.decide(now) == [] and found.models[0].state == "unloaded", "nobody asks for it any more"


def test_loads_for_which_others_go_wait_when_they_have_taken_their_share() -> None:
    found = models(1, 1, budget=1)
    now = load(found, 0, 0.0)
    num = int(LOAD_BURST_S / 10) + 1
    for i in range(num):
        number = (i + 1) % 2
        found.use(number, "api", now, is_open=True)
        assert found.decide(now) == [Unload(1 - number)]
        found.has_ended(1 - number, now)
        assert found.decide(now) == [Load(number)]
        found.has_loaded(number, now + 10)
        now += 10
        found.use(number, "api", now, is_open=False)
    debt_s = num * 10 - (num - 1) * 10 * LOAD_SHARE
    found.use((num + 1) % 2, "api", now, is_open=True)
    if debt_s > LOAD_BURST_S:
        assert found.decide(now) == []
    at = found.decide_again_at(now)
    assert found.decide(at + PATIENCE_S) != []


def test_loads_count_after_models_have_gone_for_one_that_nobody_waits_for_any_more() -> None:
    """Else a client that asks and gives up would have others loaded again and again."""
    found = models(1, 1, budget=1)
    now = load(found, 0, 0.0, load_s=10.0)
    evicted_at = []
    for _ in range(2 * int(LOAD_BURST_S / 10)):
        found.use(1, "api", now, is_open=True)
        while not (actions := found.decide(now)):
            now = found.decide_again_at(now)
        assert actions == [Unload(0)]
        evicted_at.append(now)
        found.use(1, "api", now, is_open=False)
        found.has_ended(0, now)
        now = load(found, 0, now, load_s=10.0)
    assert evicted_at[1] - evicted_at[0] == 10.0 and evicted_at[-1] - evicted_at[-2] > 0.9 * 10.0 / LOAD_SHARE


def test_another_version_takes_the_place_of_a_model() -> None:
    """It goes although it is pinned, and comes back with other needs; what waits meanwhile waits for that."""
    found = models(1, 1, budget=3, pinned=(0,))
    assert found.decide(0.0) == [Load(0)]
    found.has_loaded(0, 1.0)
    found.use(0, "api", 2.0, is_open=True)
    found.leave(0, 3.0)
    assert found.decide(3.0) == [] and found.models[0].state == "leaving"
    found.has_ended(0, 4.0)
    found.replaced(0, (2 * GB,), 4.0, is_wanted=True)
    assert found.decide(4.0) == [Load(0)] and found.used() == (2 * GB,)
    assert found.models[0].terms.is_pinned

    found.has_ended(0, 5.0, "It has no weights.")
    found.replaced(0, (GB,), 5.0, is_wanted=True)
    assert found.decide(5.0) == [Load(0)], "the version before does not wait"
    found.has_loaded(0, 6.0)
    found.replaced(1, (2 * GB,), 6.0, is_wanted=False)
    assert found.decide(1e6) == [], "nobody uses it"
    found.ask(1, 7.0, is_loaded=True, is_pinned=None)
    assert found.decide(7.0) == [Load(1)] and found.used() == (3 * GB,)


def test_a_model_that_can_never_be_loaded_is_known_before() -> None:
    terms = [Terms((4,), is_pinned=True), Terms((6,)), Terms((7,)), Terms((1,))]
    assert misfits([10], terms) == [2] and misfits([3], terms) == [0, 1, 2, 3]


# ── random histories ─────────────────────────────────────────────────────────────────────────────────────────────────

DRAIN_S = 8.0  # what is open after this long waits for the model's next load
HORIZON_S = 600.0
MAX_TURNS = 30_000


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """Clients, and what carries out the decisions."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        num = rng.randint(2, 6)
        num_gpus = rng.choice((0, 0, 1, 2))
        needs = [(rng.randint(1, 4), *(rng.choice((0, 2, 3, 5)) for _ in range(num_gpus))) for _ in range(num)]
        pinned = rng.random() < 0.3
        self.budgets = [max(of) + (of[0] if pinned else 0) + rng.randint(0, 3) for of in zip(*needs, strict=True)]
        keep_alive_s = [rng.choice((math.inf, math.inf, 20.0, 0.0)) for _ in needs]
        terms = [Terms(n, pinned and i == 0, k) for i, (n, k) in enumerate(zip(needs, keep_alive_s, strict=True))]
        self.load_s = [rng.choice((0.5, 2.0, 10.0, 30.0)) for _ in needs]
        self.fails = rng.choice((0.0, 0.0, 0.2))
        self.now = 0.0
        self.found = Residency(self.budgets, terms, 0.0)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.waiting: list[list[tuple[float, float]]] = [[] for _ in needs]  # (asked at, seconds that it takes)
        self.num_open = [0] * num
        self.loads: list[tuple[float, float]] = []  # those for which others went: begin, seconds
        self.present: set[int] = set()  # models that take memory
        self.evictions = 0  # models that went for others since the last load began
        self.longest_s = 0.0
        self.num_answered = 0
        rate = rng.choice((0.05, 0.3, 2.0))
        popular = rng.choices(range(num), k=2)
        at = 0.0
        while (at := at + rng.expovariate(rate)) < HORIZON_S:
            number = rng.choice(popular) if rng.random() < 0.6 else rng.randrange(num)
            takes_s = rng.expovariate(1 / rng.choice((0.2, 3.0, 20.0)))
            self.after(at, lambda number=number, takes_s=takes_s: self.ask(number, takes_s))  # type: ignore[misc]

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now + seconds, self.num_events, call))

    def ask(self, number: int, takes_s: float) -> None:
        model = self.found.models[number]
        if model.state == "failed":
            return  # it is refused
        self.waiting[number].append((self.now, takes_s))
        self.use(number)
        self.serve(number)

    def use(self, number: int) -> None:
        is_open = bool(self.waiting[number] or self.num_open[number])
        self.found.use(number, "api", self.now, is_open=is_open)

    def serve(self, number: int) -> None:
        if self.found.models[number].state != "loaded":
            return
        for asked_at, takes_s in self.waiting[number]:
            self.longest_s = max(self.longest_s, self.now - asked_at)
            self.num_open[number] += 1
            self.after(takes_s, lambda: self.end(number))
        self.waiting[number].clear()

    def end(self, number: int) -> None:
        self.num_open[number] -= 1
        self.num_answered += 1
        self.use(number)

    def decide(self) -> None:
        states = [(model.state, model.since, model.last_used) for model in self.found.models]
        wanted = [model.wanted_since for model in self.found.models if model.wanted_since is not None]
        for action in self.found.decide(self.now):
            number = action.number
            state, since, last_used = states[number]
            model = self.found.models[number]
            match action:
                case Load():
                    if sum(each.state == "loading" for each in self.found.models) > 1:
                        raise Violation("two models are loaded at once")
                    if self.evictions:
                        self.loads.append((self.now, self.load_s[number]))
                    self.evictions = 0
                    self.after(self.load_s[number], lambda number=number: self.loaded(number))  # type: ignore[misc]
                case Unload():
                    expires = not model.users and self.now >= last_used + model.keep_alive_s
                    if model.terms.is_pinned:
                        raise Violation("a pinned model goes")
                    if model.users and (not wanted or self.now < max(min(wanted), since) + PATIENCE_S - 1e-6):
                        raise Violation("a model goes that answers, though nobody has waited for long")
                    if state != "loaded":
                        raise Violation("a model goes twice")
                    self.evictions += not expires
                    end = self.now + DRAIN_S
                    self.after(0.0, lambda number=number, end=end: self.drain(number, end))  # type: ignore[misc]
        self.present |= {model.number for model in self.found.models if model.state == "loading"}
        for place, budget in enumerate(self.budgets):
            if sum(self.found.models[number].terms.needs[place] for number in self.present) > budget:
                raise Violation("the models need more memory than there is")
        for model in self.found.models:
            is_idle = model.state == "loaded" and not model.users and not model.terms.is_pinned
            if is_idle and self.now > model.last_used + model.keep_alive_s + 1e-6:
                raise Violation("a model stays longer than it may")

    def drain(self, number: int, until: float) -> None:
        if self.num_open[number] and self.now < until:
            self.after(0.1, lambda: self.drain(number, until))
        else:
            self.present.discard(number)
            self.found.has_ended(number, self.now)

    def loaded(self, number: int) -> None:
        if self.rng.random() < self.fails:
            self.waiting[number].clear()
            self.present.discard(number)
            self.found.has_ended(number, self.now, "It does not load.")
            self.use(number)
            return
        self.found.has_loaded(number, self.now)
        self.serve(number)
        self.use(number)

    def play(self) -> None:
        again_at, num_turns = 0.0, 0
        while self.events or again_at < math.inf:
            if self.events and self.events[0][0] <= again_at:
                self.now, _, call = heapq.heappop(self.events)
                call()
            else:
                self.now = again_at
            self.decide()
            again_at = self.found.decide_again_at(self.now)
            num_turns += 1
            if self.now > 20 * HORIZON_S or num_turns > MAX_TURNS:
                raise Violation("requests wait for ever")
        self.check()

    def check(self) -> None:
        if any(self.waiting) or any(self.num_open):
            raise Violation("requests were not answered")
        for first, (begin, _) in enumerate(self.loads):
            taken_s = 0.0
            for at, seconds in self.loads[first:]:
                allowed_s = LOAD_BURST_S + (at - begin) * LOAD_SHARE
                if taken_s > allowed_s + 1e-6:
                    raise Violation("loading takes more than its share of the time")
                taken_s += seconds
        turn_s = max(self.load_s) / LOAD_SHARE + max(self.load_s) + DRAIN_S + 2 * PATIENCE_S + LOAD_BURST_S
        if self.longest_s > 2 * len(self.load_s) * turn_s:
            raise Violation(f"a request has waited for {self.longest_s:.0f} s")


SEEDS = range(40)


def is_found() -> bool:
    """Whether a history violates an invariant."""
    for seed in SEEDS:
        try:
            World(seed).play()
        except AssertionError:
            return True
    return False


def test_histories() -> None:
    worlds = [World(seed) for seed in SEEDS]
    for seed, world in enumerate(worlds):
        try:
            world.play()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert sum(len(world.loads) > 5 for world in worlds) > 10, "models go for others again and again"
    assert sum(world.num_answered for world in worlds) > 2000


def _no_memory(self: Residency, wanted: Resident, *, with_leaving: bool = True) -> tuple[int, ...]:
    return (0,)


MUTANTS: dict[str, tuple[object, str, object]] = {
    "memory is not looked at": (Residency, "_lack", _no_memory),
    "leaving models count as gone": (
        Residency,
        "used",
        lambda self, with_leaving=True: residency._sum(
            self.budgets, [m.terms for m in self.models if m.state in ("loading", "loaded")]
        ),
    ),
    "only the host's memory counts": (
        Residency,
        "_lack",
        lambda self, wanted, with_leaving=True: (
            self.used(with_leaving=with_leaving)[0] + wanted.terms.needs[0] - self.budgets[0],
            *[0 for _ in self.budgets[1:]],
        ),
    ),
    "loads are not charged": (Residency, "_charge", lambda self, model, now: None),
    "loads are never paid off": (Residency, "_debt", lambda self, now: self._debt_s),
    "busy models go at once": (residency, "PATIENCE_S", 0.0),
    "busy models never go": (residency, "PATIENCE_S", math.inf),
    "keep_alive is forgotten": (Resident, "expires_at", lambda self: math.inf),
    "models expire while they answer": (Resident, "expires_at", lambda self: self.last_used + self.keep_alive_s),
    "a load is not waited for": (Residency, "_first_wanted", lambda self: next(
        (m for m in self.models if m.state == "loading" or m.wanted_since is not None), None)),
    "the last to ask comes first": (Residency, "_first_wanted", lambda self: max(
        (m for m in self.models if m.wanted_since is not None), key=lambda m: m.wanted_since, default=None)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_histories_find_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(place, attribute, mutant)
    assert is_found()

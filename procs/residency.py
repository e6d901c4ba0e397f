"""Which of several models are loaded: a pure decision, which `procs/models.py` carries out.

Knows each model's need of memory, who has open requests for it, and when it was used last. Reads no clock: every call
is given the time in seconds on any clock. There is the host's memory, and that of each GPU if there are some; each has
a budget. A model's memory counts from the decision to load it until its processes have ended, so the sum of the needs
never exceeds a budget.

Models are loaded one at a time, in the order in which they were asked for. If memory is short, the models that were
used least recently are unloaded: at once if they are idle, and after `PATIENCE_S` also if they are busy. Loads for
which another model must go take at most `LOAD_SHARE` of the time, after a burst of `LOAD_BURST_S`: however requests
alternate, most of the time is spent on answers. If nobody waits any more for the model that others went for, the next
load of any model counts instead. Requests wait meanwhile, and all that wait for a model are answered when it is loaded.
"""

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

PATIENCE_S = 10.0  # a model that is asked for waits this long for others to be idle; a busy one may stay this long
LOAD_SHARE = 0.25  # of the time that loads for which others must go may take
LOAD_BURST_S = 60.0  # of such loads before that holds
RETRY_S = 10.0  # after a failure of a model, doubled with each further one
_MAX_RETRY_S = 300.0

State = Literal["unloaded", "loading", "loaded", "leaving", "failed"]


class Terms(Struct, frozen=True):
    """What is known of a model before it is loaded."""

    needs: tuple[int, ...]  # bytes of each memory
    is_pinned: bool = False  # loaded at the start, and never unloaded
    keep_alive_s: float = math.inf  # it is unloaded when it was idle for so long

    @property
    def need_bytes(self) -> int:
        """Of the memory in which it computes: the GPUs', or the host's."""
        return sum(self.needs[1:]) or self.needs[0]


class Load(Struct, frozen=True):
    """Start it; `Residency.has_loaded` or `has_ended` follows."""

    number: int


class Unload(Struct, frozen=True):
    """Send it nothing new, let its requests end, and end it; `Residency.has_ended` follows."""

    number: int


class Resident(Struct):
    """One model; only `Residency` changes it."""

    number: int
    terms: Terms
    keep_alive_s: float  # what its last request asked for, or its terms
    state: State = "unloaded"
    since: float = 0.0  # when the state began
    last_used: float = 0.0  # when a request of it ended or came
    users: set[str] = set()  # those that have open requests for it; never empty while it answers
    wanted_since: float | None = None  # it is asked for and not loaded
    load_s: float = 0.0  # what its last load took; 0: none has ended
    evicts: bool = False  # others had to go before its present load
    problem: str = ""  # why it failed last
    is_asked: bool = False  # an administrator wants it, though nobody uses it
    num_failures: int = 0  # since it was loaded last
    retry_at: float = 0.0  # a model that has failed is not loaded before

    @property
    def takes_memory(self) -> bool:
        return self.state in ("loading", "loaded", "leaving")

    def expires_at(self) -> float:
        """When it is unloaded if it is not used any more; inf: not by itself."""
        is_kept = self.terms.is_pinned or self.users or self.state != "loaded"
        return math.inf if is_kept else self.last_used + self.keep_alive_s


class Residency:
    """The models of one launch."""

    def __init__(self, budgets: Sequence[int], terms: Sequence[Terms], now: float) -> None:
        """`budgets`: bytes of each memory. Each model must fit into them beside those that are pinned (`misfits`)."""
        self.budgets = tuple(budgets)
        self.models = [Resident(number, each, each.keep_alive_s, since=now) for number, each in enumerate(terms)]
        for model in self.models:
            model.wanted_since = now if model.terms.is_pinned else None
        self._has_evicted = False  # models had to go since the last load began, for whichever other one
        self._debt_s = 0.0  # of loads for which others had to go, beyond their share of the time
        self._debt_at = now

    def used(self, *, with_leaving: bool = True) -> tuple[int, ...]:
        """What the models that take memory need of each, in bytes. Without `with_leaving`: when those that leave have
        ended."""
        taking = [each for each in self.models if each.takes_memory and (with_leaving or each.state != "leaving")]
        return _sum(self.budgets, [model.terms for model in taking])

    def fits(self, model: Resident) -> bool:
        """It can be loaded without unloading another one."""
        return not model.takes_memory and _fits(self._lack(model))

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    def use(self, number: int, user: str, now: float, *, is_open: bool, keep_alive_s: float | None = None) -> None:
        """`user` has open requests for this model, or has no more. `keep_alive_s`: of its last request."""
        model = self.models[number]
        (model.users.add if is_open else model.users.discard)(user)
        if keep_alive_s is not None and (is_open or model.takes_memory):
            model.keep_alive_s = keep_alive_s
        model.last_used = now
        self._want(model, now)

    def ask(self, number: int, now: float, *, is_loaded: bool | None, is_pinned: bool | None) -> str:
        """An administrator loads or unloads a model, or pins it or not; None: as it is. A model that is unloaded stays
        as long as it answers. Returns why not, in one sentence, or nothing."""
        model = self.models[number]
        terms = replace(model.terms, is_pinned=model.terms.is_pinned if is_pinned is None else is_pinned)
        if terms.is_pinned and is_loaded is False:
            return "The model is pinned; unpin it to unload it."
        others = [terms if each is model else each.terms for each in self.models]
        if is_pinned and misfits(self.budgets, others):
            return "The other models would not fit into memory beside it; it cannot be pinned."
        model.terms = terms
        if is_loaded:
            model.retry_at = now
            model.is_asked = model.state in ("unloaded", "leaving", "failed")
        elif is_loaded is False:
            model.is_asked = False
            model.keep_alive_s = 0.0
        self._want(model, now)
        return ""

    def leave(self, number: int, now: float) -> None:
        """A loaded model ends because another version takes its place, pinned or not; `has_ended` follows."""
        assert self.models[number].state == "loaded", self.models[number]
        self._enter(self.models[number], "leaving", now)

    def replaced(self, number: int, needs: tuple[int, ...], now: float, *, is_wanted: bool) -> None:
        """A model that takes no memory has another version with these needs. `is_wanted`: it is to be loaded though
        nobody uses it."""
        model = self.models[number]
        assert not model.takes_memory, model
        model.terms = replace(model.terms, needs=needs)
        model.num_failures, model.problem = 0, ""
        model.retry_at = now
        model.is_asked = model.is_asked or is_wanted
        self._want(model, now)

    def forget(self, user: str, now: float) -> None:
        """`user` is gone, and its requests with it."""
        for model in self.models:
            if user in model.users:
                self.use(model.number, user, now, is_open=False)

    def has_loaded(self, number: int, now: float) -> None:
        """A `Load` has succeeded."""
        model = self.models[number]
        assert model.state == "loading", model
        model.load_s = now - model.since
        self._charge(model, now)
        model.num_failures, model.problem = 0, ""
        model.last_used = now
        self._enter(model, "loaded", now)

    def has_ended(self, number: int, now: float, problem: str = "") -> None:
        """Its processes have ended and its memory is free. `problem`: one sentence, unless it was unloaded."""
        model = self.models[number]
        assert model.takes_memory, model
        if model.state == "loading":
            self._charge(model, now)
        if problem:
            model.problem = problem
            model.retry_at = now + min(RETRY_S * 2**model.num_failures, _MAX_RETRY_S)
            model.num_failures += 1
        model.keep_alive_s = model.terms.keep_alive_s
        self._enter(model, "failed" if problem else "unloaded", now)

    # ── what to do ───────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, now: float) -> list[Load | Unload]:
        """What to begin now, in this order. It counts as begun."""
        actions: list[Load | Unload] = []
        for model in self.models:
            if model.state == "failed" and now >= model.retry_at:
                self._enter(model, "unloaded", now)
            if now >= model.expires_at():
                actions.append(self._unload(model, now))
        wanted = self._first_wanted()
        if wanted is None or any(model.state == "loading" for model in self.models):
            return actions
        if _fits(self._lack(wanted)):
            wanted.evicts, self._has_evicted = self._has_evicted, False
            self._enter(wanted, "loading", now)
            actions.append(Load(wanted.number))
        elif not _fits(self._lack(wanted, with_leaving=False)) and self._may_evict_at(now) <= now:
            for victim in self._victims(wanted, now):
                self._has_evicted = True
                actions.append(self._unload(victim, now))
        return actions

    def decide_again_at(self, now: float) -> float:
        """When `decide` may find something to do although nothing happens; inf: never."""
        times = [model.expires_at() for model in self.models]
        times += [model.retry_at for model in self.models if model.state == "failed"]
        if (wanted := self._first_wanted()) is not None and wanted.wanted_since is not None:
            stays = [model.since + PATIENCE_S for model in self.models if model.state == "loaded" and model.users]
            times += [self._may_evict_at(now), wanted.wanted_since + PATIENCE_S, *stays]
        return min((time for time in times if time > now), default=math.inf)

    # ── shared ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, model: Resident, state: State, now: float) -> None:
        model.state, model.since = state, now
        self._want(model, now)

    def _want(self, model: Resident, now: float) -> None:
        """Notes whether it is asked for, and since when."""
        model.is_asked = model.is_asked and model.state != "loading"
        is_wanted = model.state == "unloaded" and (bool(model.users) or model.terms.is_pinned or model.is_asked)
        if not is_wanted:
            model.wanted_since = None
        elif model.wanted_since is None:
            model.wanted_since = now

    def _first_wanted(self) -> Resident | None:
        wanted = [model for model in self.models if model.wanted_since is not None]
        return min(wanted, key=lambda model: (model.wanted_since, model.number), default=None)

    def _unload(self, model: Resident, now: float) -> Unload:
        self._enter(model, "leaving", now)
        return Unload(model.number)

    def _lack(self, wanted: Resident, *, with_leaving: bool = True) -> tuple[int, ...]:
        """Bytes of each memory that are missing for this model; less than 0: there are more than enough."""
        each = zip(self.used(with_leaving=with_leaving), wanted.terms.needs, self.budgets, strict=True)
        return tuple(used + need - budget for used, need, budget in each)

    def _victims(self, wanted: Resident, now: float) -> list[Resident]:
        """The models to unload for this one; none, if those that may go are not enough."""
        lack = self._lack(wanted, with_leaving=False)
        assert wanted.wanted_since is not None
        is_patient = now >= wanted.wanted_since + PATIENCE_S
        may_go = [
            model
            for model in self.models
            if model.state == "loaded"
            and not model.terms.is_pinned
            and (not model.users or (is_patient and now >= model.since + PATIENCE_S))
        ]
        may_go.sort(key=lambda model: (bool(model.users), model.last_used))
        chosen: list[Resident] = []
        for model in may_go:
            if any(short > 0 and need for short, need in zip(_less(lack, chosen), model.terms.needs, strict=True)):
                chosen.append(model)
        if not _fits(_less(lack, chosen)):
            return []
        for model in reversed(chosen[:-1]):  # what a larger one has made superfluous stays
            if _fits(_less(lack, [each for each in chosen if each is not model])):
                chosen.remove(model)
        return chosen

    def _charge(self, model: Resident, now: float) -> None:
        """Its load has ended."""
        if model.evicts:
            self._debt_s, self._debt_at = self._debt(now) + now - model.since, now
            model.evicts = False

    def _debt(self, now: float) -> float:
        return max(0.0, self._debt_s - (now - self._debt_at) * LOAD_SHARE)

    def _may_evict_at(self, now: float) -> float:
        """When others may go for a load."""
        return now + max(0.0, self._debt(now) - LOAD_BURST_S) / LOAD_SHARE


def misfits(budgets: Sequence[int], terms: Sequence[Terms]) -> list[int]:
    """The models that can never be loaded: more than the budgets leave beside the pinned ones."""
    pinned = [each for each in terms if each.is_pinned]
    return [
        number
        for number, each in enumerate(terms)
        if any(
            need > budget
            for need, budget in zip(_sum(budgets, pinned if each.is_pinned else [*pinned, each]), budgets, strict=True)
        )
    ]


def _sum(budgets: Sequence[int], terms: Sequence[Terms]) -> tuple[int, ...]:
    """What these need of each memory together."""
    return tuple(sum(each.needs[place] for each in terms) for place in range(len(budgets)))


def _less(lack: Sequence[int], models: Sequence[Resident]) -> tuple[int, ...]:
    """What is missing when these are gone."""
    freed = _sum(lack, [model.terms for model in models])
    return tuple(short - less for short, less in zip(lack, freed, strict=True))


def _fits(lack: Sequence[int]) -> bool:
    return max(lack) <= 0

"""Which engine gets a request: decided from what the router knows of its engines, without I/O and without a clock.

An engine that has computed the beginning of a prompt should get it again. No engine should have much more to do than
the others. And several routers in front of the same engines should agree, although they share nothing. So the choice
asks in this order, and takes the first engine that is not too busy:

1. the engine that this router has sent the longest beginning of the prompt (`Prefixes`). A beginning that many engines
   have been sent, such as a system prompt, does not decide, nor does one that lacks the conversation's first turn. If
   the engine is leaving, the one that started last takes its place: in a rolling upgrade that is a new one, so that a
   conversation moves only once;
2. the conversation's home: its place on a ring of hashes, which every router computes alike. With the bound on the load
   this is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv:1608.01350). A prompt whose
   conversation is not known has the home of its beginning, up to the first block that not many engines have been sent:
   all routers learn what many engines have, so they agree on that block as well;
3. the least busy of all engines, or of a sample of them when there are many (Mitzenmacher, "The Power of Two Choices in
   Randomized Load Balancing", 2001).

What other routers have sent to an engine is known from its reports. So that several routers do not all run to the
engine that was the idlest at its last report, each takes the others to have done since then, in proportion, what it has
done itself.

The cost of a choice does not grow with the number of engines.

Engines may have roles. One with the role `prefill` gets streams only if no other engine is there; it computes prompts
whose KV another engine then loads. `legs` gives a prompt to such an engine if that costs less than computing it where
the stream is to be: a prompt there holds up every stream beside it.

Engines may serve several models, of which not all are loaded, or different ones. `presence.py` says which of them get
a request for a model; the choice is then among these.
"""

import bisect
import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Generic, TypeVar

from msgspec import Struct

from .prefixes import MAX_HOLDERS, Prefixes
from .presence import Presence, best_for
from .stable_hash import stable_hash

SPREAD = 2.0  # standard deviations: loads differ by chance as counts of independent arrivals do
SLACK = 4  # requests more than that with which an engine still gets prompts whose beginning it has
SAMPLE = 8  # engines that are compared when neither a beginning nor a home decides
RAMP_S = 10.0  # until an engine that has just started gets as much as the others
SLOW_FACTOR = 2.0  # an engine so many times slower than the median gets less
MAX_SLOWNESS = 10.0
ECHO = 0.5  # of what other routers would do if they did as this one; with all of it, its chance would count as theirs
PREFILL = "prefill"  # the role of an engine that computes prompts for others
LEAST_REMOTE = 256  # tokens that an engine lacks of a prompt for which another one is worth asking
_RAMP_START = 0.1
_PACE_WEIGHT = 0.3  # of the newest measurement
_PLACES = 64  # of an engine on the ring; more of them make more equal shares
_WALK = 8  # engines on the ring that are asked, the home first


class Conversation(Struct, frozen=True):
    """What tells that a prompt continues an earlier one."""

    key: int  # below 2**64; the same for all its prompts, in every router
    root: int  # the number of the prompt's blocks that its first prompt had as well


class Condition(Enum):
    ABLE = "able"
    SILENT = "silent"  # it does not answer in time
    OUT = "out"  # it cannot be reached, or says that it takes no requests


class Member:
    """An engine as the choice sees it. Only `Choice` changes the fields."""

    def __init__(self, name: str) -> None:
        """`name`: decides its places on the ring, so it is the same in every router."""
        self.name = name
        self.incarnation = -1  # another one after each loss, as its prefix cache is then empty
        self.condition = Condition.OUT
        self.is_leaving = False
        self.num_open = 0  # requests of this router
        self.num_foreign = 0  # other requests, by its last report
        self.num_open_then = 0  # `num_open` at that report
        self.echo = 0.0  # requests that other routers send it for one of this router
        self.num_sent = 0
        self.started_at: float | None = None  # None: before this router
        self.pace = 0.0  # seconds of a stream for a token, smoothed; 0.0: unknown
        self.slowness = 1.0  # how many times slower than the median, if that is SLOW_FACTOR or more
        self.last_turn = 0  # the number of the choice that sent it something
        self.counted = 0  # its part of the candidates' total load
        self.role = "both"  # or "prefill", "decode"
        self.prompt_ms = 0.0  # to compute a token of a prompt; 0.0: unknown
        self.load_ms = 0.0  # to load a token's KV from another engine; 0.0: unknown
        self.num_due_tokens = (
            0  # of prompts that it computes for other engines at the moment, as far as this router knows
        )
        self.models: Mapping[str, Presence] = {}  # by name

    @property
    def is_able(self) -> bool:
        """Whether it gets new requests, as far as it is known."""
        return self.condition is Condition.ABLE and not self.is_leaving

    @property
    def load(self) -> int:
        """Requests, as far as it can be known: since the last report other routers have done as this one has."""
        return self.num_open + max(0, self.num_foreign + round(self.echo * (self.num_open - self.num_open_then)))

    def ramp(self, now: float) -> float:
        """Its share of what others get: less than 1 while it has only just started."""
        if self.started_at is None:
            return 1.0
        return min(1.0, _RAMP_START + (now - self.started_at) / RAMP_S)

    def pressure(self, now: float) -> float:
        """The load that it would have if it were as fast and as warm as the others."""
        return self.load * self.slowness / self.ramp(now)


M = TypeVar("M", bound=Member)


class Choice(Generic[M]):
    """The engines of one router.

    If fewer than half of the engines are able, those that are only silent get requests as well: it is then more likely
    that the router or its network is slow than that most engines have failed at once.
    """

    def __init__(self, *, seed: int | None = None, prefixes: Prefixes | None = None) -> None:
        self.members: list[M] = []
        self.num_blocks_asked = 0
        self.num_blocks_met = 0
        self._prefixes = Prefixes() if prefixes is None else prefixes
        # Of prompts computed for other engines: in one table, those engines would be forgotten for these.
        self._prefilled = Prefixes()
        self._random = random.Random(seed)
        self._by_incarnation: dict[int, M] = {}
        self._num_incarnations = 0
        self._num_turns = 0
        self._is_arranged = self._is_selected = True  # whether the ring and the candidates are those of the members
        self._candidates: list[M] = []
        self._prefillers: list[M] = []  # able engines of that role
        self._apart: set[M] = set()  # engines of that role, while others get the streams
        self._is_candidate: set[M] = set()
        self._has_all_models = True  # each candidate has all models that any of them has
        self._models: dict[str, None] = {}  # of all candidates
        self._total = 0  # load of the candidates
        self._last_started: M | None = None
        self._ring: list[M] = []
        self._places: list[int] = []  # parallel, ascending

    # ── what it is told ──────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, member: M) -> None:
        """It gets requests once it is able."""
        self.members.append(member)
        self._begin_incarnation(member)
        self._is_arranged = self._is_selected = False

    def remove(self, member: M) -> None:
        self.members.remove(member)
        self._by_incarnation.pop(member.incarnation, None)
        if self._last_started is member:
            self._last_started = None
        self._is_arranged = self._is_selected = False

    def started(self, member: M, now: float) -> None:
        """The engine has started just now: it gets its share little by little."""
        member.started_at = now
        self._last_started = member

    def turned(self, member: M, condition: Condition) -> None:
        if member.condition is not condition:
            member.condition = condition
            self._is_selected = False

    def leaves(self, member: M, is_leaving: bool) -> None:
        """`is_leaving`: it gets no new requests, whatever its condition."""
        if member.is_leaving is not is_leaving:
            member.is_leaving = is_leaving
            self._is_selected = False

    def lost(self, member: M) -> None:
        """The engine may have died, and its prefix cache with it."""
        self._begin_incarnation(member)
        self.turned(member, Condition.OUT)

    def described(self, member: M, role: str, prompt_ms: float, load_ms: float) -> None:
        """What the engine says of itself."""
        if member.role != role:
            member.role = role
            self._is_selected = False
        member.prompt_ms, member.load_ms = prompt_ms, load_ms

    def hosts(self, member: M, models: Mapping[str, Presence]) -> None:
        """What the engine says of its models."""
        if member.models != models:
            member.models = models
            self._is_selected = False

    def opened(self, member: M) -> None:
        """A request was sent to the engine."""
        member.num_open += 1
        member.num_sent += 1
        self._count(member)

    def closed(self, member: M) -> None:
        """The request has ended."""
        member.num_open -= 1
        self._count(member)

    def reported(self, member: M, load: int) -> None:
        """`load`: all requests of the engine, by its own count."""
        member.num_foreign = max(0, load - member.num_open)
        member.num_open_then = member.num_open
        self._count(member)

    def paced(self, member: M, seconds_per_token: float) -> None:
        """What the engine's streams have lately taken for a token, on average."""
        old = member.pace or seconds_per_token
        member.pace = old + _PACE_WEIGHT * (seconds_per_token - old)

    def compare(self) -> None:
        """Finds the slow engines, and how much other routers send. Call it about once a second."""
        self._select()
        known = [member.pace for member in self._candidates if member.pace]
        median = statistics.median(known) if len(known) > 1 else 0.0
        num_open = sum(member.num_open for member in self.members)
        num_foreign = sum(member.num_foreign for member in self.members)
        for member in self.members:
            member.echo = ECHO * num_foreign / max(1, num_open)
            self._count(member)
            slowness = member.pace / median if median else 1.0
            member.slowness = min(slowness, MAX_SLOWNESS) if slowness >= SLOW_FACTOR else 1.0

    # ── what it is asked ─────────────────────────────────────────────────────────────────────────────────────────────

    def choose(
        self,
        blocks: Sequence[int],
        conversation: Conversation | None,
        now: float,
        avoid: Collection[M] = (),
        key_of: Callable[[int], int] | None = None,
    ) -> M | None:
        """The engine for a request; None: no engine takes it. `blocks`: of its prompt (`prefix_blocks`).
        `conversation`: None if nothing tells which one it belongs to. `key_of`: of a number of leading
        blocks, the same in every router (`key_of_beginning`)."""
        self._select()
        root = 0 if conversation is None else conversation.root
        chosen, num_met = self._with_prefix(blocks, root if len(blocks) > root > 0 else 0, now, avoid)
        if chosen is None:
            chosen = self._at_home(blocks, conversation, key_of, now, avoid)
        if chosen is None:
            chosen = self._least_busy(now, avoid)
        if chosen is None:
            return None
        self._num_turns += 1
        chosen.last_turn = self._num_turns
        self.num_blocks_asked += len(blocks)
        self.num_blocks_met += num_met
        self._prefixes.add(blocks, chosen.incarnation)
        return chosen

    def legs(
        self,
        blocks: Sequence[int],
        conversation: Conversation | None,
        num_tokens: int,
        now: float,
        avoid: Collection[M] = (),
        key_of: Callable[[int], int] | None = None,
        model: str | None = None,
    ) -> tuple[M | None, M | None]:
        """The engine for a request whose prompt has so many tokens, as `choose`, and the one that computes the prompt
        for it; None: it does so itself. `model`: that the request names; empty: the first; None: it is for none."""
        self._select()
        model = None if model is None else self._known(model)
        avoid = self._without(model, now, avoid)
        met = {**self._prefixes.matches(blocks), **self._prefilled.matches(blocks)} if self._prefillers else {}
        chosen = self.choose(blocks, conversation, now, avoid, key_of)
        if chosen is not None and chosen.models.get(model or "", Presence.LOADED) is not Presence.LOADED:
            self.hosts(chosen, {**chosen.models, model or "": Presence.LOADED})  # it is about to be, before it says so
        if chosen is None or chosen.role == PREFILL or num_tokens < LEAST_REMOTE:
            return chosen, None
        return chosen, self._prefiller(chosen, blocks, met, num_tokens, now, avoid)

    def takes(self, member: M, slack: int, now: float, avoid: Collection[M] = ()) -> bool:
        """Whether it may be chosen, as of the last choice, and has at most its share and `slack` requests."""
        if member not in self._is_candidate or member in avoid:
            return False
        num_others = len(self._candidates) - 1
        mean = (self._total - member.load) / max(1, num_others)
        return not num_others or member.pressure(now) <= mean + SPREAD * math.sqrt(mean) + slack

    def _known(self, model: str) -> str:
        """The name by which engines know a model."""
        if not model:
            return next(iter(self._models), "")
        return model if model in self._models else model.removesuffix(":latest")  # as Ollama's clients call it

    def _without(self, model: str | None, now: float, avoid: Collection[M]) -> Collection[M]:
        """`avoid`, and the engines that should not get a request for this model."""
        if model is None or self._has_all_models:
            return avoid
        able = [one for one in self._candidates if one not in avoid]
        best = best_for(model, able, lambda one: self.takes(one, SLACK, now, avoid))
        return {*avoid, *(one for one in self.members if one not in best)} if best else avoid

    def _with_prefix(self, blocks: Sequence[int], root: int, now: float, avoid: Collection[M]) -> tuple[M | None, int]:
        """The engine that was sent the longest beginning, or the heir of one that leaves, and how long that is. `root`:
        blocks of the conversation's first prompt, which a beginning must have; 0: none."""
        known = self._by_incarnation
        met = self._prefixes.matches(blocks)
        matches = {known[i]: num for i, num in met.items() if i in known and known[i] not in self._apart}
        longest = max(matches.values(), default=0)
        num_able_to_hold = len(self.members) - len(self._apart)
        if not root and list(matches.values()).count(longest) >= min(MAX_HOLDERS, num_able_to_hold) > 1:
            return None, 0  # many have it
        best, rank, num_leaving = None, (0, 0.0, 0), 0
        for member, num_met in matches.items():
            if num_met < root:
                continue
            if member.is_leaving:
                num_leaving = max(num_leaving, num_met)
            elif self.takes(member, SLACK, now, avoid):
                own = (num_met, -member.pressure(now), -member.last_turn)
                if best is None or own > rank:
                    best, rank = member, own
        heir = self._last_started
        if num_leaving > rank[0] and heir is not None and self.takes(heir, SLACK, now, avoid):
            return heir, 0
        return best, rank[0]

    def _at_home(
        self,
        blocks: Sequence[int],
        conversation: Conversation | None,
        key_of: Callable[[int], int] | None,
        now: float,
        avoid: Collection[M],
    ) -> M | None:
        """The first engine on the ring that has room for more than its share. A prompt of no known conversation is one
        with all that have its first block that is not everywhere."""
        slack = 0
        if conversation is not None:
            key = conversation.key
            slack = SLACK if len(blocks) > conversation.root else 0
        else:
            num_common = self._prefixes.num_common(blocks, min(MAX_HOLDERS, len(self._candidates)))
            if key_of is None or num_common == len(blocks):
                return None
            key = key_of(num_common + 1)
        self._arrange()
        at, asked = bisect.bisect_left(self._places, key), set[M]()
        for offset in range(len(self._ring)):
            member = self._ring[(at + offset) % len(self._ring)]
            if member in asked:
                continue
            if self.takes(member, slack, now, avoid):
                return member
            asked.add(member)
            if len(asked) == _WALK:
                break
        return None

    def _least_busy(self, now: float, avoid: Collection[M]) -> M | None:
        some: Sequence[M] = self._candidates
        if len(some) > SAMPLE and not avoid:
            some = self._random.choices(some, k=SAMPLE)
        able = (member for member in some if member not in avoid)
        return min(able, key=lambda member: (member.pressure(now), member.last_turn), default=None)

    def _prefiller(
        self,
        chosen: M,
        blocks: Sequence[int],
        met: Mapping[int, int],
        num_tokens: int,
        now: float,
        avoid: Collection[M],
    ) -> M | None:
        """The engine that computes the prompt with less delay for all: a prompt beside streams delays each of them, and
        one elsewhere waits for those before it, and is loaded."""

        def lacking(member: M) -> float:
            return num_tokens * (1 - met.get(member.incarnation, 0) / max(1, len(blocks)))

        rest = lacking(chosen)
        if rest < LEAST_REMOTE:
            return None
        known = [one.prompt_ms for one in (chosen, *self._prefillers) if one.prompt_ms]
        usual = known[0] if known else 1.0
        some: Sequence[M] = self._prefillers
        if len(some) > SAMPLE:
            holders = [one for one in map(self._by_incarnation.get, met) if one is not None and one in some]
            some = [*self._random.choices(some, k=SAMPLE), *holders]
        costs = [
            ((one.num_due_tokens + lacking(one)) * (one.prompt_ms or usual) * one.slowness / one.ramp(now), one)
            for one in some
            if one not in avoid and one is not chosen
        ]
        if not costs:
            return None
        there, best = min(costs, key=lambda cost: (cost[0], cost[1].last_turn))
        here = rest * (chosen.prompt_ms or usual) * chosen.slowness * (1 + chosen.load)
        if here <= there + rest * chosen.load_ms:
            return None
        self._num_turns += 1
        best.last_turn = self._num_turns
        self._prefilled.add(blocks, best.incarnation)
        return best

    # ── its tables ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_incarnation(self, member: M) -> None:
        self._by_incarnation.pop(member.incarnation, None)
        member.incarnation = self._num_incarnations
        self._num_incarnations += 1
        self._by_incarnation[member.incarnation] = member

    def _arrange(self) -> None:
        if self._is_arranged:
            return
        self._is_arranged = True
        places = sorted(
            ((_place(member.name, i), member) for member in self.members for i in range(_PLACES)),
            key=lambda place: place[0],
        )
        self._places = [place for place, _ in places]
        self._ring = [member for _, member in places]

    def _select(self) -> None:
        if self._is_selected:
            return
        self._is_selected = True
        here = [member for member in self.members if not member.is_leaving]
        self._prefillers = [one for one in here if one.role == PREFILL and one.condition is Condition.ABLE]
        staying = [member for member in here if member.role != PREFILL]
        if all(member.condition is Condition.OUT for member in staying):
            staying = here  # a role is a preference
        self._apart = {one for one in self.members if one.role == PREFILL} if staying is not here else set()
        self._candidates = [member for member in staying if member.condition is Condition.ABLE]
        if 2 * len(self._candidates) < len(staying):
            self._candidates = [member for member in staying if member.condition is not Condition.OUT]
        self._is_candidate = set(self._candidates)
        self._models = dict.fromkeys(name for member in self._candidates for name in member.models)
        self._has_all_models = all(
            member.models.get(name) is Presence.LOADED
            for member in self._candidates
            for name in self._models
            if member.models
        )
        self._total = 0
        for member in self._candidates:
            member.counted = member.load
            self._total += member.load

    def _count(self, member: M) -> None:
        if member in self._is_candidate:
            self._total += member.load - member.counted
            member.counted = member.load


def check_interval_s(num_engines: int) -> float:
    """How often a router asks each engine for its state; less often when it has very many."""
    return max(0.5, num_engines / 200)


def _place(name: str, index: int) -> int:
    return stable_hash(f"{index} {name}".encode())

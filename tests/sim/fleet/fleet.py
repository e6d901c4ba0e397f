"""Routers, engines and conversations in virtual time."""

import heapq
import itertools
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from msgspec import Struct

from pagewire.api.engines.choice import PREFILL, SLACK, Choice, Condition, Member, check_interval_s
from pagewire.api.engines.choice import Conversation as Known
from pagewire.api.engines.prefixes import Prefixes
from pagewire.api.engines.stable_hash import stable_hash

BLOCK_TOKENS = 512  # coarse, so that a prompt is few blocks
PREFILL_S = 1 / 20_000  # of a token
STEP_S = 0.01  # of a decode step with one row
ROW_S = 0.0002  # of each further row
LOAD_S = PREFILL_S / 10  # to load a token's KV from another engine
CACHED_BLOCKS = 6_000  # of an engine


class Setting(Struct, frozen=True, kw_only=True):
    """What happens in a history. Times are seconds of virtual time."""

    num_engines: int = 16
    num_prefill: int = 0  # the first ones of the engines compute prompts for the others
    num_routers: int = 1
    num_conversations: int = 1000
    num_apps: int = 8  # conversations of an app share a system prompt
    share_short: float = 0.0  # of conversations that are one question of less than a block
    duration: float = 120.0  # in which conversations begin
    think: float = 8.0  # mean time between an answer and the next turn
    mean_turns: float = 5.0
    mean_output: int = 150  # tokens
    table: int = 1 << 17  # blocks that a router remembers
    deaths: int = 0
    restart: float = 15.0
    num_outside: int = 0  # requests that an engine always has of clients without a router
    num_slow: int = 0  # engines that become ten times slower at a third of the time, for a third
    blackout: float = 0.0  # how long the checks of all routers fail, at half of the time
    is_upgraded: bool = False  # each engine is replaced by a new one, one after another


class Request:
    def __init__(self, conversation: "Conversation", router: "Router", blocks: list[int], num_output: int) -> None:
        self.conversation = conversation
        self.router = router
        self.blocks = blocks
        self.num_output = num_output
        self.num_attempts = 0
        self.num_ends = 0
        self.leg: Leg | None = None  # of the last attempt, until it ends

    def key_of(self, num_blocks: int) -> int:
        """That of a beginning, the same in every router."""
        return stable_hash(b"%d" % self.blocks[num_blocks - 1])


class Leg:
    """A prompt that one engine computes for the stream of another."""

    def __init__(self, request: Request, helper: Member, engine: "Engine", member: Member) -> None:
        """`engine`, `member`: of the stream."""
        self.request = request
        self.helper = helper
        self.engine = engine
        self.member = member
        self.life = engine.life
        self.num_tokens = len(request.blocks) * BLOCK_TOKENS

    @property
    def is_awaited(self) -> bool:
        return self.request.leg is self and self.engine.life == self.life


class Conversation:
    def __init__(self, number: int, app: int, num_turns: int, *, is_short: bool) -> None:
        self.blocks = [] if is_short else [hash((app, i)) for i in range(4)]
        is_known = number % 4 > 0 and not is_short  # others are plain prompts
        self.is_short = is_short
        self.known = Known(stable_hash(b"%d" % number), len(self.blocks) + 1) if is_known else None
        self.number = number
        self.num_turns = num_turns
        self.place: tuple[Engine, int] | None = None  # where its last turn ran, and that engine's life
        self.num_upgrade_moves = 0

    def next_turn(self) -> list[int]:
        if not self.is_short:
            self.blocks = [*self.blocks, hash((self.number, len(self.blocks)))]
        self.num_turns -= 1
        return self.blocks


class Engine:
    """A server of requests whose speed depends on their number when they begin."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_up = True
        self.life = 0
        self.slowness = 1.0
        self.was_slow = False
        self.open: dict[Request, None] = {}
        self.num_outside = 0
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.up_since = -math.inf
        self.computes_prompts = False
        self.legs: dict[Leg, None] = {}  # that it computes
        self.free_at = 0.0  # when it has computed them
        self.num_legs = 0
        self.num_computed = 0  # tokens of prompts
        self.num_found = 0

    @property
    def load(self) -> int:
        """Requests."""
        return len(self.open) + len(self.legs) + self.num_outside

    def num_cached(self, blocks: list[int]) -> int:
        """The leading blocks whose KV it has."""
        return next((i for i, block in enumerate(blocks) if block not in self.cache), len(blocks))

    def take(self, blocks: list[int]) -> int:
        """Has the KV of a prompt from now on. The tokens that it lacked."""
        num_cached = self.num_cached(blocks)
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHED_BLOCKS:
            self.cache.popitem(last=False)
        self.num_found += num_cached * BLOCK_TOKENS
        return (len(blocks) - num_cached) * BLOCK_TOKENS

    def seconds(self, request: Request, *, loads: bool) -> tuple[float, float]:
        """(seconds of the whole request, seconds of a token), now that it begins. `loads`: the KV that it lacks comes
        from another engine."""
        num_new = self.take(request.blocks)
        if not loads:
            self.num_computed += num_new
        token = self.slowness * (STEP_S + ROW_S * self.load)
        return num_new * (LOAD_S if loads else self.slowness * PREFILL_S) + request.num_output * token, token


class Router:
    """A router's view: its own `Choice`, with a member for each engine."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.choice: Choice[Member] = Choice(seed=seed, prefixes=Prefixes(capacity))
        self.member_of: dict[str, Member] = {}
        self.engine_of: dict[Member, Engine] = {}

    def add(self, engine: Engine) -> Member:
        member = Member(engine.name)
        member.prompt_ms, member.load_ms = 1000 * PREFILL_S, 1000 * LOAD_S
        self.member_of[engine.name] = member
        self.engine_of[member] = engine
        self.choice.add(member)
        return member

    def remove(self, engine: Engine) -> None:
        member = self.member_of.pop(engine.name)
        del self.engine_of[member]
        self.choice.remove(member)


class Broken(AssertionError):
    """An invariant does not hold."""


class Fleet:
    """One history."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.random = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.worst_excess = 0.0  # of an engine's load over its bound
        self.max_mean = 0.0  # load of the engines
        self._unevenness: list[float] = []  # at each check: the load of the busiest engine over that of the mean one
        self._interval = check_interval_s(setting.num_engines)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_open = 0
        self._num_conversations = 0
        self._waiting: list[Request] = []
        self._is_dark = False
        self._upgrade_began = math.inf
        self._slow: dict[Engine, list[int]] = {}  # requests sent to it, and to all, since it has been slow for 10 s
        self._calm_from = 0.0  # when the consequences of the last fault are over
        self.engines: dict[str, Engine] = {}
        self.routers = [Router(seed + i, setting.table) for i in range(setting.num_routers)]
        for i in range(setting.num_engines):
            engine = Engine(f"engine-{i}")
            self.engines[engine.name] = engine
            engine.num_outside = 0 if i else setting.num_outside
            engine.computes_prompts = i < setting.num_prefill
            for router in self.routers:
                member = router.add(engine)
                router.choice.turned(member, Condition.ABLE)
                if engine.computes_prompts:
                    router.choice.described(member, PREFILL, member.prompt_ms, member.load_ms)

    @property
    def share_found(self) -> float:
        """Of the prompts' tokens, those that were in the prefix cache of the engine that got them."""
        engines = self.engines.values()
        found, computed = sum(e.num_found for e in engines), sum(e.num_computed for e in engines)
        return found / max(1, found + computed)

    @property
    def unevenness(self) -> float:
        """How many times the mean load the busiest engine has, on average."""
        return sum(self._unevenness) / max(1, len(self._unevenness))

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), call))

    def run(self) -> Counter[str]:
        """Plays it to its end. Raises Broken."""
        setting = self.setting
        for _ in range(setting.num_conversations):
            self.at(self.random.uniform(0, setting.duration), self._begin)
        for router in self.routers:
            self.at(self.random.uniform(0, self._interval), lambda router=router: self._check(router))
        for i in range(setting.deaths):
            self.at(setting.duration * (i + 1) / (setting.deaths + 1), self._kill)
        if setting.num_slow:
            self.at(setting.duration / 3, self._slow_down)
        if setting.blackout:
            self.at(setting.duration / 2, self._darken)
        if setting.is_upgraded:
            self.at(setting.duration / 4, lambda: self._upgrade(iter(list(self.engines.values()))))
        while self._events and (self._num_open or self._num_conversations < setting.num_conversations):
            self.now, _, call = heapq.heappop(self._events)
            call()
        self._check_end()
        return self.counts

    def _begin(self) -> None:
        num_turns = 1 + int(self.random.expovariate(1 / (self.setting.mean_turns - 1)))
        app = self.random.randrange(self.setting.num_apps)
        is_short = self.random.random() < self.setting.share_short
        conversation = Conversation(self._num_conversations, app, 1 if is_short else num_turns, is_short=is_short)
        self._num_conversations += 1
        self._num_open += 1
        self._turn(conversation)

    def _turn(self, conversation: Conversation) -> None:
        num_output = 1 + int(self.random.expovariate(1 / self.setting.mean_output))
        router = self.random.choice(self.routers)
        request = Request(conversation, router, conversation.next_turn(), num_output)
        self.counts["requests"] += 1
        self._send(request)

    def _send(self, request: Request) -> None:
        router, conversation = request.router, request.conversation
        refused: list[Member] = []
        while True:
            num_tokens = len(request.blocks) * BLOCK_TOKENS if self.setting.num_prefill else 0
            member, helper = router.choice.legs(
                request.blocks, conversation.known, num_tokens, self.now, refused, request.key_of
            )
            if member is None:
                self.counts["waits for an engine"] += 1
                self._waiting.append(request)
                return
            engine = router.engine_of[member]
            if engine.is_up:
                break
            self.counts["refused connections"] += 1  # the router has not noticed the death yet
            router.choice.lost(member)
            refused.append(member)
        self._check_choice(request, member, engine)
        self._check_roles(member, engine)
        request.num_attempts += 1
        request.leg = None
        conversation.place = engine, engine.life
        router.choice.opened(member)
        engine.open[request] = None
        if helper is None or not self._prefill(request, helper, engine, member):
            self._compute(request, engine, member, loads=False)

    def _compute(self, request: Request, engine: Engine, member: Member, *, loads: bool) -> None:
        """The engine of its stream has begun. `loads`: another engine has computed the prompt."""
        seconds, token = engine.seconds(request, loads=loads)
        self.at(self.now + seconds, lambda life=engine.life: self._finish(request, engine, life, member, token))

    # ── prompts that other engines compute ───────────────────────────────────────────────────────────────────────────

    def _prefill(self, request: Request, helper: Member, engine: Engine, member: Member) -> bool:
        """Has a prompt computed for `engine`. False: the engine that was to do it is dead, as the router learns."""
        router, other = request.router, request.router.engine_of[helper]
        if not other.is_up:
            self.counts["legs refused"] += 1
            router.choice.lost(helper)
            return False
        self.counts["legs"] += 1
        request.leg = leg = Leg(request, helper, engine, member)
        other.legs[leg] = None
        other.num_legs += 1
        router.choice.opened(helper)
        helper.num_due_tokens += leg.num_tokens
        num_new = other.take(request.blocks)
        other.num_computed += num_new
        other.free_at = max(other.free_at, self.now) + num_new * PREFILL_S
        self.at(other.free_at, lambda: self._leg_ends(leg, other, is_lost=False))
        return True

    def _leg_ends(self, leg: Leg, other: Engine, *, is_lost: bool) -> None:
        """The stream begins, with the KV of the `other` engine unless that is lost."""
        if leg not in other.legs:
            return  # it was lost
        del other.legs[leg]
        leg.helper.num_due_tokens -= leg.num_tokens
        leg.request.router.choice.closed(leg.helper)
        if is_lost:
            self.counts["legs lost"] += 1
            leg.request.router.choice.lost(leg.helper)
        if leg.is_awaited:
            leg.request.leg = None
            self._compute(leg.request, leg.engine, leg.member, loads=not is_lost)

    def _finish(self, request: Request, engine: Engine, life: int, member: Member, token: float) -> None:
        if engine.life != life or request not in engine.open:
            return  # the engine died; `_kill` has sent it elsewhere
        del engine.open[request]
        request.router.choice.closed(member)
        request.router.choice.paced(member, token)
        request.num_ends += 1
        self.counts["ends"] += 1
        if request.num_ends != 1:
            raise Broken("a request has ended twice")
        conversation = request.conversation
        if conversation.num_turns:
            self.at(self.now + self.random.expovariate(1 / self.setting.think), lambda: self._turn(conversation))
        else:
            self._num_open -= 1

    def _check(self, router: Router) -> None:
        """A router asks all its engines for their state, as `Fleet` in pagewire.route does."""
        choice = router.choice
        for member, engine in router.engine_of.items():
            if self._is_dark and self.random.random() < 0.9:
                choice.turned(member, Condition.SILENT)
            elif engine.is_up:
                if engine.up_since > self.now - self._interval and member.condition is Condition.OUT:
                    choice.started(member, self.now)
                choice.turned(member, Condition.ABLE)
                choice.reported(member, engine.load)
            elif member.condition is not Condition.OUT:
                choice.lost(member)
        choice.compare()
        self._check_balance(router)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._send(request)
        self.at(self.now + self._interval, lambda: self._check(router))

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _kill(self) -> None:
        engine = self.random.choice([engine for engine in self.engines.values() if engine.is_up])
        self.counts["deaths"] += 1
        self._end(engine)
        self.at(self.now + self.setting.restart, lambda: self._restart(engine))

    def _end(self, engine: Engine) -> None:
        engine.is_up = False
        engine.life += 1
        engine.cache.clear()
        engine.free_at = 0.0
        lost, engine.open = list(engine.open), {}
        for request in lost:
            member = request.router.member_of[engine.name]
            request.router.choice.closed(member)
            request.router.choice.lost(member)
        for leg in [*engine.legs]:
            self._leg_ends(leg, engine, is_lost=True)
        for request in lost:
            self.counts["resumed"] += 1
            self._send(request)

    def _restart(self, engine: Engine) -> None:
        engine.is_up = True
        engine.up_since = self.now

    def _slow_down(self) -> None:
        self._slow = {engine: [0, 0] for engine in self.random.sample([*self.engines.values()], self.setting.num_slow)}
        for engine in self._slow:
            engine.slowness, engine.was_slow = 10.0, True
        self.at(self.now + 10.0, self._watch_slow)
        self.at(self.now + self.setting.duration / 3, self._speed_up)

    def _watch_slow(self) -> None:
        self._slow = {engine: [engine_sent(self, engine), self.counts["requests"]] for engine in self._slow}

    def _speed_up(self) -> None:
        shares = []
        for engine, (before, all_before) in self._slow.items():
            engine.slowness = 1.0
            fair = (self.counts["requests"] - all_before) / len(self.engines)
            shares.append((engine_sent(self, engine) - before) / fair)
        if sum(shares) / len(shares) > 0.15:
            raise Broken(f"engines that are ten times slower get these shares of a fair share: {shares}")
        self._slow = {}

    def _darken(self) -> None:
        self._is_dark = True
        self.at(self.now + self.setting.blackout, self._lighten)

    def _lighten(self) -> None:
        self._is_dark = False

    def _upgrade(self, remaining: Iterator[Engine]) -> None:
        """Adds a new engine, then lets an old one leave, as a rolling upgrade with a surge of one does."""
        self._upgrade_began = min(self._upgrade_began, self.now)
        old = next(remaining, None)
        if old is None:
            return
        new = Engine(f"{old.name}-new")
        new.up_since = self.now
        self.engines[new.name] = new
        for router in self.routers:
            member = router.add(new)
            router.choice.started(member, self.now)
            router.choice.turned(member, Condition.ABLE)
            router.choice.leaves(router.member_of[old.name], True)
        self.counts["upgrades"] += 1
        self.at(self.now + 1.0, lambda: self._retire(old, remaining))

    def _retire(self, old: Engine, remaining: Iterator[Engine]) -> None:
        if old.open:
            self.at(self.now + 1.0, lambda: self._retire(old, remaining))
            return
        self.at(self.now + 10.0, lambda: self._upgrade(remaining))

    # ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_choice(self, request: Request, member: Member, engine: Engine) -> None:
        """A conversation changes its engine only for a reason."""
        conversation, choice, now = request.conversation, request.router.choice, self.now
        if conversation.place is None:
            return
        before, life = conversation.place
        if before is engine and life == engine.life:
            self.counts["stayed"] += 1
            return
        old = request.router.member_of[before.name]
        if life != before.life or old.condition is not Condition.ABLE:
            self.counts["moved by a death"] += 1
        elif old.is_leaving:
            self.counts["moved by an upgrade"] += 1
            conversation.num_upgrade_moves += 1
            self.counts["second moves by the upgrade"] += conversation.num_upgrade_moves > 1
        elif not choice.takes(old, SLACK, now):
            self.counts["moved by load"] += 1
        elif engine.num_cached(request.blocks) >= before.num_cached(request.blocks):
            self.counts["moved without cost"] += 1
        elif conversation.known is None and len(self.routers) > 1:
            self.counts["moved unknown to the router"] += 1
        else:
            self.counts["moved without a reason"] += 1

    def _check_roles(self, member: Member, engine: Engine) -> None:
        """Streams are not for engines that compute prompts, while another one is able."""
        if member.role == PREFILL:
            router = next(router for router in self.routers if member in router.engine_of)
            if any(one.role != PREFILL and one.is_able for one in router.choice.members):
                raise Broken(f"{engine.name}, which computes prompts, got a stream")

    def _check_balance(self, router: Router) -> None:
        """No engine has much more to do than the others, by its true load."""
        counted = [one for one in self.engines.values() if one.is_up and not (one.was_slow or one.computes_prompts)]
        loads = [engine.load for engine in counted]
        mean = sum(loads) / max(1, len(loads))
        # Routers that have just started do not see each other's requests yet: each gives the slack.
        num_slacks = self.setting.num_routers if self.now < 2 * self._interval else 1
        bound = 2 * mean + (1 + num_slacks) * SLACK
        excesses = [engine.load - max(bound, engine.num_outside + SLACK) for engine in counted]
        self.worst_excess = max([self.worst_excess, *excesses])
        self.max_mean = max(self.max_mean, mean)
        if mean >= 1:
            self._unevenness.append(max(loads) / mean)
        for engine in self.engines.values():
            if 0 < self.now - engine.up_since < 2.0 and len(engine.open) > 0.6 * mean + SLACK:
                raise Broken(f"an engine that has just started has {len(engine.open)} requests, the mean is {mean:.1f}")

    def _check_end(self) -> None:
        counts = self.counts
        if counts["ends"] != counts["requests"]:
            raise Broken(f"{counts['requests']} requests had {counts['ends']} ends")
        members = [member for router in self.routers for member in router.choice.members]
        if any(member.num_due_tokens or member.num_open for member in members):
            raise Broken("an engine is believed to have requests or prompts when all have ended")
        if counts["legs refused"] > len(self.routers) * counts["deaths"]:
            raise Broken(f"{counts['legs refused']} prompts went to engines that the router knew to be dead")
        shares = [engine.num_legs for engine in self.engines.values() if engine.computes_prompts]
        if counts["legs"] and not counts["deaths"] and max(shares) > 2 * min(shares):
            raise Broken(f"engines computed so many prompts for others: {shares}")
        if counts["second moves by the upgrade"] > 0.05 * counts["moved by an upgrade"]:
            raise Broken(f"the upgrade moved {counts['second moves by the upgrade']} conversations again")
        if self.worst_excess > 0:
            raise Broken(f"an engine had {self.worst_excess:.0f} requests more than twice the mean and the slack")
        if self.setting.blackout and counts["waits for an engine"]:
            raise Broken(f"{counts['waits for an engine']} requests found no engine while the checks failed")


def engine_sent(fleet: Fleet, engine: Engine) -> int:
    """Requests that all routers have sent it."""
    return sum(router.member_of[engine.name].num_sent for router in fleet.routers)

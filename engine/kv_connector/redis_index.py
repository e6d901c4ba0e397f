"""What a Redis server holds, as far as the core half knows: asked by a thread, and remembered for a moment.

The scheduler asks again until the thread has the answer, and not longer than `timeout_s` for one request: then nothing
is loaded, and the server is not asked for a while.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.kv_connector import Item, KvRequest
from .redis_blocks import RedisBlocks

_FOUND_S = 5.0  # how long what was found is taken to be there
_MISSING_S = 0.5  # how long what was not found is not asked for again
_MAX_LOOKUPS = 4096  # items of one question
_MAX_KNOWN = 200_000  # names, and keys of blocks
_MAX_WAITING = 1024  # requests; those that were cancelled while they waited are never named again

_NONE: Mapping[bytes, int] = {}


class _Question(NamedTuple):
    items: list[Item]
    behind: list[bytes]  # keys of blocks, or the root, behind which states are asked for


class _Answer(NamedTuple):
    question: _Question
    has: list[bool]
    standing: list[Mapping[bytes, int]]


class RedisIndex:
    """The scheduler's thread calls the methods."""

    def __init__(self, blocks: RedisBlocks, timeout_s: float) -> None:
        self._blocks = blocks
        self._facts = blocks.facts
        self._timeout_s = timeout_s
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()  # name → whether it is there, until when
        self._standing: OrderedDict[bytes, tuple[Mapping[bytes, int], float]] = OrderedDict()
        self._asked: set[bytes] = set()  # names, and keys of blocks, of questions under way
        self._deadlines: OrderedDict[int, float] = OrderedDict()  # rid → monotonic s
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()  # None: stop
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-redis-index", daemon=True)
        self._thread.start()

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """The first call about a request asks about all groups of its blocks, so that the next ones are answered from
        what is known then."""
        now = time.monotonic()
        self._hear(now)
        asked = list(items[:_MAX_LOOKUPS])
        behind: list[bytes] = []
        if all(item.group == self._facts.full and not item.num for item in items):
            others, behind = self._of_other_groups(request, items)
            asked += others
        unknown = [item for item in asked if not _is_fresh(self._known.get(item.name), now)]
        behind = [key for key in behind if not _is_fresh(self._standing.get(key), now)]
        if not self._blocks.is_paused() and (unknown or behind):
            if now < self._deadlines.setdefault(request.rid, now + self._timeout_s):
                self._ask(unknown, behind)
                return None
            self._blocks.pause()
        self._deadlines.pop(request.rid, None)
        return () if self._blocks.is_paused() else [self._has(item) for item in items]

    def standing(self, behind: bytes) -> Mapping[bytes, int]:
        return self._standing.get(behind, (_NONE, 0.0))[0]

    def claim(self, items: Sequence[Item]) -> list[bool]:
        """What is not known to be there is taken to be there soon: the caller stores it, and the worker half checks
        before it writes."""
        now = time.monotonic()
        is_there = [self._has(item) and _is_fresh(self._known.get(item.name), now) for item in items]
        for item in items:
            self._learn(item, True, now)
            if item.group == self._facts.state and item.parent is not None:
                self._standing.pop(item.parent, None)
        return is_there

    def lost(self, items: Sequence[Item]) -> None:
        now = time.monotonic()
        for item in items:
            self._learn(item, False, now)

    def planned(self) -> None:
        """Forgets what is old, and requests that are never named again."""
        for known in (self._known, self._standing):
            while len(known) > _MAX_KNOWN:
                known.popitem(last=False)
        while len(self._deadlines) > _MAX_WAITING:
            self._deadlines.popitem(last=False)

    def close(self) -> None:
        self._questions.put(None)
        self._blocks.close()
        self._thread.join()

    def _of_other_groups(self, request: KvRequest, items: Sequence[Item]) -> tuple[list[Item], list[bytes]]:
        """(blocks of groups that are neither full nor states, keys behind which states may stand)."""
        facts = self._facts
        if facts.num_groups == 1:
            return [], []
        keys = request.block_keys((len(request.ids) - 1) // facts.block_size, facts.block_size)
        groups = [group for group in range(facts.num_groups) if group not in (facts.full, facts.state)]
        others = [
            Item(key, place, keys[place - 1] if place else None, group)
            for group in groups
            for place, key in enumerate(keys[:_MAX_LOOKUPS])
        ]
        return others, [request.root, *keys[:_MAX_LOOKUPS]] if facts.state is not None else []

    def _has(self, item: Item) -> bool:
        return self._known.get(item.name, (False, 0.0))[0]

    def _learn(self, item: Item, has: bool, now: float) -> None:
        self._known[item.name] = (has, now + (_FOUND_S if has else _MISSING_S))
        self._known.move_to_end(item.name)

    def _ask(self, items: Iterable[Item], behind: Iterable[bytes]) -> None:
        """Asks what no question under way asks for."""
        new = _Question(
            [item for item in items if item.name not in self._asked], [key for key in behind if key not in self._asked]
        )
        if new.items or new.behind:
            self._asked.update(item.name for item in new.items)
            self._asked.update(new.behind)
            self._questions.put(new)

    def _hear(self, now: float) -> None:
        while not self._answers.empty():
            question, has, standing = self._answers.get()
            for item, is_there in zip(question.items, has, strict=True):
                self._asked.discard(item.name)
                self._learn(item, is_there, now)
            for key, states in zip(question.behind, standing, strict=True):
                self._asked.discard(key)
                self._standing[key] = (states, now + (_FOUND_S if states else _MISSING_S))
                self._standing.move_to_end(key)

    def _run(self) -> None:
        """The thread."""
        while (question := self._questions.get()) is not None:
            try:
                has, standing = self._blocks.look_up(question.items, question.behind)
            except Exception:  # after any error the requests can compute the blocks
                has, standing = [False] * len(question.items), [_NONE] * len(question.behind)
            self._answers.put(_Answer(question, has, standing))


def _is_fresh(known: tuple[object, float] | None, now: float) -> bool:
    return known is not None and now < known[1]

"""Possible faults of the choice: each is a small change to the real class that must make some history fail."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from pagewire.api.engines import choice
from pagewire.api.engines.choice import Choice, Condition, Conversation, Member
from pagewire.api.engines.prefixes import Prefixes


def _takes_anything(self: Choice[Member], member: Member, *_: object) -> bool:
    self._select()
    return member in self._is_candidate


def _keep_the_cache(self: Choice[Member], member: Member) -> None:
    """A lost engine is believed to have what it was sent."""
    self.turned(member, Condition.OUT)


def _no_heir(self: Choice[Member], member: Member, now: float) -> None:
    member.started_at = now


def _choose_silent_never(self: Choice[Member]) -> None:
    self._candidates = [member for member in self.members if member.is_able]
    self._is_candidate = set(self._candidates)
    self._total = 0
    for member in self._candidates:
        member.counted = member.load
        self._total += member.load


def _own_place(
    self: Choice[Member], blocks: Sequence[int], conversation: Conversation | None, *_: object
) -> Member | None:
    """Each router has another ring."""
    if conversation is None or not self._candidates:
        return None
    return self._candidates[hash((id(self), conversation.key)) % len(self._candidates)]


_select = Choice._select


def _select_dead_prefillers(self: Choice[Member]) -> None:
    _select(self)
    self._prefillers = [member for member in self.members if member.role == choice.PREFILL]


MUTANTS: dict[str, tuple[object, str, object]] = {
    "an engine is never too busy": (Choice, "takes", _takes_anything),
    "a lost engine keeps its prefixes": (Choice, "lost", _keep_the_cache),
    "nobody inherits conversations": (Choice, "started", _no_heir),
    "silent engines are never chosen": (Choice, "_select", _choose_silent_never),
    "routers have rings of their own": (Choice, "_at_home", _own_place),
    "prompts of unknown conversations have no home": (Prefixes, "num_common", lambda self, blocks, num: len(blocks)),
    "the home of a beginning is that of its first block": (Prefixes, "num_common", lambda self, blocks, num: 0),
    "slow engines are not told from others": (Choice, "compare", lambda self: None),
    "requests of other routers do not count": (
        Choice,
        "reported",
        lambda self, member, load: None,
    ),
    "other routers do nothing between reports": (choice, "ECHO", 0.0),
    "engines that compute prompts get streams": (choice, "PREFILL", "none"),
    "engines that are dead get prompts": (Choice, "_select", _select_dead_prefillers),
    "prompts that an engine has to compute do not count": (
        Member,
        "num_due_tokens",
        property(lambda self: 0, lambda self, num: None),
    ),
    "prompts for others make the router forget who has the stream": (
        Choice,
        "_prefilled",
        property(lambda self: self._prefixes, lambda self, prefixes: None),
    ),
    "the least busy engine is not looked for": (Choice, "_least_busy", lambda self, now, avoid: self._candidates[0]),
    "prefixes are ignored": (Choice, "_with_prefix", lambda self, blocks, root, now, avoid: (None, 0)),
    "a new engine gets all at once": (Member, "ramp", lambda self, now: 1.0),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Runs the block with this fault."""
    with patch.object(*MUTANTS[name], create=True):
        yield

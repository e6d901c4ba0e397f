"""What the lead and its broker say to each other, and what the broker does next. No Ray, no processes, no clock.

The broker (`broker.py`) is the only process of an engine that is connected to Ray. It talks with the lead in lines of
JSON on its standard input and output. A broker that ends is started again and finds what the one before has placed.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

# ── lead → broker ────────────────────────────────────────────────────────────────────────────────────────────────────


class Connect(Struct, frozen=True, tag=True):
    namespace: str  # of everything that this engine has in Ray
    host: str | None  # this machine's address as a node; None: Ray finds out


class FollowerLaunch(Struct, frozen=True):
    """What a follower on a node is given."""

    address: str  # of the lead, tcp://host:port
    keys: tuple[str, str] | None  # public and secret; None: those of `key_file`
    key_file: str | None
    host: str = ""  # the node's address; the holder fills it in
    name: str = ""  # for messages; the holder fills it in


class Place(Struct, frozen=True, tag=True):
    num_parts: int  # each is a bundle, which one node holds whole
    bundle: dict[str, float]  # resource → amount
    launch: FollowerLaunch


class Release(Struct, frozen=True, tag=True):
    """The engine ends: nothing is started any more, and all room is given back."""


# ── broker → lead ────────────────────────────────────────────────────────────────────────────────────────────────────


class Connected(Struct, frozen=True, tag=True):
    host: str  # this machine's address as a node


class Failed(Struct, frozen=True, tag=True):
    """There is no Ray, or it cannot be reached."""

    reason: str  # a sentence


class Waiting(Struct, frozen=True, tag=True):
    """What the engine waits for; empty: all parts have a node."""

    what: str


class Ended(Struct, frozen=True, tag=True):
    """A part has no follower any more; it gets another one."""

    what: str  # a clause


ToBroker = Connect | Place | Release
FromBroker = Connected | Failed | Waiting | Ended


# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


class HolderState(Enum):
    """The state of a part's holder, the actor that runs the follower."""

    NONE = "none"
    RUNS = "runs"
    UNCERTAIN = "uncertain"  # Ray has lost the connection to it: it may still run
    ENDED = "ended"  # its follower has ended, or it has itself


class Step(Enum):
    MAKE_GROUP = "make group"
    START = "start"  # a holder for this part
    ASK_AGAIN = "ask again"
    FORGET = "forget"  # a holder that has ended


def next_steps(group: str | None, holders: Sequence[HolderState]) -> list[tuple[Step, int]]:
    """What to do now, each with the number of its part (-1: of none). `group`: the state of the placement group as Ray
    calls it; None: there is none."""
    if group in (None, "REMOVED"):
        return [(Step.MAKE_GROUP, -1)]
    steps = []
    for part, holder in enumerate(holders):
        if holder is HolderState.ENDED:
            steps.append((Step.FORGET, part))
        elif holder is HolderState.UNCERTAIN:
            steps.append((Step.ASK_AGAIN, part))
        elif holder is HolderState.NONE and group == "CREATED":
            steps.append((Step.START, part))
    return steps


def waits_for(
    group: str | None, holders: Sequence[HolderState], bundle: dict[str, float], free: Mapping[str, float]
) -> str:
    """What the engine waits for, as a clause; empty: nothing. `free`: what no program has of all nodes' resources."""
    if group != "CREATED":
        room = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        left = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in bundle)
        state = f"its state: {group or 'new'}; free on all nodes: {left}"
        return f"Ray has no room for {len(holders)} times {room}, each on one node ({state})"
    missing = [part for part, holder in enumerate(holders) if holder in (HolderState.NONE, HolderState.ENDED)]
    return f"Ray starts {len(missing)} of {len(holders)} followers" if missing else ""

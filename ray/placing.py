"""What the lead and its broker say to each other, and what the broker does next. No Ray, no processes, no clock.

The broker (`broker.py`) is the only process of an engine that is connected to Ray. It talks with the lead in lines of
JSON on its standard input and output. A broker that ends is started again and finds what the one before has placed.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

ENGINE = "engine"
"""The name of the placement group of all parts. Others have one bundle, in the place of one whose node leaves."""

# ── lead → broker ────────────────────────────────────────────────────────────────────────────────────────────────────


class Connect(Struct, frozen=True, tag=True):
    namespace: str  # of everything that this engine has in Ray
    host: str | None  # this machine's address as a node; None: Ray finds out
    head: str | None = None  # the cluster's, HOST:PORT; None: that of RAY_ADDRESS or of this machine


class FollowerLaunch(Struct, frozen=True):
    """What a follower on a node is given."""

    address: str  # of the lead, tcp://host:port
    public_key: str  # the lead's
    secret_key: str | None  # None: that of `key_file`
    key_file: str | None
    host: str = ""  # the node's address; the holder fills it in
    name: str = ""  # for messages; the holder fills it in


class Place(Struct, frozen=True, tag=True):
    num_parts: int  # each is a bundle, which one node holds whole
    bundle: dict[str, float]  # resource → amount
    launch: FollowerLaunch
    lifeline: tuple[str, int]  # host and port where the lead answers as long as it lives, and no later lead does


class Release(Struct, frozen=True, tag=True):
    """The engine ends: nothing is started any more, and all room is given back."""


# ── broker → lead ────────────────────────────────────────────────────────────────────────────────────────────────────


class Connected(Struct, frozen=True, tag=True):
    host: str  # this machine's address as a node
    head: str  # the cluster's, HOST:PORT
    num_nodes: int  # that live
    resources: dict[str, float]  # of all nodes


class Failed(Struct, frozen=True, tag=True):
    """There is no Ray, or it cannot be reached."""

    reason: str  # a sentence


class Waiting(Struct, frozen=True, tag=True):
    """What the engine waits for; empty: all parts have a node."""

    what: str


class Ended(Struct, frozen=True, tag=True):
    """A part has no follower any more; it gets another one."""

    what: str  # a clause


class Refusal(Struct, frozen=True, tag=True):
    """A node cannot take part as it is. It is asked again after a while (`pause_s`)."""

    reason: str  # a sentence that names the node


ToBroker = Connect | Place | Release
FromBroker = Connected | Failed | Waiting | Ended | Refusal


# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


class HolderState(Enum):
    """The state of a part's holder, the actor that runs the follower."""

    NONE = "none"
    RUNS = "runs"
    LEAVES = "leaves"  # its follower was told to leave
    UNCERTAIN = "uncertain"  # Ray has lost the connection to it: it may still run
    ENDED = "ended"  # its follower has ended, or it has itself


class Bundle(Struct, frozen=True):
    """A place for one follower."""

    holder: HolderState
    drains: bool = False  # its node is about to end: Ray starts nothing there
    refusal: str = ""  # a sentence: why its node cannot take part, and is not asked again yet; empty: it may be

    @property
    def is_refused(self) -> bool:
        """It has no follower and gets none yet."""
        return self.holder is HolderState.NONE and bool(self.refusal)

    @property
    def is_free(self) -> bool:
        """A follower may start here."""
        return self.holder is HolderState.NONE and not (self.drains or self.refusal)


class Group(Struct, frozen=True):
    """A placement group as it is."""

    name: str
    state: str | None  # as Ray calls it; None: there is none
    bundles: tuple[Bundle, ...]


class Step(Enum):
    MAKE_GROUP = "make group"
    REMOVE_GROUP = "remove group"
    START = "start"  # a holder
    ASK_AGAIN = "ask again"
    LEAVE = "leave"  # a holder on a node that is about to end
    FORGET = "forget"  # a holder that has ended


def next_steps(groups: Sequence[Group], num_parts: int) -> list[tuple[Step, str, int]]:
    """What to do now, each with the name of its group and the number of its bundle (-1: of none).

    There are as many followers as parts, besides those on nodes that are about to end. A group is never moved by Ray
    while its nodes live, so the place of such a follower, or of one whose node refuses, is another group."""
    steps = []
    for group in groups:
        if group.state in _NONE:
            steps.append((Step.MAKE_GROUP, group.name, -1))
            continue
        for number, bundle in enumerate(group.bundles):
            if bundle.holder is HolderState.ENDED:
                steps.append((Step.FORGET, group.name, number))
            elif bundle.holder is HolderState.UNCERTAIN:
                steps.append((Step.ASK_AGAIN, group.name, number))
            elif bundle.holder is HolderState.RUNS and bundle.drains:
                steps.append((Step.LEAVE, group.name, number))
    num_missing = num_parts - _num_running(groups)
    empty = [
        (Step.START, group.name, number)
        for group in groups
        for number, bundle in enumerate(group.bundles)
        if group.state == "CREATED" and bundle.is_free
    ]
    steps += empty[: max(0, num_missing)]
    num_over = sum(not (one.drains or one.is_refused) for group in groups for one in group.bundles) - num_parts
    taken = {group.name for group in groups}
    names = [name for name in spare_names(num_parts) if name not in taken]
    if num_over < 0 and names:
        steps.append((Step.MAKE_GROUP, names[0], -1))
    for group in groups:
        is_unused = all(bundle.holder is HolderState.NONE for bundle in group.bundles)
        is_useless = any(bundle.drains or bundle.is_refused for bundle in group.bundles)
        if group.name != ENGINE and is_unused and group.state not in _NONE and (num_over > 0 or is_useless):
            steps.append((Step.REMOVE_GROUP, group.name, -1))
            num_over -= not is_useless
    removed = {name for step, name, _ in steps if step is Step.REMOVE_GROUP}
    return [one for one in steps if one[0] is Step.REMOVE_GROUP or one[1] not in removed]


def spare_names(num_parts: int) -> list[str]:
    """Names of groups besides the engine's. More than parts, since those of nodes that drain stay while their followers
    wait to be relieved."""
    return [f"spare-{number}" for number in range(4 * num_parts)]


def waits_for(groups: Sequence[Group], num_parts: int, bundle: dict[str, float], free: Mapping[str, float]) -> str:
    """What the engine waits for, as a clause; empty: nothing. `free`: what no program has of all nodes' resources."""
    if (num_missing := num_parts - _num_running(groups)) <= 0:
        return ""
    group = next((group for group in groups if group.state != "CREATED"), None)
    refusals = [bundle.refusal for group in groups for bundle in group.bundles if bundle.is_refused]
    refusing = f"one that refuses ({' '.join(refusals)}) is asked again within {_LONGEST_PAUSE_S:g} s"
    if group is None:
        return refusing if refusals else f"Ray starts {num_missing} of {num_parts} followers"
    room = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    left = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in bundle)
    state = f"its state: {group.state or 'new'}; free on all nodes: {left}"
    refusing = f"{refusing}, and " if refusals else ""
    return f"{refusing}Ray has no room for {len(group.bundles)} times {room}, each on one node ({state})"


def pause_s(num_refusals: int) -> float:
    """Until a node that has refused so many times in a row is asked again: what is missing there takes somebody a
    while, and each attempt is a line in the log."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (num_refusals - 1))


def _num_running(groups: Sequence[Group]) -> int:
    """Followers that run and stay, or may do so."""
    running = (HolderState.RUNS, HolderState.UNCERTAIN)
    return sum(bundle.holder in running and not bundle.drains for group in groups for bundle in group.bundles)


_NONE = (None, "REMOVED")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0

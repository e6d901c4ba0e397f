"""What the broker does next, of every state of the placement groups and of the holders; and histories of nodes."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pagewire.ray.placing import ENGINE, Bundle, Group, HolderState, Step, next_steps, pause_s, waits_for

NONE, RUNS, LEAVES, UNCERTAIN, ENDED = HolderState
STAYS, DRAINS = False, True


def engine(state: str | None, *holders: HolderState) -> Group:
    return Group(ENGINE, state, tuple(Bundle(holder) for holder in holders))


def spare(state: str | None, holder: HolderState, number: int = 0) -> Group:
    return Group(f"spare-{number}", state, (Bundle(holder),))


def draining(group: Group, number: int, holder: HolderState = LEAVES) -> Group:
    bundles = list(group.bundles)
    bundles[number] = Bundle(holder, DRAINS)
    return replace(group, bundles=tuple(bundles))


@pytest.mark.parametrize("state", [None, "REMOVED"])
def test_without_a_group_nothing_else_is_done(state: str | None) -> None:
    assert next_steps([engine(state, NONE, RUNS)], 2) == [(Step.MAKE_GROUP, ENGINE, -1)]


def test_a_holder_is_started_only_in_a_group_that_has_its_room() -> None:
    assert next_steps([engine("PENDING", NONE, NONE)], 2) == []
    started = [(Step.START, ENGINE, 0), (Step.START, ENGINE, 2)]
    assert next_steps([engine("CREATED", NONE, RUNS, NONE)], 3) == started


def test_a_holder_that_may_still_run_is_asked_and_not_replaced() -> None:
    for state in ("CREATED", "RESCHEDULING"):
        assert next_steps([engine(state, UNCERTAIN, RUNS)], 2) == [(Step.ASK_AGAIN, ENGINE, 0)]


def test_a_holder_that_has_ended_is_forgotten_before_another_one_starts() -> None:
    assert next_steps([engine("CREATED", ENDED, RUNS)], 2) == [(Step.FORGET, ENGINE, 0)]
    assert next_steps([engine("RESCHEDULING", ENDED, RUNS)], 2) == [(Step.FORGET, ENGINE, 0)]


def test_a_node_that_drains_has_its_follower_leave_and_another_place_is_asked_for() -> None:
    whole = engine("CREATED", RUNS, RUNS)
    told = [(Step.LEAVE, ENGINE, 1), (Step.MAKE_GROUP, "spare-0", -1)]
    assert next_steps([draining(whole, 1, RUNS)], 2) == told
    groups = [draining(whole, 1), spare("PENDING", NONE)]
    assert next_steps(groups, 2) == [], "it works until there is another one"
    groups = [draining(whole, 1), spare("CREATED", NONE)]
    assert next_steps(groups, 2) == [(Step.START, "spare-0", 0)]
    groups = [draining(whole, 1, ENDED), spare("CREATED", RUNS)]
    assert next_steps(groups, 2) == [(Step.FORGET, ENGINE, 1)]
    groups = [draining(whole, 1, NONE), spare("CREATED", RUNS)]
    assert next_steps(groups, 2) == [], "nothing is started on a node that is about to end"


def test_nodes_that_drain_together_are_each_replaced() -> None:
    both = draining(draining(engine("CREATED", RUNS, RUNS), 0), 1)
    assert next_steps([both, spare("PENDING", NONE)], 2) == [(Step.MAKE_GROUP, "spare-1", -1)]
    names = [spare("PENDING", NONE, 1)]
    assert next_steps([both, *names], 2) == [(Step.MAKE_GROUP, "spare-0", -1)]


def test_a_place_too_many_is_given_back_or_kept_for_the_next_node_that_drains() -> None:
    lost = engine("RESCHEDULING", RUNS, NONE)
    assert next_steps([lost, spare("PENDING", NONE)], 2) == [(Step.REMOVE_GROUP, "spare-0", -1)]
    back = engine("CREATED", RUNS, NONE)
    assert next_steps([back, spare("CREATED", RUNS)], 2) == [], "Ray gives no single bundle back"
    drained = Group("spare-0", "CREATED", (Bundle(LEAVES, DRAINS),))
    assert next_steps([back, drained], 2) == [(Step.START, ENGINE, 1)]
    gone = spare("RESCHEDULING", NONE)
    assert next_steps([engine("CREATED", RUNS, RUNS), gone], 2) == [(Step.REMOVE_GROUP, "spare-0", -1)]


def test_a_node_that_has_refused_is_asked_again_later_and_another_place_is_taken_meanwhile() -> None:
    refused = Group(ENGINE, "CREATED", (Bundle(RUNS), Bundle(NONE, refusal="b: There is no key.")))
    assert next_steps([refused], 2) == [(Step.MAKE_GROUP, "spare-0", -1)]
    assert next_steps([refused, spare("PENDING", NONE)], 2) == []
    assert next_steps([refused, spare("CREATED", NONE)], 2) == [(Step.START, "spare-0", 0)]
    steps = [(Step.MAKE_GROUP, "spare-1", -1), (Step.REMOVE_GROUP, "spare-0", -1)]
    for useless in (Bundle(NONE, refusal="c: There is no key."), Bundle(NONE, DRAINS)):
        assert next_steps([refused, Group("spare-0", "CREATED", (useless,))], 2) == steps, "room elsewhere than on it"
    assert next_steps([engine("CREATED", RUNS, NONE), spare("PENDING", NONE)], 2) == [
        (Step.START, ENGINE, 1),
        (Step.REMOVE_GROUP, "spare-0", -1),
    ]
    assert next_steps([engine("CREATED", RUNS, NONE)], 2) == [(Step.START, ENGINE, 1)]
    told = "one that refuses (b: There is no key.) is asked again within 60 s"
    assert waits_for([refused], 2, {"CPU": 1.0}, {}) == told
    assert waits_for([refused, spare("PENDING", NONE)], 2, {"CPU": 1.0}, {}) == (
        f"{told}, and Ray has no room for 1 times 1 CPU, each on one node "
        "(its state: PENDING; free on all nodes: 0 CPU)"
    )


def test_a_node_is_asked_less_and_less_often() -> None:
    assert [pause_s(num) for num in (1, 2, 3, 4, 5, 50)] == [5, 10, 20, 40, 60, 60]


def test_what_the_engine_waits_for() -> None:
    room, free = {"CPU": 2.0, "GPU": 2.0}, {"CPU": 3.0, "memory": 1e9}
    assert waits_for([engine("RESCHEDULING", RUNS, NONE)], 2, room, free) == (
        "Ray has no room for 2 times 2 CPU, 2 GPU, each on one node "
        "(its state: RESCHEDULING; free on all nodes: 3 CPU, 0 GPU)"
    )
    assert waits_for([engine("CREATED", RUNS, NONE)], 2, room, {}) == "Ray starts 1 of 2 followers"
    assert waits_for([engine("CREATED", RUNS, UNCERTAIN)], 2, room, {}) == ""
    leaving = [draining(engine("CREATED", RUNS, RUNS), 1), spare("PENDING", NONE)]
    assert waits_for(leaving, 2, room, {}).startswith("Ray has no room for 1 times 2 CPU, 2 GPU, each on one node")
    moved = [engine("RESCHEDULING", RUNS, NONE), spare("CREATED", RUNS)]
    assert waits_for(moved, 2, room, {}) == "", "a bundle that nobody needs any more"


class Cluster:
    """Ray and the broker around `next_steps`: nodes with room for one bundle each, which come, drain and end."""

    def __init__(self, num_parts: int, rng: random.Random) -> None:
        self.num_parts, self.rng = num_parts, rng
        self.draining: dict[int, bool] = dict.fromkeys(range(num_parts), STAYS)  # by node
        self.refusing: set[int] = set()  # nodes that cannot take part, and are not asked again meanwhile
        self.num_nodes = num_parts
        self.nodes: dict[str, list[int | None]] = {ENGINE: [None] * num_parts}  # of the bundles of each group
        self.holders: dict[str, list[HolderState]] = {ENGINE: [NONE] * num_parts}
        self.made: set[str] = set()
        self.avoided: dict[str, set[int]] = {}  # the nodes that refused when a group was made

    def add(self) -> None:
        self.draining[self.num_nodes] = STAYS
        self.num_nodes += 1

    def end(self, node: int) -> None:
        del self.draining[node]
        self.refusing.discard(node)
        for name, nodes in self.nodes.items():
            for number, at in enumerate(nodes):
                if at == node:
                    nodes[number] = None
                    if self.holders[name][number] is not NONE:
                        self.holders[name][number] = ENDED

    def refuse(self, node: int) -> None:
        """What this node has is lost, and it cannot take part any more."""
        self.refusing.add(node)
        for name, nodes in self.nodes.items():
            for number, at in enumerate(nodes):
                if at == node and self.holders[name][number] is not NONE:
                    self.holders[name][number] = ENDED

    def place(self) -> None:
        """Ray finds room for what lacks it, group by group and not in part at first."""
        for name in sorted(self.made):
            taken = {node for nodes in self.nodes.values() for node in nodes}
            taken |= self.avoided.get(name, set())
            free = [node for node, drains in self.draining.items() if not drains and node not in taken]
            missing = [number for number, node in enumerate(self.nodes[name]) if node is None]
            if len(free) >= len(missing):
                for number in missing:
                    self.nodes[name][number] = free.pop()

    def groups(self) -> list[Group]:
        found = []
        for name, holders in self.holders.items():
            nodes = self.nodes[name]
            state = ("CREATED" if None not in nodes else "RESCHEDULING") if name in self.made else None
            bundles = tuple(
                Bundle(holder, node is not None and self.draining[node], "no" if node in self.refusing else "")
                for holder, node in zip(holders, nodes, strict=True)
            )
            found.append(Group(name, state, bundles))
        return found

    def tick(self) -> None:
        self.place()
        for step, name, number in next_steps(self.groups(), self.num_parts):
            match step:
                case Step.MAKE_GROUP:
                    self.nodes.setdefault(name, [None])
                    self.holders.setdefault(name, [NONE])
                    self.made.add(name)
                    self.avoided[name] = set(self.refusing)
                case Step.REMOVE_GROUP:
                    assert self.holders[name] == [NONE] and name != ENGINE
                    self.made.remove(name)
                    del self.nodes[name], self.holders[name]
                case Step.START:
                    node = self.nodes[name][number]
                    assert node is not None and not self.draining[node] and self.holders[name][number] is NONE
                    assert node not in self.refusing
                    self.holders[name][number] = RUNS
                case Step.FORGET:
                    self.holders[name][number] = NONE
                case Step.LEAVE:
                    self.holders[name][number] = LEAVES
        assert self.num_staying <= self.num_parts, "a follower too many"
        for holders in self.holders.values():  # the lead has one that leaves relieved by one that stays
            for number, holder in enumerate(holders):
                if holder is LEAVES and self.num_staying == self.num_parts:
                    holders[number] = ENDED

    @property
    def num_staying(self) -> int:
        return sum(bundle.holder is RUNS and not bundle.drains for group in self.groups() for bundle in group.bundles)


def settle(cluster: Cluster) -> Sequence[Group]:
    for _ in range(10):
        cluster.tick()
    return cluster.groups()


@pytest.mark.parametrize("seed", (*range(40), 97, 644, 876))  # these need names for several that leave at once
def test_histories_of_nodes_end_with_every_follower_in_place_and_at_most_one_place_over_for_each_part(
    seed: int,
) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng.randint(1, 3), rng)
    settle(cluster)
    assert cluster.num_staying == cluster.num_parts
    for _ in range(60):
        nodes = list(cluster.draining)
        match rng.randrange(5):
            case 0:
                cluster.add()
            case 3 if nodes:
                cluster.refuse(rng.choice(nodes))
            case 1 if nodes:
                cluster.draining[rng.choice(nodes)] = DRAINS
            case 2 if nodes:
                cluster.end(rng.choice(nodes))
            case _:
                cluster.tick()
    for _ in range(3 * cluster.num_parts):
        cluster.add()
    groups = settle(cluster)
    assert cluster.num_staying == cluster.num_parts, groups
    for node in [node for node, drains in cluster.draining.items() if drains]:
        cluster.end(node)
    groups = settle(cluster)
    unused = [group for group in groups if all(bundle.holder is NONE for bundle in group.bundles)]
    assert cluster.num_staying == cluster.num_parts and all(group.name == ENGINE for group in unused), groups
    assert sum(len(group.bundles) for group in groups) <= 2 * cluster.num_parts, groups

"""The process that asks Ray for room and keeps a follower running on each part of it.

A process of its own, because Ray ends a program that loses its head node for a minute. Nothing that it does is needed
by an engine that runs. When its standard input ends, the lead has, and the room is given back.
"""

import os
import queue
import sys
import threading
import time
from typing import Any

import msgspec

from ..version import __version__
from .holder import REFUSED, Holder, Warden
from .placing import (
    ENGINE,
    Bundle,
    Connect,
    Connected,
    Ended,
    Failed,
    FromBroker,
    Group,
    HolderState,
    Place,
    Refusal,
    Step,
    ToBroker,
    Waiting,
    next_steps,
    pause_s,
    spare_names,
    waits_for,
)

TICK_S = 0.5
PAUSE_S = 1.0  # between two starts of a part's holder


def main() -> int:
    """The exit code: 0 after `Release` or the end of the input, 1 if there is no Ray."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Ray prints is no message

    def tell(message: FromBroker) -> None:
        try:
            out.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            os._exit(0)

    inbox: queue.SimpleQueue[ToBroker | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    connect = inbox.get()
    if not isinstance(connect, Connect):
        return 0
    try:
        connected = _connect(connect)
    except ImportError:
        tell(Failed("Ray is not installed here. Run pip install 'pagewire[ray]', on all nodes."))
        return 1
    except Exception as error:  # Ray raises what its parts raise
        tell(Failed(f"Ray cannot be reached: {' '.join(str(error).split())[:300]}"))
        return 1
    tell(connected)
    place = inbox.get()
    if isinstance(place, Place):
        parts = _Parts(place)
        said: FromBroker | None = None
        while _is_empty(inbox):
            for message in parts.tick():
                if not isinstance(message, Waiting) or message != said:
                    tell(message)
                said = message if isinstance(message, Waiting) else said
        parts.release()
    return 0


def _is_empty(inbox: "queue.SimpleQueue[ToBroker | None]") -> bool:
    """Waits a tick for the next message or the end of the input: either ends the engine's work."""
    try:
        inbox.get(timeout=TICK_S)
    except queue.Empty:
        return True
    return False


def _read(inbox: "queue.SimpleQueue[ToBroker | None]") -> None:
    decoder = msgspec.json.Decoder(ToBroker)
    with open(0, "rb", buffering=0) as lines:  # a buffer has a lock, which would be held when this process ends
        for line in lines:
            inbox.put(decoder.decode(line))
    inbox.put(None)


def _connect(connect: Connect) -> Connected:
    import ray

    more = {} if connect.host is None else {"_node_ip_address": connect.host}
    head = connect.head or "auto"
    ray.init(head, namespace=connect.namespace, log_to_driver=False, logging_level="ERROR", **more)
    return Connected(
        host=str(ray.util.get_node_ip_address()),
        head=ray.get_runtime_context().gcs_address,
        num_nodes=sum(node["Alive"] for node in ray.nodes()),
        resources=ray.cluster_resources(),
    )


class _Parts:
    """What the engine has in Ray."""

    def __init__(self, place: Place) -> None:
        import ray

        self._ray: Any = ray
        self._place = place
        self._launch = msgspec.json.encode(place.launch)
        self._refusals = _Refusals()
        self._warden = self._named("warden")
        self._num_failures = 0  # of the warden, in a row
        self._fails_until = 0.0  # when it is asked again
        self._places = {ENGINE: self._places_of(ENGINE, place.num_parts)}
        for name in spare_names(place.num_parts):  # those of an earlier broker
            if self._look_up(name)[0] not in (None, "REMOVED"):
                self._places[name] = self._places_of(name, 1)

    def tick(self) -> list[FromBroker]:
        """Takes the next steps. What the lead is told."""
        messages: list[FromBroker] = []
        draining = set(self._ray._private.state.state.get_draining_nodes())
        groups = []
        for name, places in self._places.items():
            state, nodes = self._look_up(name)
            bundles = []
            for number, place in enumerate(places):
                node = nodes.get(number)
                holder = self._state(place, node, messages)
                bundles.append(Bundle(holder, node in draining, self._refusals.of(node)))
            groups.append(Group(name, state, tuple(bundles)))
        for step, name, number in next_steps(groups, self._place.num_parts):
            self._take(step, name, number, messages)
        free = {} if all(group.state == "CREATED" for group in groups) else self._ray.available_resources()
        messages.append(Waiting(waits_for(groups, self._place.num_parts, self._place.bundle, free)))
        return messages

    def release(self) -> None:
        """Gives all room back."""
        for place in (place for places in self._places.values() for place in places):
            self._kill(place.holder)
        self._kill(self._warden)
        for name in self._places:
            self._remove_group(name)
        self._ray.shutdown()

    def _take(self, step: Step, name: str, number: int, messages: list[FromBroker]) -> None:
        if step is Step.MAKE_GROUP:
            self._places.setdefault(name, self._places_of(name, 1))
            if time.monotonic() > self._fails_until:
                self._make_group(name, messages)
            return
        if step is Step.REMOVE_GROUP:
            self._remove_group(name)
            del self._places[name]
            return
        place = self._places[name][number]
        match step:
            case Step.ASK_AGAIN:
                self._hold(place, place.holder)
            case Step.FORGET:
                self._kill(place.holder)
                place.holder = None
            case Step.LEAVE:
                place.was_told = True
                place.holder.leave.options(concurrency_group="leave").remote()
            case Step.START if time.monotonic() > place.started_at + PAUSE_S:
                place.started_at = time.monotonic()
                self._start(place, name, number)

    def _state(self, place: "_Place", node: str | None, messages: list[FromBroker]) -> HolderState:
        """`node`: of the place. `messages`: gets what the lead is told of its end."""
        if place.holder is None:
            return HolderState.NONE
        if not self._ray.wait([place.run], timeout=0)[0]:
            return HolderState.LEAVES if place.was_told else HolderState.RUNS
        refusal = ""
        try:
            code, why = self._ray.get(place.run)
            if code == REFUSED:
                refusal = why or f"The follower of {place.name} cannot take part, and has not said why."
            elif not (place.was_told and code == 0):
                messages.append(Ended(f"the follower of {place.name} has ended with exit code {code}: {why[:300]}"))
        except self._ray.exceptions.ActorUnavailableError:
            return HolderState.UNCERTAIN
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.RayTaskError) or getattr(error, "actor_init_failed", False):
                refusal = self._breaks(node, error)  # the node's package is another one, or there is none
            else:
                messages.append(Ended(f"Ray has ended the holder {place.name} ({type(error).__name__})"))
        if refusal:
            messages.append(Refusal(refusal))
        self._refusals.note(node, refusal)
        return HolderState.ENDED

    def _breaks(self, node: str | None, error: Exception) -> str:
        """The sentence about a node on which the holder itself fails."""
        address = next((one["NodeManagerAddress"] for one in self._ray.nodes() if one["NodeID"] == node), "A node")
        return f"{address} cannot run pagewire {__version__}: {_last_line(error)}."

    def _look_up(self, name: str) -> tuple[str | None, dict[int, str]]:
        """A group's state, and the nodes of its bundles."""
        if (handle := self._handle(name)) is None:
            return None, {}
        table = self._ray.util.placement_group_table(handle)
        return table["state"], table["bundles_to_node_id"]

    def _handle(self, name: str) -> Any:
        try:
            return self._ray.util.get_placement_group(name)
        except ValueError:
            return None

    def _make_group(self, name: str, messages: list[FromBroker]) -> None:
        """`messages`: gets why that fails. The warden is never ended for it: other groups may live as long as it."""
        bundles = [self._place.bundle] * len(self._places[name])
        failure: Exception | None = None
        for _ in range(2):  # the warden may have ended with its node
            if self._warden is None:
                self._warden = self._start_warden()
            try:
                self._ray.get(self._warden.make_group.remote(name, bundles, self._refusals.nodes))
                self._num_failures = 0
                return
            except (self._ray.exceptions.ActorDiedError, self._ray.exceptions.ActorUnschedulableError) as error:
                self._warden, failure = None, error
            except self._ray.exceptions.ActorUnavailableError:
                return  # for a moment: the next tick asks again, and the warden makes no group twice
            except self._ray.exceptions.RayError as error:
                failure = error
                break
        self._num_failures += 1
        self._fails_until = time.monotonic() + pause_s(self._num_failures)
        messages.append(Refusal(f"The actor that asks Ray for room fails: {_last_line(failure)}."))

    def _start_warden(self) -> Any:
        """On this node, which has this package, and with which the lead ends in any case; anywhere if it drains."""
        here = self._ray.get_runtime_context().get_node_id()
        options = {"name": "warden", "lifetime": "detached", "num_cpus": 0, "max_concurrency": 2}
        if here not in self._ray._private.state.state.get_draining_nodes():  # soft: Ray 2.60 uses other nodes as well
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
            options["scheduling_strategy"] = strategy
        return self._ray.remote(Warden).options(**options).remote(self._place.lifeline)

    def _remove_group(self, name: str) -> None:
        handle = self._handle(name)
        if handle is not None and self._ray.util.placement_group_table(handle)["state"] != "REMOVED":
            self._ray.util.remove_placement_group(handle)

    def _start(self, place: "_Place", name: str, number: int) -> None:
        group = self._handle(name)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
        holder = (
            self._ray.remote(concurrency_groups={"leave": 1})(Holder)  # each broker has a call of `run` wait
            .options(
                name=place.name,
                lifetime="detached",
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,
                num_cpus=self._place.bundle["CPU"],
                num_gpus=self._place.bundle.get("GPU", 0),
                scheduling_strategy=strategy,
            )
            .remote()
        )
        self._hold(place, holder)

    def _hold(self, place: "_Place", holder: Any) -> None:
        place.holder, place.was_told = holder, False
        place.run = holder.run.remote(self._launch)

    def _places_of(self, name: str, num: int) -> list["_Place"]:
        """Of a group, with the holders that an earlier broker has started there."""
        places = [_Place(f"{name}-{number}") for number in range(num)]
        for place in places:
            if (holder := self._named(place.name)) is not None:
                self._hold(place, holder)
        return places

    def _named(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            return None

    def _kill(self, actor: Any) -> None:
        if actor is not None:
            self._ray.kill(actor, no_restart=True)


def _last_line(error: Exception | None) -> str:
    """What an error of Ray's, of many lines, says in the end."""
    return next((line.strip()[:300] for line in reversed(str(error).splitlines()) if line.strip()), "")


class _Place:
    """A bundle of a group, and its holder."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the holder
        self.holder: Any = None
        self.run: Any = None  # of the holder: its follower's end
        self.was_told = False  # to leave
        self.started_at = 0.0


class _Refusals:
    """Nodes that could not take part, by their ids, and when they are asked again."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, int, float]] = {}  # the last reason, how often in a row, and when to ask again

    def note(self, node: str | None, refusal: str) -> None:
        """A follower there has ended. `node`: None: its group was removed. `refusal`: empty: for another reason."""
        if node is None:
            return
        num = self._of.pop(node, ("", 0, 0.0))[1] + 1
        if refusal:
            self._of[node] = refusal, num, time.monotonic() + pause_s(num)

    def of(self, node: str | None) -> str:
        """Why this node is not asked again yet, a sentence; empty: it may be."""
        refusal, _, again_at = self._of.get(node or "", ("", 0, 0.0))
        return refusal if time.monotonic() < again_at else ""

    @property
    def nodes(self) -> list[str]:
        return [node for node in self._of if self.of(node)]


if __name__ == "__main__":
    sys.exit(main())

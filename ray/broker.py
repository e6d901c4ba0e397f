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

from .holder import Holder, Warden
from .placing import (
    Connect,
    Connected,
    Ended,
    Failed,
    FromBroker,
    HolderState,
    Place,
    Step,
    ToBroker,
    Waiting,
    next_steps,
    waits_for,
)

TICK_S = 0.5
PAUSE_S = 1.0  # between two starts of a part's holder
_GROUP = "engine"


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
        host = _connect(connect)
    except ImportError:
        tell(Failed("Ray is not installed here. Run pip install 'pagewire[ray]', on all nodes."))
        return 1
    except Exception as error:  # Ray raises what its parts raise
        tell(Failed(f"Ray cannot be reached: {' '.join(str(error).split())[:300]}"))
        return 1
    tell(Connected(host))
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


def _connect(connect: Connect) -> str:
    """Connects to the cluster of this machine, or of RAY_ADDRESS. Returns this machine's address as a node."""
    import ray

    more = {} if connect.host is None else {"_node_ip_address": connect.host}
    ray.init("auto", namespace=connect.namespace, log_to_driver=False, logging_level="ERROR", **more)
    return str(ray.util.get_node_ip_address())


class _Parts:
    """What the engine has in Ray."""

    def __init__(self, place: Place) -> None:
        import ray

        self._ray: Any = ray
        self._place = place
        self._holders: list[Any] = [None] * place.num_parts
        self._runs: list[Any] = [None] * place.num_parts
        self._started_at = [0.0] * place.num_parts
        self._launch = msgspec.json.encode(place.launch)
        self._warden = self._named("warden")
        for part in range(place.num_parts):  # those of an earlier broker
            if (holder := self._named(f"part-{part}")) is not None:
                self._hold(part, holder)

    def tick(self) -> list[FromBroker]:
        """Takes the next steps. What the lead is told."""
        messages: list[FromBroker] = []
        states = [self._state(part, messages) for part in range(len(self._holders))]
        group, table = self._group()
        for step, part in next_steps(group, states):
            if step is Step.MAKE_GROUP:
                self._make_group()
            elif step is Step.ASK_AGAIN:
                self._hold(part, self._holders[part])
            elif step is Step.FORGET:
                self._kill(self._holders[part])
                self._holders[part] = None
            elif time.monotonic() > self._started_at[part] + PAUSE_S:
                self._started_at[part] = time.monotonic()
                self._start(part, table)
        free = {} if group == "CREATED" else self._ray.available_resources()
        messages.append(Waiting(waits_for(group, states, self._place.bundle, free)))
        return messages

    def release(self) -> None:
        """Gives all room back."""
        for holder in [*self._holders, self._warden]:
            self._kill(holder)
        group, handle = self._group()
        if handle is not None and group != "REMOVED":
            self._ray.util.remove_placement_group(handle)
        self._ray.shutdown()

    def _state(self, part: int, messages: list[FromBroker]) -> HolderState:
        """`messages`: gets what the lead is told of its end."""
        run = self._runs[part]
        if self._holders[part] is None:
            return HolderState.NONE
        if not self._ray.wait([run], timeout=0)[0]:
            return HolderState.RUNS
        try:
            code, line = self._ray.get(run)
        except self._ray.exceptions.ActorUnavailableError:
            return HolderState.UNCERTAIN
        except self._ray.exceptions.RayError as error:
            messages.append(Ended(f"Ray has ended the holder of part {part} ({type(error).__name__})"))
            return HolderState.ENDED
        messages.append(Ended(f"the follower of part {part} has ended with exit code {code}: {line[:300]}"))
        return HolderState.ENDED

    def _group(self) -> tuple[str | None, Any]:
        """Its state and handle."""
        try:
            handle = self._ray.util.get_placement_group(_GROUP)
        except ValueError:
            return None, None
        return self._ray.util.placement_group_table(handle)["state"], handle

    def _make_group(self) -> None:
        bundles = [self._place.bundle] * self._place.num_parts
        for _ in range(2):  # the warden may have ended with its node
            if self._warden is None:
                options = {"name": "warden", "lifetime": "detached", "num_cpus": 0, "max_concurrency": 2}
                self._warden = self._ray.remote(Warden).options(**options).remote(self._place.launch.address)
            try:
                self._ray.get(self._warden.make_group.remote(_GROUP, bundles))
                return
            except self._ray.exceptions.ActorDiedError:
                self._warden = None

    def _start(self, part: int, group: Any) -> None:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, part)
        holder = (
            self._ray.remote(Holder)
            .options(
                name=f"part-{part}",
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
        self._hold(part, holder)

    def _hold(self, part: int, holder: Any) -> None:
        self._holders[part] = holder
        self._runs[part] = holder.run.remote(self._launch)

    def _named(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            return None

    def _kill(self, actor: Any) -> None:
        if actor is not None:
            self._ray.kill(actor, no_restart=True)


if __name__ == "__main__":
    sys.exit(main())

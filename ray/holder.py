"""The actors that hold an engine's place in a Ray cluster. Neither computes anything.

A `Holder` is one part of the engine: it starts the follower program as a child and waits for it. A `Warden` makes the
placement group, which therefore lives as long as the warden or the broker does, and ends when the lead does not answer:
so nothing keeps its room, whatever dies in whatever order.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from ..procs import interpreter
from .placing import FollowerLaunch

REFUSED = 2  # the exit code of a follower that cannot take part
CHECK_S = 3.0  # between the warden's looks at the lead
GONE_S = 15.0  # without an answer of the lead, until the warden ends
_TAIL = 20  # lines of a follower's output among which is why it has ended
_PREFIX = "pagewire: "


class Holder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._was_told = False  # to leave
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._name = ""  # of the follower

    def run(self, launch_json: bytes) -> tuple[int, str]:
        """Starts the follower, unless it was started, and waits for its end: its exit code, and the line that says why.
        Several threads may call it."""
        with self._lock:
            if self._child is None:
                self._child = self._start(msgspec.json.decode(launch_json, type=FollowerLaunch))
        code = self._child.wait()
        self._reader.join(1.0)
        return code, why_ended(code, list(self._tail), self._name)

    def leave(self) -> None:
        """The node is about to end: the follower leaves as soon as another one has taken over."""
        with self._lock:
            if self._child is not None and not self._was_told:  # a second signal would end it at once
                self._was_told = True
                self._child.terminate()

    def _start(self, launch: FollowerLaunch) -> "subprocess.Popen[bytes]":
        import ray

        host = ray.util.get_node_ip_address()
        self._name = f"{host}/{os.getpid()}"
        launch = replace(launch, host=host, name=self._name)
        environment = interpreter.environment()
        environment.pop("OMP_NUM_THREADS", None)  # Ray's: one for each CPU of the actor; a worker has a pool of its own
        child = subprocess.Popen(
            [*interpreter.COMMAND, "pagewire.ray.follower"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(launch) + b"\n")
        child.stdin.flush()  # and stays open: its end is the end of this process
        self._reader = threading.Thread(target=self._pass_on, args=(child,), daemon=True)
        self._reader.start()
        return child

    def _pass_on(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stderr is not None
        for line in child.stderr:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._tail.append(text)
            print(text, file=sys.stderr, flush=True)


def why_ended(code: int, lines: Sequence[str], name: str) -> str:
    """The line that says why a follower has ended, with its name; empty: it has written nothing. Of a refusal that is
    our own last line, and of all else, such as a traceback, the last line."""
    own = [line for line in lines if line.startswith(_PREFIX)] if code == REFUSED else []
    line = (own or lines or ("",))[-1].removeprefix(_PREFIX)
    return line if name in line or not line else f"{name}: {line}"


class Warden:
    def __init__(self, lifeline: tuple[str, int]) -> None:
        """`lifeline`: the lead's, see `Place`."""
        self._lifeline = lifeline
        threading.Thread(target=self._watch, daemon=True).start()

    def make_group(self, name: str, bundles: list[dict[str, float]], avoided: list[str]) -> None:
        """Asks Ray for room, unless it was asked; does not wait for it. `avoided`: ids of nodes."""
        import ray

        try:
            group = ray.util.get_placement_group(name)
            if ray.util.placement_group_table(group)["state"] != "REMOVED":
                return
        except ValueError:
            pass
        selector = {"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else {}
        ray.util.placement_group(bundles, strategy="PACK", name=name, bundle_label_selector=[selector] * len(bundles))

    def _watch(self) -> None:
        answered_at = time.monotonic()
        while time.monotonic() < answered_at + GONE_S:
            time.sleep(CHECK_S)
            try:
                socket.create_connection(self._lifeline, timeout=CHECK_S).close()
                answered_at = time.monotonic()
            except OSError:
                continue
        os._exit(0)

"""A small grammar for tests: the tokens of an output come from sets of token ids in turn, cyclically.

`Constraint.text` is JSON with `sets`, `free` (number of unconstrained tokens at the beginning), `length` (the output
ends after that many tokens) and `fault` (an error to simulate).
"""

import json
import mmap
import os
import signal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewire.config.config import EngineConfig
from pagewire.errors import ConfigError, RequestError
from pagewire.ipc.messages import Constraint


def cycle(*sets: list[int], free: int = 0, length: int | None = None, fault: str = "", fault_at: int = 0) -> Constraint:
    text = json.dumps({"sets": sets, "free": free, "length": length, "fault": fault, "fault_at": fault_at})
    return Constraint(kind="lark", text=text)


def obeys(constraint: Constraint, ids: list[int]) -> bool:
    """Whether the output, or a continuation of it, follows this grammar."""
    rules = json.loads(constraint.text)
    sets, free = rules["sets"], rules["free"]
    in_time = rules["length"] is None or len(ids) <= rules["length"]
    return in_time and all(token in sets[i % len(sets)] for i, token in enumerate(ids) if i >= free)


class Follower:
    def __init__(self, rules: dict[str, Any]) -> None:
        self._rules = rules
        self._ids: list[int] = []
        if rules["fault"] == "large":  # mapped, because malloc would serve it from what the process has freed before
            self._ballast = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._ballast.write(bytes(16 << 20))

    def accept(self, ids: list[int]) -> None:
        self._ids += ids
        if self._rules["fault"] == "stumble" and len(self._ids) >= self._rules["fault_at"]:
            raise RuntimeError("it stumbled")

    def fill(self, mask: NDArray[np.int32]) -> bool:
        place = len(self._ids)
        if place < self._rules["free"]:
            return False
        bits = np.zeros(len(mask) * 32, np.bool_)
        if not (self._rules["fault"] == "dead end" and place >= self._rules["fault_at"]):
            bits[self._rules["sets"][place % len(self._rules["sets"])]] = True
        mask[:] = np.packbits(bits, bitorder="little").view("<i4")
        return True

    @property
    def is_ended(self) -> bool:
        return bool(len(self._ids) == self._rules["length"])


class Cycles:
    def compile(self, constraint: Constraint, prompt_tail: str) -> Follower:
        rules = json.loads(constraint.text)
        match rules["fault"]:
            case "refused":
                raise RequestError("invalid_request", "This is not a grammar.")
            case "hangs":
                sum(range(10**15))  # not a sleep, because CPU time is limited
            case "swells":
                bytearray(8 * 2**30)
            case "kills":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "bug":
                raise KeyError("oh")
        return Follower(rules)

    def forget(self) -> None:
        pass


def load(config: EngineConfig) -> Cycles:
    return Cycles()


def load_nothing(config: EngineConfig) -> Cycles:
    """Fails as for a model without a vocabulary."""
    raise ConfigError("There is no vocabulary.")


def load_to_die(config: EngineConfig) -> Cycles:
    """Ends the process, as a library that crashes while it is loaded."""
    os._exit(3)

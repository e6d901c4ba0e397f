"""Grammars are tried out here first: compiled in processes that may be killed, within limits of time and memory.

Compiling is native code that nothing can interrupt, and what it costs cannot be seen from a grammar's text. So whoever
would follow a grammar lets a process of no other use (`killable.py`) compile it and fill its first mask. What got
through there gets through again, in the process that goes on with it, which nobody's request can then hold up for
longer than the limit or take down. What was said of a grammar is remembered: most requests of a program come with the
same one.

`python -m pagewire.procs.grammar_sandbox` is the main program of such a process.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec
from msgspec import Struct

from ..config.config import EngineConfig
from ..errors import ErrorKind, RequestError
from ..ipc.messages import Constraint
from .killable import Lost, Pool, Work, answer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LIMIT_S = 2.0  # of the CPU, for a grammar
MEMORY_BYTES = 512 * 2**20  # that a grammar may take
_MAX_KNOWN_BYTES = 16 * 2**20  # of grammars that are remembered

_encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger("pagewire.grammar")


class Matcher(Protocol):
    """One sequence and the grammar that it follows."""

    def accept(self, ids: list[int]) -> None:
        """The sequence goes on with these tokens."""

    def fill(self, mask: "NDArray[np.int32]") -> bool:
        """Sets the bits of the tokens that may come next, [⌈vocab / 32⌉]. False: any may, and `mask` means nothing."""

    @property
    def is_ended(self) -> bool:
        """Nothing but the end may come."""


class Compiler(Protocol):
    """All grammars of one vocabulary."""

    def compile(self, constraint: Constraint, prompt_tail: str) -> Matcher:
        """Raises RequestError. prompt_tail: the text of the prompt's last tokens."""

    def forget(self) -> None:
        """Frees what is only kept to be faster the next time."""


Load = Callable[[EngineConfig], Compiler]
"""A function of a module, by whose name another process finds it. Raises ConfigError."""


class Outcome(Struct, frozen=True, array_like=True):
    """What a process says of a grammar."""

    kind: ErrorKind | None = None  # None: all is well
    detail: str = ""
    param: str = ""  # see `Failed`


_TOO_LARGE = Outcome("invalid_request", "The grammar is too large or too deep to be compiled: simplify it.")


def num_words(config: EngineConfig) -> int:
    """Of a mask."""
    return -(-config.model.vocab_size // 32)


class GrammarSandbox:
    """The grammars that are tried out, and what is known of others."""

    def __init__(self, config: EngineConfig, load: Load) -> None:
        self._pool = Pool(config, [__name__, f"{load.__module__}:{load.__qualname__}"])
        self._tried: dict[int, bytes] = {}  # rid → its grammar
        self._known: dict[bytes, Outcome] = {}  # grammar → what came of it; the one asked for last at the end
        self._num_bytes = 0  # of the grammars that are known
        self._done: list[tuple[int, Outcome]] = []

    @property
    def num_pending(self) -> int:
        """Grammars of which `collect` has not told."""
        return len(self._tried) + len(self._done)

    def begin(self, rid: int, constraint: Constraint) -> None:
        """Tries a grammar out."""
        grammar = _encode(constraint)
        if (outcome := self._known.get(grammar)) is not None:
            self._remember(grammar, outcome)
            self._done.append((rid, outcome))
        else:
            self._tried[rid] = grammar
            self._pool.begin(rid, Work(grammar, LIMIT_S))

    def forget(self, rid: int) -> None:
        """Nobody wants it any longer: if it still waits, it is through."""
        if self._pool.forget(rid):
            del self._tried[rid]
            self._done.append((rid, Outcome()))

    def collect(self) -> list[tuple[int, Outcome]]:
        """The rids whose grammars are through, well or not."""
        for rid, said in self._pool.collect():
            grammar = self._tried.pop(rid)
            outcome = self._of_lost(said) if isinstance(said, str) else msgspec.msgpack.decode(said, type=Outcome)
            if outcome.kind != "internal" and said != "unstartable":
                self._remember(grammar, outcome)
            self._done.append((rid, outcome))
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the processes. Nothing is tried any more."""
        self._pool.close()
        self._tried.clear()
        self._done.clear()

    def _of_lost(self, why: Lost) -> Outcome:
        match why:
            case "late":
                text = f"The grammar takes more than {LIMIT_S:g} s to compile: simplify it."
                return Outcome("invalid_request", text)
            case "dead":
                return _TOO_LARGE
            case "unstartable" if self._pool.complaint:
                return Outcome("invalid_request", self._pool.complaint)
            case "unstartable":
                return Outcome("internal", "Grammars cannot be compiled: the process that does it ends at once.")
            case _:
                assert_never(why)

    def _remember(self, grammar: bytes, outcome: Outcome) -> None:
        if self._known.pop(grammar, None) is None:
            self._num_bytes += len(grammar)
        self._known[grammar] = outcome
        while self._num_bytes > _MAX_KNOWN_BYTES:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._num_bytes -= len(oldest)


def try_out(grammar: bytes, compiler: Compiler, num_words: int) -> bytes:
    """Compiles it, and fills its first mask."""
    import numpy as np

    outcome = Outcome()
    try:
        matcher = compiler.compile(msgspec.msgpack.decode(grammar, type=Constraint), "")
        matcher.fill(np.zeros(num_words, np.int32))
    except RequestError as error:
        outcome = Outcome(error.kind, str(error), error.param)
    except MemoryError:
        outcome = _TOO_LARGE
    except Exception as error:
        log.exception("a grammar could not be compiled")
        outcome = Outcome("internal", f"The grammar could not be compiled ({type(error).__name__}).")
    return _encode(outcome)


def main(load: str, fd: int) -> None:
    """Tries grammars out until its parent is gone."""

    def start(config: EngineConfig) -> Callable[[bytes], bytes]:
        module, _, name = load.partition(":")
        compiler: Compiler = getattr(importlib.import_module(module), name)(config)
        return partial(try_out, compiler=compiler, num_words=num_words(config))

    answer(fd, start, memory_bytes=MEMORY_BYTES)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The grammar sandbox: compiles grammars first in processes that may be killed, with limits of time and memory.

Compiling is native code that cannot be interrupted, and its cost cannot be seen from a grammar's text. So a process
that does nothing else (`killable.py`) compiles each grammar and fills its first mask. A grammar that passes is compiled
again in the grammar process, which no request can block for longer than the limit, or crash. Outcomes are cached,
because most requests of an application have the same grammar.

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

LIMIT_S = 2.0  # CPU time for a grammar
MEMORY_BYTES = 512 * 2**20  # for a grammar
_MAX_CACHED_BYTES = 16 * 2**20  # of grammars whose outcome is cached

_encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger("pagewire.grammar")


class Matcher(Protocol):
    """The state of one constrained sequence."""

    def accept(self, ids: list[int]) -> None:
        """Appends sampled tokens."""

    def fill(self, mask: "NDArray[np.int32]") -> bool:
        """Writes the bits of the tokens that may come next, [⌈vocab_size / 32⌉]. False: any may, `mask` is void."""

    @property
    def is_ended(self) -> bool:
        """Whether only an eos may come next."""


class Compiler(Protocol):
    """Compiles constraints for one vocabulary."""

    def compile(self, constraint: Constraint, prompt_tail: str) -> Matcher:
        """prompt_tail: the text of the prompt's last tokens. Raises RequestError."""

    def forget(self) -> None:
        """Empties its cache."""


Load = Callable[[EngineConfig], Compiler]
"""A function at the top of a module, which another process imports by name. Raises ConfigError."""


class Outcome(Struct, frozen=True, array_like=True):
    """What came out of compiling a grammar."""

    kind: ErrorKind | None = None  # None: it was compiled
    detail: str = ""
    param: str = ""  # see `Failed`


_TOO_LARGE = Outcome("invalid_request", "The grammar is too large or too deep to be compiled: simplify it.")


def num_words(config: EngineConfig) -> int:
    """The number of int32 words of a mask."""
    return -(-config.model.vocab_size // 32)


class GrammarSandbox:
    """The grammars in the sandbox, and the outcomes of earlier ones."""

    def __init__(self, config: EngineConfig, load: Load) -> None:
        self._pool = Pool(config, [__name__, f"{load.__module__}:{load.__qualname__}"])
        self._pending: dict[int, bytes] = {}  # rid → its grammar
        self._outcomes: dict[bytes, Outcome] = {}  # by grammar, least recently used first
        self._num_bytes = 0  # of the grammars in `_outcomes`
        self._done: list[tuple[int, Outcome]] = []

    @property
    def num_pending(self) -> int:
        """Grammars that `collect` has not returned yet."""
        return len(self._pending) + len(self._done)

    def begin(self, rid: int, constraint: Constraint) -> None:
        """Compiles a grammar in the sandbox, unless its outcome is cached."""
        grammar = _encode(constraint)
        if (outcome := self._outcomes.get(grammar)) is not None:
            self._remember(grammar, outcome)
            self._done.append((rid, outcome))
        else:
            self._pending[rid] = grammar
            self._pool.begin(rid, Work(grammar, LIMIT_S))

    def forget(self, rid: int) -> None:
        """Cancels a grammar: if it still waits, `collect` returns it as compiled."""
        if self._pool.forget(rid):
            del self._pending[rid]
            self._done.append((rid, Outcome()))

    def collect(self) -> list[tuple[int, Outcome]]:
        """The rids whose grammars are done, with their outcomes."""
        for rid, said in self._pool.collect():
            grammar = self._pending.pop(rid)
            outcome = self._failure(said) if isinstance(said, str) else msgspec.msgpack.decode(said, type=Outcome)
            if outcome.kind != "internal" and said != "unstartable":
                self._remember(grammar, outcome)
            self._done.append((rid, outcome))
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the processes and drops all grammars."""
        self._pool.close()
        self._pending.clear()
        self._done.clear()

    def _failure(self, why: Lost) -> Outcome:
        match why:
            case "late":
                text = f"The grammar takes more than {LIMIT_S:g} s to compile: simplify it."
                return Outcome("invalid_request", text)
            case "dead" | "killed":
                return _TOO_LARGE
            case "unstartable" if self._pool.complaint:
                return Outcome("invalid_request", self._pool.complaint)
            case "unstartable":
                return Outcome("internal", "Grammars cannot be compiled: the process for that ends at once.")
            case _:
                assert_never(why)

    def _remember(self, grammar: bytes, outcome: Outcome) -> None:
        if self._outcomes.pop(grammar, None) is None:
            self._num_bytes += len(grammar)
        self._outcomes[grammar] = outcome
        while self._num_bytes > _MAX_CACHED_BYTES:
            oldest = next(iter(self._outcomes))
            del self._outcomes[oldest]
            self._num_bytes -= len(oldest)


def compile_once(grammar: bytes, compiler: Compiler, num_words: int) -> bytes:
    """Compiles a grammar and fills its first mask. Returns the encoded `Outcome`."""
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
    """Compiles grammars until its parent ends."""

    def start(config: EngineConfig) -> Callable[[bytes], bytes]:
        module, _, name = load.partition(":")
        compiler: Compiler = getattr(importlib.import_module(module), name)(config)
        return partial(compile_once, compiler=compiler, num_words=num_words(config))

    answer(fd, start, memory_bytes=MEMORY_BYTES)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

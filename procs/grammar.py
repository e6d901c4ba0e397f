"""The grammar process: says which tokens may come next in constrained sequences.

In each step the core sends the sampled tokens in one message and gets the masks in another. A grammar is compiled here
only after it was compiled in a sandbox (`grammar_sandbox.py`). The grammar library is loaded with the first constraint.
A constraint that fails here fails its own request.
"""

import asyncio
import contextlib
import logging
import time
from array import array
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from ..config.config import EngineConfig
from ..engine.text.tokenizer import Tokenizer, load_tokenizer
from ..errors import ErrorKind, PagewireError, RequestError
from ..ipc.actor import Post
from ..ipc.messages import (
    Constrain,
    Constrained,
    Facts,
    Leave,
    Masks,
    Ping,
    Reset,
    Sampled,
    Settings,
    Stop,
    ToGrammar,
    bytes_to_ids,
)
from .grammar_sandbox import Compiler, GrammarSandbox, Load, Matcher, Outcome, num_words
from .limits import return_memory, used_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GRAMMAR_BYTES = 2 << 30  # memory for all grammars of a server
_LOOK_S = 0.001  # between polls of the sandbox
_TURN_S = 0.02  # spent on compiling grammars before sequences are served again

log = logging.getLogger("pagewire.grammar")


def load_grammars(config: EngineConfig) -> Compiler:
    """The compiler for the model's vocabulary. Raises ConfigError."""
    from ..engine.text.grammar import load_grammars as load

    return load(Path(config.model.path), config.model.vocab_size, config.model.eos_token_ids)


class _Answer:
    """The columns of the next `Masks` message."""

    def __init__(self) -> None:
        self.rids = array("q")
        self.bits: list[bytes] = []
        self.free = array("q")
        self.complete = array("q")
        self.failed: list[tuple[int, ErrorKind, str]] = []

    def message(self) -> Masks | None:
        if not (self.rids or self.free or self.complete or self.failed):
            return None
        return Masks(
            self.rids.tobytes(),
            b"".join(self.bits),
            self.free.tobytes(),
            self.complete.tobytes(),
            tuple(self.failed),
        )


class GrammarActor:
    """Takes constraints and sampled tokens from the core, and sends it masks."""

    def __init__(self, config: EngineConfig, load: Load = load_grammars, *, memory_bytes: int | None = None) -> None:
        """memory_bytes: for all grammars; needs a process of its own."""
        self._config = config
        self._load = load
        self._sandbox = GrammarSandbox(config, load)
        self._pending: dict[int, Constrain] = {}  # by their first rid, until they are compiled here
        self._cancelled: set[int] = set()  # of the pending
        self._tested: deque[tuple[int, Outcome]] = deque()  # of the pending, those that the sandbox is done with
        self._matchers: dict[int, Matcher] = {}
        self._compiler: Compiler | None = None  # these three are loaded with the first constraint
        self._mask: NDArray[np.int32]
        self._tokenizer: Tokenizer | None = None
        self._is_watching = False
        self._memory_bytes = memory_bytes
        self._other_bytes = 0  # memory of the process before its first grammar

    def start(self, post: Post) -> Facts:
        self._post = post
        return Facts()

    def handle(self, messages: list[ToGrammar]) -> None:
        answer = _Answer()
        for message in messages:
            match message:
                case Constrain():
                    self._pending[message.rid] = message
                    self._sandbox.begin(message.rid, message.constraint)
                case Sampled():
                    for rid in memoryview(message.ended).cast("q"):
                        if rid in self._pending:
                            self._cancelled.add(rid)
                            self._sandbox.forget(rid)
                        self._matchers.pop(rid, None)
                    for rid, token in zip(memoryview(message.rids).cast("q"), bytes_to_ids(message.ids), strict=True):
                        self._go_on(rid, [token], answer)
                case Reset():
                    self._forget()
                case Ping() | Settings() | Leave() | Stop():
                    pass
                case _:
                    assert_never(message)
        self._tell(answer)
        self.poll()

    async def stop(self, grace_s: float) -> None:
        self._sandbox.close()
        self._tested.clear()

    def _forget(self) -> None:
        """Drops everything; the core sends again what it still wants."""
        if self._sandbox.num_pending:
            self._sandbox.close()
        self._pending.clear()
        self._cancelled.clear()
        self._matchers.clear()
        self._tested.clear()

    @property
    def num_pending(self) -> int:
        """Grammars that are not compiled yet. While there are any, `poll` must be called."""
        return self._sandbox.num_pending + len(self._tested)

    def poll(self) -> None:
        """Compiles grammars that passed the sandbox, for a bounded time, because running sequences wait meanwhile."""
        if self._sandbox.num_pending:
            self._tested += self._sandbox.collect()
        if self._tested:
            answer, until = _Answer(), time.monotonic() + _TURN_S
            while self._tested:
                rid, outcome = self._tested.popleft()
                self._begin(self._pending.pop(rid), outcome, answer)
                if time.monotonic() >= until:
                    break
            self._tell(answer)
        if self.num_pending and not self._is_watching:
            with contextlib.suppress(RuntimeError):  # without a loop, the driver of the actors calls
                asyncio.get_running_loop().call_later(0 if self._tested else _LOOK_S, self._look)
                self._is_watching = True

    def _look(self) -> None:
        self._is_watching = False
        self.poll()

    def _tell(self, answer: _Answer) -> None:
        if (message := answer.message()) is not None:
            self._post("core", message)

    def _begin(self, message: Constrain, outcome: Outcome, answer: _Answer) -> None:
        rids = range(message.rid, message.rid + message.n)
        if message.rid in self._cancelled:
            self._cancelled.remove(message.rid)
            self._post("core", Constrained(message.rid))  # the core then ends it
            return
        if outcome.kind is None:
            try:
                compiler, tail = self._loaded(), self._tail(message)
                self._check_memory(compiler)
                self._matchers.update((rid, compiler.compile(message.constraint, tail)) for rid in rids)
            except PagewireError as error:
                outcome = Outcome("invalid_request", str(error))
                if isinstance(error, RequestError):
                    outcome = Outcome(error.kind, str(error), error.param)
            except Exception:
                log.exception("the grammar of request %d could not be compiled", message.rid)
                outcome = Outcome("internal", "The grammar could not be compiled.")
        self._post("core", Constrained(message.rid, outcome.kind, outcome.detail, outcome.param))
        if outcome.kind is None:
            resumed = bytes_to_ids(message.resume_ids).tolist()
            for rid in rids:
                self._go_on(rid, resumed, answer)

    def _go_on(self, rid: int, ids: list[int], answer: _Answer) -> None:
        """Appends sampled tokens to the sequence, and adds what may come next to `answer`."""
        matcher = self._matchers.get(rid)
        if matcher is None:  # it has ended
            return
        try:
            if ids:
                matcher.accept(ids)
            if matcher.is_ended:
                answer.complete.append(rid)
            elif not matcher.fill(self._mask):
                answer.free.append(rid)
            elif self._mask.any():
                answer.rids.append(rid)
                answer.bits.append(self._mask.tobytes())
            else:
                answer.failed.append((rid, "internal", "No token of the model fits the grammar here."))
        except RequestError as error:
            answer.failed.append((rid, error.kind, str(error)))
        except Exception:
            log.exception("the grammar of request %d cannot go on", rid)
            answer.failed.append((rid, "internal", "The grammar of this request could not be followed any further."))

    def _check_memory(self, compiler: Compiler) -> None:
        """Raises RequestError if the grammars in use leave no memory for another."""
        if self._memory_bytes is None or used_memory() - self._other_bytes < self._memory_bytes:
            return
        compiler.forget()
        return_memory()
        if self._matchers and used_memory() - self._other_bytes >= self._memory_bytes:
            raise RequestError("queue_full", "The grammars of open requests take all memory for them: try again later.")

    def _loaded(self) -> Compiler:
        """The compiler, which is loaded with the first constraint."""
        if self._compiler is None:
            import numpy as np

            self._mask = np.zeros(num_words(self._config), np.int32)
            self._compiler = self._load(self._config)
            self._other_bytes = used_memory()
        return self._compiler

    def _tail(self, message: Constrain) -> str:
        """The text of the prompt's last tokens; empty if the constraint does not depend on it."""
        if not message.constraint.reasoning_ends:
            return ""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(Path(self._config.model.path))
        return self._tokenizer.decode(bytes_to_ids(message.tail_ids), skip_special_tokens=False)

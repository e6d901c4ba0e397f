"""One request that the engine works on, as the gateway owns it: rids, admission, journal, times, and how it ended.

Its reader has a `Stream`; the `OutputBuffer` is between the two.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from msgspec.structs import replace

from ...ipc.messages import Submit, Times
from .journal import Entry, entries
from .output_buffer import OutputBuffer
from .stats import Attainment
from .timeline import EndedSequence, Timeline, together


class OpenSequence:
    """One choice of a request."""

    def __init__(self, index: int, rid: int, entry: Entry) -> None:
        self.index = index
        self.rid = rid
        self.entry = entry  # what was delivered of it
        self.num_prompt = 0  # tokens, once it was accepted
        self.is_answered = False  # the engine has accepted it, sent a chunk of it or ended it
        self.is_open = True  # it has not ended
        self.times: Times | None = None  # from its first chunk
        self.first_chunk_at: float | None = None  # of those with ids
        self.last_chunk_at: float | None = None  # the same


class OpenRequest:
    """The sequences of one HTTP request. The gateway changes `engine`, `was_sent`, `num_deaths` and the rids."""

    def __init__(
        self,
        first_rid: int,
        submits: Sequence[Submit],
        arrived: float,
        buffer: OutputBuffer,
        attainment: Attainment | None = None,
    ) -> None:
        """`attainment`: of its latency class, if it has one."""
        self.attainment = attainment
        self.number = first_rid  # ascends in the order in which requests came
        self.submits = submits
        self.arrived = arrived
        self.buffer = buffer
        self.sequences = [OpenSequence(i, first_rid + i, entry) for i, entry in enumerate(entries(submits))]
        self.num_open = self.num_unanswered = len(self.sequences)
        self.num_tokens = 0  # of all prompts that were accepted, each counted once, and of all outputs so far
        self.ended: list[EndedSequence] = []  # in the order of their ends
        self.engine: int | None = None  # the number of the one that has it, or that had it last
        self.was_sent = False  # an engine may know of it
        self.was_resumed = False  # the engine has lost it before
        self.num_deaths = 0  # of processes that may have worked on it
        *firsts, _ = accumulate((submit.n for submit in submits), initial=0)
        self.firsts = frozenset(firsts)  # the first choice of each prompt
        self._patience: asyncio.TimerHandle | None = None  # while it is held, for a while at most

    @property
    def open_sequences(self) -> list[OpenSequence]:
        return [sequence for sequence in self.sequences if sequence.is_open]

    @property
    def nums_prompt(self) -> list[int]:
        """Tokens of each choice's prompt; 0 before it was accepted."""
        return [sequence.num_prompt for sequence in self.sequences]

    @property
    def num_output(self) -> int:
        """Tokens of output that were delivered."""
        return sum(len(sequence.entry.ids) for sequence in self.sequences) >> 2

    def timeline(self) -> Timeline:
        """Of the whole request, once every sequence has ended."""
        return together([ended.timeline for ended in self.ended])

    def accept(self, sequence: OpenSequence, num_prompt: int) -> None:
        """The engine has taken it; its prompt has `num_prompt` tokens."""
        if not sequence.num_prompt:
            sequence.num_prompt = num_prompt
            if sequence.index in self.firsts:
                self.num_tokens += num_prompt
        self.answer(sequence)

    def answer(self, sequence: OpenSequence) -> None:
        """The first answer of the engine admits the sequence, whatever it is."""
        if not sequence.is_answered:
            sequence.is_answered = True
            self.num_unanswered -= 1
            if not self.num_unanswered:
                self.buffer.is_admitted = True
                self.buffer.wake()

    def close(self, sequence: OpenSequence, ended: EndedSequence) -> None:
        """It has ended; a last chunk may still be put into the buffer."""
        self.ended.append(ended)
        sequence.is_open = False
        self.num_open -= 1
        self.buffer.is_complete = not self.num_open
        self.answer(sequence)

    def submissions(self, next_rid: int) -> list[Submit]:
        """What to send for all that is open. If the engine had it before, its sequences get rids from `next_rid` on
        and go on after what was delivered."""
        if self.was_sent:
            self.was_resumed = True
            for sequence in self.sequences:
                sequence.rid = next_rid + sequence.index
            return [sequence.entry.resumed(sequence.rid) for sequence in self.open_sequences]
        self.was_sent = True
        return [
            replace(submit, rid=self.number + first)
            for submit, first in zip(self.submits, sorted(self.firsts), strict=True)
        ]

    def was_with(self, kinds: Container[str]) -> bool:
        """Whether a process of one of these kinds may have worked on it."""
        if "core" in kinds or "worker" in kinds:
            return True
        return (
            ("tokenizer" in kinds and self.num_unanswered > 0)
            or ("detokenizer" in kinds and self.num_unanswered < self.num_open)
            or ("grammar" in kinds and any(submit.constraint is not None for submit in self.submits))
        )

    def hold(self, wait_s: float, give_up: Callable[["OpenRequest"], None], *, is_patient: bool = True) -> None:
        """It waits for the engine; for `wait_s` at most if the engine has not admitted it, or it is not patient."""
        if (self.num_unanswered or not is_patient) and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(wait_s, give_up, self)

    def release(self) -> None:
        """It waits no more."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

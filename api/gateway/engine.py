"""One of the engines that a gateway submits to, and what the gateway knows of it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from msgspec import MsgspecError, Struct
from msgspec.structs import replace

from ...ipc.messages import Cancel, ChatPrompt, Describe, Detokenize, IdsPrompt, Snapshot, Submit, TextPrompt, Tokenize
from ..engines.choice import Choice, Condition, Conversation, Member
from ..engines.conversation import conversation_of, key_of_beginning
from ..engines.prefixes import prefix_blocks
from .open_request import OpenRequest
from .poison_detector import PoisonDetector

Question = Tokenize | Detokenize | Describe
Post = Callable[[Submit | Cancel | Question], None]


class Outage(Struct, frozen=True):
    """An epoch of an engine begins: processes are being replaced, or a connection between them has lost messages."""

    lost: tuple[str, ...]  # the names of those that have died; (): none has, as in a restart, or when ranks move
    reason: str
    since: float  # on the gateway's clock

    @property
    def is_of_apis(self) -> bool:
        """Only api processes were lost: the engine goes on as soon as it has forgotten their requests."""
        return bool(self.lost) and all(name.partition("-")[0] == "api" for name in self.lost)


class Engine(Member):
    """Only its gateway changes the fields, and only `place`, `lift` and `settle` those of `Member`."""

    def __init__(self, number: int, post: Post, choice: "Choice[Engine]", killers: dict[bytes, None]) -> None:
        """`post` sends to its tokenizer. `killers`: as of `PoisonDetector`, for all engines."""
        super().__init__(f"engine {number}")
        self.number = number
        self.post = post
        self.outage: Outage | None = None
        self.snapshot: Snapshot | None = None  # the core's last report
        self.poison_detector: PoisonDetector[OpenRequest] = PoisonDetector(killers)
        self.vacant = asyncio.Event()  # it has no request of this gateway
        self.vacant.set()
        self._choice = choice
        choice.add(self)
        self.settle()

    @property
    def is_away(self) -> bool:
        """All of it was lost, and is not whole again."""
        return self.outage is not None and not self.outage.lost

    def forget_load(self) -> None:
        """All of it is lost: the last report counts no more. Its totals stay, because counters must not go back."""
        if self.snapshot is not None:
            groups = tuple(replace(group, num_held=0, num_idle=0) for group in self.snapshot.groups)
            self.snapshot = replace(
                self.snapshot,
                num_running=0,
                num_waiting=0,
                num_blocks_used=0,
                step_age_s=0.0,
                is_asleep=False,
                groups=groups,
            )

    @property
    def takes_requests(self) -> bool:
        """It is whole, and does not work on requests that may have killed a process: nothing runs beside these."""
        return self.outage is None and not self.poison_detector

    def settle(self) -> None:
        """Call it when `takes_requests` may have changed."""
        self._choice.turned(self, Condition.ABLE if self.takes_requests else Condition.OUT)

    def place(self, request: OpenRequest) -> None:
        """The request is with this engine from now on."""
        request.engine = self.number
        self._choice.opened(self)
        self.vacant.clear()

    def lift(self, request: OpenRequest) -> None:
        """It is not with this engine any more."""
        assert request.engine == self.number, request.engine
        self._choice.closed(self)
        if not self.num_open:
            self.vacant.set()

    def keeps_back(self, request: OpenRequest) -> bool:
        """Whether a request that waits must go on here: it may have killed a process twice, or waits for its turn among
        such requests, or what it has computed is still here."""
        if self.outage is None:
            return self.poison_detector.is_waiting(request)
        return self.outage.is_of_apis or request.num_deaths > 1


class Beginning(NamedTuple):
    """What `Choice.choose` is told of a prompt."""

    blocks: Sequence[int] = ()
    conversation: Conversation | None = None
    key_of: Callable[[int], int] | None = None


def beginning(submit: Submit) -> Beginning:
    """That of a prompt; empty if it has none."""
    prompt = submit.prompt
    root, conversation = submit.salt, None
    match prompt:
        case ChatPrompt():
            root += prompt.tools
            text = prompt.messages
            with suppress(MsgspecError):
                conversation = conversation_of(b"", text, root)
        case TextPrompt():
            text = prompt.text.encode(errors="replace")
        case IdsPrompt():
            text = prompt.ids
        case _:
            return Beginning()
    return Beginning(prefix_blocks(root, text), conversation, partial(key_of_beginning, root, text))

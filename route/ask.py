"""One request as the router sees it: what it may be sent for again, and how an engine goes on with its stream.

A stream of chat, completions, responses or messages is asked for with token ids and with a seed, so that another engine
can go on exactly where one broke off; the client sees neither unless it asked for them. Bodies that are no valid
requests are passed on as they are: to say what is wrong with them is the engine's part.
"""

import contextlib
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
from msgspec import Raw, Struct
from starlette.types import Receive

from ..api.http.exchange import ClientGone
from .journal import ChatJournal, Journal
from .prefixes import prefix_blocks
from .typed_journal import TypedJournal

_CHAT_PATHS = ("/v1/chat/completions", "/v1/completions")
_TYPED_PATHS = ("/v1/responses", "/v1/messages")
_HOME_PATHS = re.compile(r"/v1/(files|batches)(/|$)")  # what the first engine keeps, files and all
_RESPONSE_PATH = re.compile(r"/v1/responses/([^/]{1,128})")
_UNSAID_OUTPUT = 256  # tokens that a request which names no limit is taken to write
_SEEDS = 2**62


class _Fields(Struct):
    """What is read of a body; of another shape it is the engine's to refuse."""

    stream: bool | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    use_beam_search: bool | None = None
    return_token_ids: bool | None = None
    top_logprobs: int | None = None
    include: Raw = msgspec.field(default_factory=Raw)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    timeout: float | None = None
    messages: Raw = msgspec.field(default_factory=Raw)
    prompt: Raw = msgspec.field(default_factory=Raw)
    input: Raw = msgspec.field(default_factory=Raw)
    system: Raw = msgspec.field(default_factory=Raw)
    tools: Raw = msgspec.field(default_factory=Raw)


class Upload:
    """A body that is too large to be kept."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.was_left = False  # its client has gone before the end

    async def parts(self) -> AsyncIterator[bytes]:
        """As they come in, once. Raises ClientGone."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.was_left = True
                raise ClientGone
            yield message.get("body", b"")
            more = message.get("more_body", False)


class Ask:
    """A request with its whole body, or with the `upload` that brings it."""

    def __init__(self, method: str, path: str, body: bytes, salt: bytes, *, upload: Upload | None = None) -> None:
        """`path`: without the query. `salt`: keeps the prompts of different clients apart, as the engines do."""
        self.upload = upload
        self.is_repeatable = not (_HOME_PATHS.match(path) and method != "GET")
        self.is_for_home = _HOME_PATHS.match(path) is not None
        found = _RESPONSE_PATH.match(path)
        self.response_id = found[1] if found else None  # a stored response that it is about
        self.makes_response = path == "/v1/responses"
        self.body = body
        self.new_journal: Callable[[], Journal | None] = lambda: None  # of a stream with which another can go on
        self.num_choices = 1
        self.num_tokens = len(body) // 4 + 1  # that it may take, about
        self.blocks: list[int] = []
        self.patience_s = math.inf  # how long it wants to wait for an engine to take it
        self._fields: dict[str, Raw] = {}
        if method == "POST":
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._read(path, salt)

    def _read(self, path: str, salt: bytes) -> None:
        """Raises what msgspec does if the body is not what it should be; then it is passed on as it is."""
        fields = msgspec.json.decode(self.body, type=_Fields)
        num_prompts = len(_several(fields.prompt)) or 1
        self.response_id = self.response_id or fields.previous_response_id
        if fields.timeout is not None:
            self.patience_s = fields.timeout
        self.num_choices = num_prompts * max(1, fields.n or 1)
        longest = fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens
        self.num_tokens += self.num_choices * (_UNSAID_OUTPUT if longest is None else max(0, longest))
        prompt = b"".join(bytes(part) for part in (fields.system, fields.messages, fields.prompt, fields.input))
        self.blocks = prefix_blocks(salt + bytes(fields.tools), prompt)
        # Prompts of one request draw with seeds of their own unless one was asked for, and it has no way to say them.
        is_sure = num_prompts == 1 or fields.seed is not None or fields.temperature == 0
        if path in _CHAT_PATHS:
            can_go_on = not fields.use_beam_search and is_sure
        else:  # its last event has all log-probabilities, and an engine that goes on does not know those before
            has_logprobs = fields.top_logprobs is not None or b"logprobs" in bytes(fields.include)
            can_go_on = path in _TYPED_PATHS and not (has_logprobs or fields.return_token_ids)
        if fields.stream and can_go_on:
            self._fields = msgspec.json.decode(self.body, type=dict[str, Raw]) | {"return_token_ids": Raw(b"true")}
            if fields.seed is None:
                self._fields["seed"] = Raw(b"%d" % secrets.randbelow(_SEEDS))
            self.body = msgspec.json.encode(self._fields)
            is_chat, shows_ids = path in _CHAT_PATHS, bool(fields.return_token_ids)
            self.new_journal = lambda: ChatJournal(shows_ids=shows_ids) if is_chat else TypedJournal()

    def go_on(self, resumption: Mapping[str, object]) -> bytes:
        """The body that asks for the rest, with these fields."""
        return msgspec.json.encode({**self._fields, **resumption}) if resumption else self.body


def _several(prompt: Raw) -> list[object]:
    """The prompts of a completion request that has a list of them."""
    if not bytes(prompt).lstrip().startswith(b"["):
        return []
    found: list[object] = msgspec.json.decode(prompt)
    return found if found and not isinstance(found[0], int) else []

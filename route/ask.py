"""One request in the router: whether it may be sent again, and how another engine continues its stream.

The router adds `return_token_ids` and a seed to streams of chat, completions, responses and messages, so that another
engine can continue exactly where one was lost; the client sees them only if it asked for them. An invalid body is
passed on unchanged, and the engine answers with the error.
"""

import contextlib
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import msgspec
from msgspec import Raw, Struct
from starlette.types import Receive

from ..api.engines.choice import Conversation
from ..api.engines.conversation import conversation_of, key_of_beginning
from ..api.engines.prefixes import prefix_blocks
from ..api.http.exchange import ClientGone
from .journal import ChatJournal, Journal
from .typed_journal import TypedJournal

_CHAT_PATHS = ("/v1/chat/completions", "/v1/completions")
_TYPED_PATHS = ("/v1/responses", "/v1/messages")
_HOME_PATHS = re.compile(r"/v1/(files|batches)(/|$)")  # the first engine keeps all files and batches
_RESPONSE_PATH = re.compile(r"/v1/responses/([^/]{1,128})")
_DEFAULT_OUTPUT = 256  # estimated output tokens of a request without a limit
_SEEDS = 2**62
_BYTES_PER_TOKEN = 4
_OF_OUTPUT = (
    "max_completion_tokens", "min_tokens", "n", "best_of", "stream_options", "return_token_ids", "logprobs",
    "top_logprobs",
)  # fmt: skip
"""Fields of a body that say something of an output that a prefill leg does not have."""


class _Fields(Struct):
    """The fields of a body that the router reads."""

    model: str | None = None
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
    prompt_cache_key: str | None = None
    kv_transfer_params: Raw = msgspec.field(default_factory=Raw)
    prompt_logprobs: Raw = msgspec.field(default_factory=Raw)
    cache_hit_threshold: Raw = msgspec.field(default_factory=Raw)


class Upload:
    """A body that is too large to be kept; it is streamed to the engine."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.has_client_left = False  # the client disconnected before the end

    async def parts(self) -> AsyncIterator[bytes]:
        """The parts as they arrive; can be iterated once. Raises ClientGone."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.has_client_left = True
                raise ClientGone
            yield message.get("body", b"")
            more = message.get("more_body", False)


class Ask:
    """A request with its whole body, or with an `upload`."""

    def __init__(self, method: str, path: str, body: bytes, salt: bytes, *, upload: Upload | None = None) -> None:
        """`path`: without the query. `salt`: clients with different salts share no prefix blocks, as in the engines."""
        self.upload = upload
        self.is_repeatable = not (_HOME_PATHS.match(path) and method != "GET")
        self.is_for_home = _HOME_PATHS.match(path) is not None
        found = _RESPONSE_PATH.match(path)
        self.response_id = found[1] if found else None  # the stored response that it names
        self.makes_response = path == "/v1/responses"
        self.body = body
        self.new_journal: Callable[[], Journal | None] = lambda: None  # None: no other engine can continue it
        self.num_choices = 1
        self.model: str | None = None  # that the request names; empty: the first; None: it is for none
        self.num_tokens = len(body) // 4 + 1  # estimate of prompt and output
        self.blocks: list[int] = []  # of the prompt, for `Prefixes`
        self.key_of: Callable[[int], int] | None = None  # of a number of these blocks
        self.num_prompt = 0  # estimated tokens of a prompt that another engine may compute; 0: none may
        self.conversation: Conversation | None = None
        self.patience_s = math.inf  # its own `timeout`: how long it waits for an engine to take it
        self._fields: dict[str, Raw] = {}
        if method == "POST":
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._read(path, salt)

    def _read(self, path: str, salt: bytes) -> None:
        """Raises MsgspecError, UnicodeDecodeError or RecursionError if the body is invalid."""
        fields = msgspec.json.decode(self.body, type=_Fields)
        self.model = fields.model or ""
        num_prompts = len(_several(fields.prompt)) or 1
        self.response_id = self.response_id or fields.previous_response_id
        if fields.timeout is not None:
            self.patience_s = fields.timeout
        self.num_choices = num_prompts * max(1, fields.n or 1)
        longest = fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens
        self.num_tokens += self.num_choices * (_DEFAULT_OUTPUT if longest is None else max(0, longest))
        prompt = b"".join(bytes(part) for part in (fields.system, fields.messages, fields.prompt, fields.input))
        root = salt + bytes(fields.tools)
        self.blocks = prefix_blocks(root, prompt)
        self.key_of = partial(key_of_beginning, root, prompt)
        turns = bytes(fields.messages or fields.input)
        self.conversation = conversation_of(bytes(fields.system), turns, root, fields.prompt_cache_key)
        is_own = not (bytes(fields.kv_transfer_params) or bytes(fields.cache_hit_threshold))  # no proxy has split it
        computes_all = bool(bytes(fields.prompt_logprobs)) or bool(fields.use_beam_search)
        if path in _CHAT_PATHS and num_prompts == 1 and is_own and not computes_all:
            self.num_prompt = len(prompt) // _BYTES_PER_TOKEN
        # Without a seed, each of several prompts is sampled with a random one, and a request can name only one seed.
        is_reproducible = num_prompts == 1 or fields.seed is not None or fields.temperature == 0
        if path in _CHAT_PATHS:
            is_resumable = not fields.use_beam_search and is_reproducible
        else:  # the last event has all log-probabilities, and an engine that resumes does not have the earlier ones
            has_logprobs = fields.top_logprobs is not None or b"logprobs" in bytes(fields.include)
            is_resumable = path in _TYPED_PATHS and not (has_logprobs or fields.return_token_ids)
        if fields.stream and is_resumable:
            self._fields = msgspec.json.decode(self.body, type=dict[str, Raw]) | {"return_token_ids": Raw(b"true")}
            if fields.seed is None:
                self._fields["seed"] = Raw(b"%d" % secrets.randbelow(_SEEDS))
            self.body = msgspec.json.encode(self._fields)
            is_chat, shows_ids = path in _CHAT_PATHS, bool(fields.return_token_ids)
            self.new_journal = lambda: ChatJournal(shows_ids=shows_ids) if is_chat else TypedJournal()

    def body_with(self, more: Mapping[str, object]) -> bytes:
        """The body with these fields added. Only for a valid body."""
        if not more:
            return self.body
        return msgspec.json.encode({**(self._fields or msgspec.json.decode(self.body, type=dict[str, Raw])), **more})

    def prefill_body(self, more: Mapping[str, object]) -> bytes:
        """The same prompt, for an engine that only computes it, with these fields added."""
        fields = msgspec.json.decode(self.body, type=dict[str, Raw])
        for name in _OF_OUTPUT:
            fields.pop(name, None)
        return msgspec.json.encode({**fields, "max_tokens": 1, "stream": False, **more})


def _several(prompt: Raw) -> list[object]:
    """The prompts of a completion request that has a list of them; empty if it has one prompt."""
    if not bytes(prompt).lstrip().startswith(b"["):
        return []
    found: list[object] = msgspec.json.decode(prompt)
    return found if found and not isinstance(found[0], int) else []

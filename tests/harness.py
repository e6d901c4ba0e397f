"""A verified fake of the engine and a direct driver of the ASGI application.

The engine obeys the messages' contract: each rid gets Accepted or Failed first, exactly one terminal message, and
nothing after a Cancel. It has no clock: its messages come in successive turns of the loop.
"""

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from pagewire.api.admin.endpoints import Sleeper
from pagewire.api.app import Served, create_app
from pagewire.api.gateway.gateway import Gateway
from pagewire.api.ollama.endpoints import Download
from pagewire.config.access import ApiKey
from pagewire.config.config import EngineConfig, HttpConfig, ModelFacts
from pagewire.config.flags import make_config
from pagewire.errors import ErrorKind
from pagewire.ipc.codec import Decoder, encode
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    ChatPrompt,
    Chunk,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Failed,
    IdsPrompt,
    PairPrompt,
    PromptEcho,
    Sleep,
    Slept,
    Snapshot,
    Submit,
    TextBatch,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenLogprob,
    TopLogprob,
    ToTokenizer,
    Usage,
    Wake,
    bytes_to_ids,
    ids_to_bytes,
)

T = TypeVar("T")
_tokenizers: Decoder[ToTokenizer] = Decoder(ToTokenizer)

CONFIG = EngineConfig(
    model=ModelFacts(
        path="model",
        name="model",
        max_position=128,
        vocab_size=1000,
        eos_token_ids=(0,),
        checkpoint_dtype="float32",
    ),
    served_model_names=("demo", "org/demo-alias"),
    dtype="float32",
    device="cpu",
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_dtype="float32",
    block_size=16,
    max_queued_requests=4,
    max_queued_tokens=1000,
    num_threads=1,
    tool_call_parser="hermes",
    reasoning_parser="none",
)


def http_config(**settings: Any) -> HttpConfig:
    """`settings`: settings of any section, and fields of `HttpConfig`."""
    own = {name: settings.pop(name) for name in HttpConfig.__struct_fields__ if name in settings}
    config = make_config(**{"port": 0, "start_timeout_s": 1.0, "drain_timeout": 0.0, **settings})
    sections = {name: getattr(config, name) for name in ("listen", "clients", "service", "admin", "reports")}
    return HttpConfig(**sections, **own)


def split_settings(settings: dict[str, Any]) -> tuple[EngineConfig, HttpConfig]:
    """`CONFIG` and `http_config` with these fields of `EngineConfig` and `ModelFacts`, and other settings."""
    engine, model, http = CONFIG, {}, {}
    for name, value in settings.items():
        if name in ModelFacts.__struct_fields__:
            model[name] = value
        elif name in EngineConfig.__struct_fields__:
            engine = replace(engine, **{name: value})
        else:
            http[name] = value
    return replace(engine, model=replace(engine.model, **model)), http_config(**http)


def candidate(text: str, logprob: float) -> TopLogprob:
    return TopLogprob(ord(text[0]) if text else 0, text, text.encode(), logprob)


def position(text: str, num_top: int) -> TokenLogprob:
    top = (candidate(text, -0.5), candidate("~", -2.0), candidate("^", -3.0))[:num_top]
    return TokenLogprob(candidate(text, -0.5), top)


class FakeEngine:
    """Answers every Submit with `pieces`, one per step. A token is a character, and its id is the code point."""

    def __init__(
        self, pieces: list[str] | None = None, *, finish: str = "stop", stop_reason: str | None = None
    ) -> None:
        self.pieces = ["Hel", "lo"] if pieces is None else pieces
        self.finish = finish
        self.stop_reason = stop_reason
        self.prompt_end = ""
        self.vectors = [[0.5, -1.0], [0.25, 2.0], [0.75, 0.0]]  # for submits with pooling, in turn
        self.refuse: tuple[ErrorKind, str] | tuple[ErrorKind, str, str, int] | None = None  # instead of Accepted
        self.fail_after: int | None = None  # if set, fails after that many pieces
        self.hold = False  # accepts, and sends no output until `go`
        self.submits: list[Submit] = []
        self.cancels: list[int] = []
        self.questions: list[Tokenize | Detokenize | Describe] = []
        self.open: dict[int, tuple[Submit, int]] = {}  # rid → its submit and the next piece; -1: the resumed output
        self.loop: asyncio.AbstractEventLoop | None = None  # set by the first message
        self.is_asleep = False
        self.problem = ""  # why it cannot wake up
        self.gateway = Gateway(self.post, clock=lambda: 0.0)
        self.sleeper = Sleeper(self.rest)

    def post(self, message: Submit | Cancel | Tokenize | Detokenize | Describe) -> None:
        self.loop = asyncio.get_running_loop()
        match message:
            case Submit():
                assert _tokenizers.decode(encode(message)) == message, "the mailbox would drop it"
                rids = range(message.rid, message.rid + message.n)
                self.open.update({rid: (message, -1 if message.resume_chars < 0 else 0) for rid in rids})
                self.loop.call_soon(self._admit, list(rids))
                self.submits.append(message)  # last: what a thread that waits for it then asks of the loop comes later
            case Cancel(rids=cancelled):
                self.cancels.extend(cancelled)
                for rid in cancelled:
                    self.open.pop(rid, None)
            case Tokenize() | Detokenize() | Describe():
                self.loop.call_soon(self._answer, message)

    def rest(self, message: Sleep | Wake) -> None:
        """Reports its state in a snapshot and an answer, as the core does."""
        self.is_asleep = isinstance(message, Sleep) or bool(self.problem)
        self.gateway.handle([Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, is_asleep=self.is_asleep)])
        asyncio.get_running_loop().call_soon(self.sleeper.hear, Slept(self.is_asleep, 1000, self.problem))

    def _answer(self, question: Tokenize | Detokenize | Describe) -> None:
        self.questions.append(question)
        if self.refuse is not None:
            self.gateway.handle([Failed(question.rid, *self.refuse)])
        elif isinstance(question, Describe):
            self.gateway.handle([Described(question.rid, {"eos_token": "</s>"}, "{{ messages }}")])
        elif isinstance(question, Detokenize):
            text = "".join(map(chr, bytes_to_ids(question.ids)))
            self.gateway.handle([Detokenized(question.rid, text)])
        else:
            text = question.prompt.text if isinstance(question.prompt, TextPrompt) else "abc"
            pieces = tuple(text) if question.pieces else ()
            self.gateway.handle([Tokenized(question.rid, ids_to_bytes([ord(char) for char in text]), pieces)])

    def _admit(self, rids: list[int]) -> None:
        for rid in rids:
            if rid in self.open and self.refuse is not None:
                del self.open[rid]
                self.gateway.handle([Failed(rid, *self.refuse)])
            elif rid in self.open:
                self.gateway.handle([Accepted(rid, 3)])
        if not self.hold:
            asyncio.get_running_loop().call_soon(self._step)

    def go(self) -> None:
        self.hold = False
        self._step()

    def _step(self) -> None:
        chunks = []
        for rid, (submit, step) in list(self.open.items()):
            if self.fail_after == step:
                del self.open[rid]
                self.gateway.handle([Failed(rid, "internal", "A worker failed.")])
                continue
            if step < 0:
                chunks.append(self._resumed(rid, submit))
                self.open[rid] = (submit, self._step_after(submit))
                continue
            chunks.append(self._chunk(rid, submit, step))
            if step + 1 >= len(self.pieces) or submit.pooling is not None:
                del self.open[rid]
            else:
                self.open[rid] = (submit, step + 1)
        self.gateway.handle([TextBatch(tuple(chunks))])
        if self.open and not self.hold:
            asyncio.get_running_loop().call_soon(self._step)

    def _resumed(self, rid: int, submit: Submit) -> Chunk:
        text = "".join(map(chr, bytes_to_ids(submit.resume_ids)))
        prompt = self._echo(submit) if submit.text.prompt else None
        prompt_end = self.prompt_end if submit.text.prompt_end else None
        lengths = ids_to_bytes([1] * len(text))
        return Chunk(rid, text, submit.resume_ids, prompt=prompt, prompt_end=prompt_end, lengths=lengths)

    def _step_after(self, submit: Submit) -> int:
        ends = [sum(map(len, self.pieces[:step])) for step in range(len(self.pieces))]
        return ends.index(len(submit.resume_ids) // 4)

    def _chunk(self, rid: int, submit: Submit, step: int) -> Chunk:
        if submit.pooling is not None:
            vector = array("f", self.vectors[rid % len(self.vectors)]).tobytes()
            return Chunk(rid, "", b"", finish="stop", usage=Usage(3, 0, 1), vector=vector)
        text = self.pieces[step] if self.pieces else ""
        chunk = Chunk(rid, text, ids_to_bytes([ord(char) for char in text]))
        if submit.sampling.logprobs is not None:
            chunk = replace(chunk, logprobs=tuple(position(char, submit.sampling.logprobs) for char in text))
        if step == 0 and submit.text.prompt and not submit.resume_ids:
            chunk = replace(chunk, prompt=self._echo(submit))
        if step == 0 and submit.text.prompt_end and not submit.resume_ids:
            chunk = replace(chunk, prompt_end=self.prompt_end)
        if step + 1 >= len(self.pieces):
            usage = Usage(3, sum(map(len, self.pieces)), 1)
            chunk = replace(chunk, finish=self.finish, stop_reason=self.stop_reason, usage=usage)
        return chunk

    def _echo(self, submit: Submit) -> PromptEcho:
        match submit.prompt:
            case TextPrompt(text=text):
                pass
            case IdsPrompt(ids=ids):
                text = "".join(map(chr, bytes_to_ids(ids)))
            case ChatPrompt() | PairPrompt():
                text = "abc"
        num_top = submit.sampling.prompt_logprobs
        logprobs = None if num_top is None else (None, *(position(char, num_top) for char in text[1:]))
        return PromptEcho(array("i", map(ord, text)).tobytes(), text, logprobs)


class Answer:
    """A response as the client receives it."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status: int = messages[0]["status"] if messages else 0
        self.headers = {name.decode(): value.decode() for name, value in (messages[0]["headers"] if messages else ())}
        self.parts = [message["body"] for message in messages[1:]]
        self.is_complete = bool(messages) and not messages[-1].get("more_body", False)
        self.body = b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(self.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and isinstance(error["code"], str | None)
        return error

    @property
    def events(self) -> list[Any]:
        """The events of the stream; `[DONE]` is a string."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        lines = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def typed_events(self) -> list[dict[str, Any]]:
        """The events of a stream whose events have names, each the same as its `type`."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *blocks, rest = self.body.decode().split("\n\n")
        assert rest == ""
        events = []
        for block in blocks:
            if not block.startswith(":"):
                name, data = block.split("\n")
                events.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {events[-1]['type']}"
        return events


class Client:
    """One ASGI call; `leave` is the client's disconnect."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._gone = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.on_part: Callable[[bytes], None] = lambda part: None
        self.extensions: dict[str, Any] = {}  # of the server

    def leave(self) -> None:
        self._gone.set()

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        whole: bool = True,
    ) -> Answer:
        path, _, query = path.partition("?")
        sent = {"content-type": "application/json", "host": "localhost"} | (headers or {})
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()],
            "extensions": self.extensions,
        }
        incoming = [{"type": "http.request", "body": body, "more_body": not whole}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            self.messages.append(message)
            self.on_part(message.get("body", b""))

        await self._app(scope, receive, send)
        return Answer(self.messages)


def make_app(
    engine: FakeEngine,
    healthy: Callable[[], str | None] = lambda: None,
    download: Download | None = None,
    **config: Any,
) -> Any:
    config["api_keys"] = tuple(ApiKey(key) if isinstance(key, str) else key for key in config.get("api_keys", ()))
    engine_config, http = split_settings(config)
    served = Served(engine.gateway, engine_config, engine.sleeper, healthy)
    return create_app([served], http, version="1.2.3", download=download)


def run(work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())


def request(
    engine: FakeEngine,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    **config: Any,
) -> Answer:
    """One complete call. `body`: bytes are sent unchanged, other values as JSON."""
    healthy = config.pop("healthy", lambda: None)
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer = run(
        Client(make_app(engine, healthy, **config)).call(
            method or ("GET" if body is None else "POST"), path, data, headers
        )
    )
    assert answer.is_complete and answer.headers["x-request-id"]
    assert not engine.open, "every request must have ended"
    return answer


def chat(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})


def complete(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/v1/completions", {"prompt": "abc", **fields})

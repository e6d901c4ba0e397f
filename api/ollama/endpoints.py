"""/api: chat, generate, embeddings, and the models that are served."""

import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from starlette.types import Receive, Scope, Send

from ...config.model_list import parse_keep_alive
from ..http.exchange import read_json, send_body, send_json, while_connected
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.translate import chat_submits, completion_submits, decode_body, read_turn
from ..output.parsers.registry import find_family
from ..output.service import Service
from ..output.turn import Turn
from ..pooling.request import embedding_submits
from ..pooling.types import EmbeddingsRequest
from .reply import EmbedReply, OldEmbedReply, OllamaReply, now
from .request import chat_request, check_generate, in_terms_of_ollama, prompt_request, text_request
from .types import (
    Answer,
    AnswerMessage,
    Details,
    EmbedAnswer,
    EmbedRequest,
    LoadedModel,
    LoadedModels,
    ModelQuestion,
    OldEmbeddingsAnswer,
    OldEmbeddingsRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaVersion,
    Progress,
    Shown,
    Tag,
    Tags,
)

API_VERSION = "0.13.0"  # of Ollama; clients compare it with what they need, so it is not pagewire's

_NEVER = "2318-01-01T00:00:00Z"  # when the model will be unloaded
_LATEST = ":latest"
_HUBS = ("hf.co/", "huggingface.co/")  # before a name, as Ollama's users write it
_LINES = b"application/x-ndjson"

Download = Callable[[str], AsyncGenerator[Progress, None]]
"""Downloads a model of the Hub; the last progress is `success` or has an error. It ends when the iterator is closed."""


class OllamaEndpoints:
    def __init__(self, service: Service, services: Sequence[Service], download: Download | None = None) -> None:
        """`services`: of all models. `download`: for administrators; None: nothing could serve what they download."""
        self._download = download
        self._is_downloading = False
        self._service = service
        self._services = services
        self._since = now()
        self._chat_decoder = msgspec.json.Decoder(OllamaChatRequest)
        self._generate_decoder = msgspec.json.Decoder(OllamaGenerateRequest)
        self._embed_decoder = msgspec.json.Decoder(EmbedRequest)
        self._embeddings_decoder = msgspec.json.Decoder(OldEmbeddingsRequest)
        self._model_decoder = msgspec.json.Decoder(ModelQuestion)

    def routes(self) -> list[Operation]:
        name, lines = self._service.config.served_model_names[0], "application/x-ndjson"
        question: dict[str, object] = {"role": "user", "content": "Count from 1 to 5"}
        return [
            Operation(
                "POST",
                "/api/chat",
                self.chat,
                "Answer a conversation, as Ollama",
                takes=OllamaChatRequest,
                example={"model": name, "messages": [question], "stream": False},
                gives=Answer,
                streams=Answer,
                streams_as=lines,
            ),
            Operation(
                "POST",
                "/api/generate",
                self.generate,
                "Answer a prompt, as Ollama",
                takes=OllamaGenerateRequest,
                example={"model": name, "prompt": "Count from 1 to 5", "stream": False},
                gives=Answer,
                streams=Answer,
                streams_as=lines,
            ),
            Operation(
                "POST", "/api/embed", self.embed, "Vectors of texts, as Ollama", takes=EmbedRequest, gives=EmbedAnswer
            ),
            Operation(
                "POST",
                "/api/embeddings",
                self.embeddings,
                "The vector of a text, as Ollama",
                takes=OldEmbeddingsRequest,
                gives=OldEmbeddingsAnswer,
            ),
            Operation("GET", "/api/tags", self.tags, "The models that are served", gives=Tags),
            Operation("GET", "/api/ps", self.loaded, "The models that are loaded", gives=LoadedModels),
            Operation(
                "POST", "/api/show", self.show, "One of the models", takes=ModelQuestion, example={"model": name},
                gives=Shown,
            ),
            Operation(
                "POST", "/api/pull", self.pull, "Check that a model is there, or download it", takes=ModelQuestion,
                example={"model": name, "stream": False}, gives=Progress, streams=Progress, streams_as=lines,
            ),
            Operation("GET", "/api/version", self.version, "The version of this API", gives=OllamaVersion),
        ]  # fmt: skip

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._chat_decoder, await read_json(scope, receive, any_type=True))
        model = self._model_name(request.model)
        if not request.messages:
            await self._send_loaded(request, model, is_chat=True, send=send)
            return
        self._keep(request.keep_alive)
        with in_terms_of_ollama():
            chat = chat_request(request, self._service.config)
            submits = chat_submits(chat, self._service.config, scope["state"]["salt"])
            turn = read_turn(chat, self._service.config)
            reply = OllamaReply(model=request.model, turn=turn, is_chat=True, has_logprobs=bool(request.logprobs))
            await self._service.answer(submits, reply, request.stream is not False, scope, receive, send)

    async def generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._generate_decoder, await read_json(scope, receive, any_type=True))
        model = self._model_name(request.model)
        check_generate(request)
        if not request.prompt and not request.suffix:
            await self._send_loaded(request, model, is_chat=False, send=send)
            return
        self._keep(request.keep_alive)
        config, salt = self._service.config, scope["state"]["salt"]
        with in_terms_of_ollama():
            if request.raw or request.suffix:
                submits = completion_submits(text_request(request), config, salt, default_tokens=None)
                turn = Turn(None)
            else:
                chat = prompt_request(request, config)
                submits, turn = chat_submits(chat, config, salt), read_turn(chat, config)
            reply = OllamaReply(model=request.model, turn=turn, is_chat=False, has_logprobs=bool(request.logprobs))
            await self._service.answer(submits, reply, request.stream is not False, scope, receive, send)

    async def embed(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._embed_decoder, await read_json(scope, receive, any_type=True))
        self._keep(request.keep_alive)
        if not request.input:
            await send_json(send, EmbedAnswer(request.model, [], 0, 0))
            return
        asked = EmbeddingsRequest(
            input=request.input if isinstance(request.input, str) else [*request.input],
            dimensions=request.dimensions,
            truncate_prompt_tokens=None if request.truncate is False else -1,
            normalize=True,
        )
        await self._embed(asked, EmbedReply(request.model), scope, receive, send)

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._embeddings_decoder, await read_json(scope, receive, any_type=True))
        asked = EmbeddingsRequest(input=request.prompt, truncate_prompt_tokens=-1)
        await self._embed(asked, OldEmbedReply(request.model), scope, receive, send)

    async def tags(self, scope: Scope, receive: Receive, send: Send) -> None:
        tags = [
            Tag(
                name,
                name,
                self._changed(service),
                service.config.model.weight_bytes,
                _digest(service),
                _details(service),
            )
            for service in self._services
            for name in service.config.served_model_names
        ]
        await send_json(send, Tags(tags))

    async def loaded(self, scope: Scope, receive: Receive, send: Send) -> None:
        models = []
        for service in (each for each in self._services if each.is_loaded):
            config = service.config
            size = config.model.weight_bytes if service.residence is None else service.residence.state.need_bytes
            models += [
                LoadedModel(
                    name, name, size, _digest(service), _details(service), _expires_at(service),
                    size if config.device != "cpu" else 0, config.max_model_len,
                )
                for name in config.served_model_names
            ]  # fmt: skip
        await send_json(send, LoadedModels(models))

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._asked(decode_body(self._model_decoder, await read_json(scope, receive, any_type=True)))
        config = self._service.config
        template = (await self._service.gateway.describe_tokenizer()).chat_template if self._service.is_loaded else ""
        purpose, family = config.model.purpose, find_family(config.tool_call_parser, config.reasoning_parser)
        capabilities = {
            "completion": "generate" in purpose.tasks,
            "tools": "generate" in purpose.tasks and config.tool_call_parser != "none",
            "thinking": "generate" in purpose.tasks and family.reasoning is not None,
            "insert": config.model.infill is not None,
            "embedding": "embed" in purpose.tasks,
        }
        parameters = config.model.sampling
        shown = Shown(
            modelfile=f"FROM {name}\n",
            parameters="\n".join(f"{field} {getattr(parameters, field)}" for field in parameters.__struct_fields__),
            template=template or "",
            details=_details(self._service),
            model_info={
                "general.architecture": "pagewire",
                "general.basename": config.model.name,
                "pagewire.context_length": config.max_model_len,
                "pagewire.embedding_length": purpose.size,
                "pagewire.vocab_size": config.model.vocab_size,
            },
            capabilities=[name for name, has in capabilities.items() if has],
            modified_at=self._changed(self._service),
        )
        await send_json(send, shown)

    async def pull(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._model_decoder, await read_json(scope, receive, any_type=True))
        try:
            self._asked(request)
        except HttpError:
            name = request.model or request.name or ""
            if not name or self._download is None or not scope["state"].get("is_admin"):
                raise self._not_served(name) from None
            await self._pull(self._download, name, request.stream is not False, receive, send)
            return
        states = [Progress(status) for status in ("pulling manifest", "verifying sha256 digest", "success")]
        if request.stream is False:
            await send_json(send, states[-1])
        else:
            await _send_lines(send, states)

    def _not_served(self, name: str) -> HttpError:
        downloads = "a server downloads no model while it serves"
        if self._download is not None:
            downloads = "only an administrator's key downloads models"
        serves = ", ".join(self._service.config.served_model_names)
        detail = f"{name[:200]!r} is not served here, and {downloads}; this one serves {serves}."
        return HttpError(404, detail, code="model_not_found", param="model")

    async def _pull(self, download: Download, name: str, streams: bool, receive: Receive, send: Send) -> None:
        """Downloads one model at a time, as long as the client waits for it."""
        if self._is_downloading:
            raise HttpError(409, "Another model is being downloaded; try again when it is there.", param="model")
        self._is_downloading = True
        for hub in _HUBS:
            name = name.removeprefix(hub)
        try:
            async with contextlib.aclosing(download(name.removesuffix(_LATEST))) as states:
                work = _stream(states, send) if streams else _send_last(states, send)
                await while_connected(receive, work)
        finally:
            self._is_downloading = False

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, OllamaVersion(API_VERSION))

    # ── shared ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _model_name(self, asked: str) -> str:
        """The served name; Ollama's clients may add a tag. Raises HttpError 404."""
        names = self._service.config.served_model_names
        if asked not in names and asked.endswith(_LATEST):
            asked = asked.removesuffix(_LATEST)
        if asked not in names:
            raise HttpError(404, f"model {asked[:200]!r} not found", code="model_not_found", param="model")
        return asked

    def _asked(self, question: ModelQuestion) -> str:
        name = question.model or question.name
        if not name:
            raise HttpError(400, "model is missing.", param="model")
        return self._model_name(name)

    def _changed(self, service: Service) -> str:
        """When the model's files last changed."""
        try:
            seconds = Path(service.config.model.path).stat().st_mtime
        except OSError:
            return self._since
        return _utc(seconds)

    def _keep(self, keep_alive: object, *, is_question: bool = True) -> bool:
        """Takes what a request says of the model's stay. Whether the model is needed now: a request without a question
        loads it, or unloads it if it need not stay. Raises HttpError."""
        if self._service.residence is None:
            return False
        if keep_alive is None:
            return True
        try:
            seconds = parse_keep_alive(keep_alive)
        except ValueError:
            raise HttpError(400, 'keep_alive must be seconds, or a time such as "5m".', param="keep_alive") from None
        if not is_question and not seconds:
            self._service.residence.let_go()
            return False
        self._service.residence.keep(seconds)
        return True

    async def _send_loaded(self, request: OllamaRequest, model: str, *, is_chat: bool, send: Send) -> None:
        """The answer to a request without a question, by which clients load a model or unload it."""
        if self._keep(request.keep_alive, is_question=False):
            await self._service.gateway.describe_tokenizer()  # which waits until it is loaded
        answer = Answer(
            model=request.model,
            created_at=now(),
            message=AnswerMessage() if is_chat else msgspec.UNSET,
            response=msgspec.UNSET if is_chat else "",
            done=True,
            done_reason="unload" if request.keep_alive in (0, "0") else "load",
        )
        if request.stream is False:
            await send_json(send, answer)
        else:
            await _send_lines(send, [answer])

    async def _embed(
        self, asked: EmbeddingsRequest, reply: EmbedReply, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._model_name(reply.model)
        with in_terms_of_ollama():
            submits = embedding_submits(asked, self._service.config, scope["state"]["salt"])
            await self._service.answer(submits, reply, False, scope, receive, send)


def _digest(service: Service) -> str:
    return service.config.model.fingerprint.ljust(64, "0")[:64]


def _details(service: Service) -> Details:
    facts = service.config.model
    is_gguf = Path(facts.path).suffix == ".gguf"
    return Details(
        format="gguf" if is_gguf else "safetensors",
        family="pagewire",
        families=["pagewire"],
        quantization_level=facts.checkpoint_dtype,
    )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _expires_at(service: Service) -> str:
    """When the model will be unloaded."""
    residence = service.residence
    if residence is None or math.isinf(residence.state.expires_at):
        return _NEVER
    return _utc(time.time() + residence.state.expires_at - time.monotonic())


async def _stream(states: AsyncIterator[Progress], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", _LINES)]})
    async for state in states:
        body = msgspec.json.encode(state) + b"\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _send_last(states: AsyncIterator[Progress], send: Send) -> None:
    last = Progress()
    async for state in states:
        last = state
    if last.error:
        raise HttpError(400, last.error, param="model")
    await send_json(send, last)


async def _send_lines(send: Send, values: list[Progress] | list[Answer]) -> None:
    body = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    await send_body(send, 200, body, content_type=_LINES)

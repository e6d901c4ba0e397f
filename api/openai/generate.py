"""POST /inference/v1/generate: tokens in, tokens out, and for convenience their text."""

import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ...config.config import EngineConfig
from ...ipc.messages import Chunk, Submit, TokenLogprob
from ..http.exchange import read_json
from ..http.http_error import HttpError, unsupported
from ..http.operation import Operation
from ..output.reply import Reply, UsageCount, id_list, prompt_logprobs
from ..output.service import Service
from ..output.shapes import UsageBody
from ..output.sse import as_event
from .generate_types import (
    GenerateAnswer,
    GenerateCandidate,
    GenerateChoice,
    GenerateLogprob,
    GenerateLogprobs,
    GenerateRequest,
    OutputMode,
)
from .kv_transfer import Transfer, read_transfer, transferred, with_transfer
from .translate import completion_submits, decode_body, request_decoder
from .types import ChatRequest, CompletionRequest

_encode = msgspec.json.Encoder().encode
_REFUSED = ("features", "content_parts", "ec_transfer_params")
_PARAMS = "sampling_params"
_TRANSFER = "kv_transfer_params"
_FIELDS = frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__))
_OWN = ("extra_args", "max_tokens", "detokenize", "logits_processors")  # of the parameters, not copied


class GenerateEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = request_decoder(GenerateRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/inference/v1/generate",
                self.generate,
                "Go on with tokens",
                takes=GenerateRequest,
                example={"token_ids": [40, 50, 60], "sampling_params": {"max_tokens": 8, "temperature": 0}},
                gives=GenerateAnswer,
                streams=GenerateAnswer,
            )
        ]

    async def generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._decoder, await read_json(scope, receive))
        config = self._service.config
        model = self._service.model_name(request.model)
        submits = generate_submits(request, config, scope["state"]["salt"])
        transfer = read_transfer(_transfer_params(request), config)
        options, params = request.stream_options, request.sampling_params
        reply = GenerateReply(
            request_id=request.request_id or scope["state"]["request_id"],
            model=model,
            created=int(time.time()),
            n=params.n or 1,
            mode=request.output_mode or "tokens",
            is_streamed=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            has_logprobs=params.logprobs is not None,
            has_prompt_logprobs=params.prompt_logprobs is not None,
            has_token_ids=bool(request.return_token_ids),
            transfer=transfer,
        )
        submits = with_transfer(submits, transfer, request.cache_hit_threshold)
        await self._service.answer(submits, reply, bool(request.stream), scope, receive, send)


def generate_submits(request: GenerateRequest, config: EngineConfig, salt: bytes) -> list[Submit]:
    """The submit of a request. Raises HttpError."""
    params = request.sampling_params
    for name in _REFUSED:
        if getattr(request, name):
            raise unsupported(name)
    if params.logits_processors:
        raise unsupported(f"{_PARAMS}.logits_processors")
    extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != _TRANSFER}
    for name, value in extra_args.items():
        # A renderer puts what these parameters cannot say under the name of the request's field.
        if value is not None and (config.runner_plugin is None or name in _FIELDS):
            raise unsupported(f"{_PARAMS}.extra_args.{name[:100]}")
    shows_text = request.output_mode == "text"
    if shows_text and params.detokenize is False:
        raise HttpError(400, "output_mode text needs detokenize.", param=f"{_PARAMS}.detokenize")
    needs_text = shows_text or bool(params.stop) or bool(params.detokenize)
    given = {name: getattr(params, name) for name in params.__struct_fields__ if name not in _OWN}
    completion = CompletionRequest(
        **given,
        prompt=[*request.token_ids],
        max_tokens=params.max_tokens or max(params.min_tokens or 0, 1),
        detokenize=None if needs_text else False,
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        priority=request.priority,
        return_token_ids=request.return_token_ids,
        vllm_xargs={name: value for name, value in extra_args.items() if value is not None} or None,
    )
    try:
        (submit,) = completion_submits(completion, config, salt)
    except HttpError as error:
        if error.param in given:
            raise HttpError(error.status, str(error), code=error.code, param=f"{_PARAMS}.{error.param}") from None
        param = f"{_PARAMS}.extra_args" if error.param == "vllm_xargs" else error.param
        raise HttpError(error.status, str(error), code=error.code, param=param) from None
    if params.max_tokens is None:
        submit = replace(submit, limits=replace(submit.limits, max_tokens=None))
    return [submit]


def _transfer_params(request: GenerateRequest) -> dict[str, object] | None:
    """llm-d writes them below `sampling_params`, other proxies beside it. Raises HttpError."""
    inner = (request.sampling_params.extra_args or {}).get(_TRANSFER)
    if inner is None:
        return request.kv_transfer_params
    if not isinstance(inner, dict):
        raise HttpError(400, f"{_TRANSFER} must be an object.", param=f"{_PARAMS}.extra_args.{_TRANSFER}")
    return inner


class GenerateReply(Reply):
    """The answer to one request. Both shapes are made of the same pieces."""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        n: int,
        mode: OutputMode,
        is_streamed: bool,
        include_usage: bool,
        has_logprobs: bool,
        has_prompt_logprobs: bool,
        has_token_ids: bool,
        transfer: Transfer | None,
    ) -> None:
        self._id = request_id
        self._model = model
        self._created = created
        self._mode: OutputMode = mode
        self._is_streamed = is_streamed
        self._include_usage = include_usage
        self._has_logprobs = has_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._has_token_ids = has_token_ids
        self._transfer = transfer
        self._usage = UsageCount(n)
        self._pieces: list[list[GenerateChoice]] = [[] for _ in range(n)]  # of each choice, if not streamed
        self._prompt = GenerateAnswer(request_id, [], mode)  # what the next event or the body says of the prompt
        self._knows_prompt = False

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        self._usage.begin(nums_prompt)

    def opening(self) -> list[bytes]:
        return []

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        self._usage.count(index, chunk)
        self._usage.add(index, chunk.usage)
        if chunk.prompt is not None and not self._knows_prompt:
            self._knows_prompt = True
            if self._has_token_ids:
                self._prompt = replace(self._prompt, prompt_token_ids=id_list(chunk.prompt.ids))
            if self._has_prompt_logprobs:
                self._prompt = replace(self._prompt, prompt_logprobs=prompt_logprobs(chunk.prompt))
        assert chunk.finish != "abort", "the gateway turns an abort into an error"
        piece = GenerateChoice(
            index=index,
            token_ids=id_list(chunk.ids),
            finish_reason=chunk.finish,
            stop_reason=chunk.stop_reason,
            logprobs=self._logprobs(chunk),
            text=chunk.text if self._mode == "text" else msgspec.UNSET,
        )
        if not self._is_streamed:
            self._pieces[index].append(piece)
            return []
        return [self._event([piece])] if piece.token_ids or piece.text or piece.finish_reason is not None else []

    def closing(self) -> list[bytes]:
        return [self._event([], self._usage.body())] if self._include_usage else []

    def body(self) -> bytes:
        usage = self._usage.body()
        return _encode(
            replace(
                self._prompt,
                choices=[_whole(pieces) for pieces in self._pieces],
                model=self._model,
                created=self._created,
                usage=usage,
                kv_transfer_params=transferred(self._transfer, self._id, usage.prompt_tokens),
            )
        )

    def _event(self, choices: list[GenerateChoice], usage: UsageBody | msgspec.UnsetType = msgspec.UNSET) -> bytes:
        prompt, self._prompt = self._prompt, GenerateAnswer(self._id, [], self._mode)
        return as_event(_encode(replace(prompt, choices=choices, usage=usage)))

    def _logprobs(self, chunk: Chunk) -> GenerateLogprobs | None:
        if not self._has_logprobs:
            return None
        read = _by_text if self._mode == "text" else _by_id
        return GenerateLogprobs([read(position) for position in chunk.logprobs or ()])


def _by_text(position: TokenLogprob) -> GenerateLogprob:
    """With the tokens' texts and bytes, in the form of chat completions."""
    chosen, *top = (
        GenerateCandidate(one.logprob, token=one.token, bytes=list(one.bytes))
        for one in (position.chosen, *position.top)
    )
    return GenerateLogprob(logprob=chosen.logprob, token=chosen.token, bytes=chosen.bytes, top_logprobs=top)


def _by_id(position: TokenLogprob) -> GenerateLogprob:
    ranks = {one.id: rank for rank, one in enumerate(position.top, 1)}
    chosen = position.chosen
    others = [one for one in position.top if one.id != chosen.id]
    candidates = [GenerateCandidate(one.logprob, one.id, ranks.get(one.id)) for one in (chosen, *others)]
    top = candidates if position.top else []
    return GenerateLogprob(logprob=chosen.logprob, token_id=chosen.id, rank=ranks.get(chosen.id), top_logprobs=top)


def _whole(pieces: Sequence[GenerateChoice]) -> GenerateChoice:
    """The pieces of a choice as one."""
    last = pieces[-1]
    logprobs = None
    if last.logprobs is not None:
        content = [entry for piece in pieces if piece.logprobs is not None for entry in piece.logprobs.content]
        logprobs = GenerateLogprobs(content)
    text = msgspec.UNSET if last.text is msgspec.UNSET else "".join(piece.text or "" for piece in pieces)
    ids = [id for piece in pieces for id in piece.token_ids]
    return replace(last, token_ids=ids, logprobs=logprobs, text=text)

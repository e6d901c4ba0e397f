"""POST /v1/chat/completions and /v1/completions."""

import asyncio
import time

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ...ipc.messages import Submit
from ..http.exchange import read_json, send_body, while_connected
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..http.rate_limit import estimated_tokens
from ..output.reply import Reply
from ..output.service import Service, too_slow
from ..output.shapes import GenerationRequest
from .beams import answer_with_beams
from .chat import ChatReply
from .completions import CompletionReply
from .kv_transfer import read_transfer, with_transfer
from .plain_tools import with_plain_tools
from .translate import (
    chat_submits,
    completion_submits,
    decode_body,
    final_words,
    num_candidates,
    read_turn,
    request_decoder,
)
from .types import ChatChunk, ChatCompletion, ChatRequest, Completion, CompletionRequest


class OpenAIEndpoints:
    """Chat and completions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat_decoder = request_decoder(ChatRequest)
        self._completion_decoder = request_decoder(CompletionRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/chat/completions",
                self.chat,
                "Answer a conversation",
                takes=ChatRequest,
                example={"messages": [{"role": "user", "content": "Count from 1 to 5"}], "temperature": 0},
                gives=ChatCompletion,
                streams=ChatChunk,
            ),
            Operation(
                "POST",
                "/v1/completions",
                self.completions,
                "Go on with a text",
                takes=CompletionRequest,
                example={"prompt": "One, two, three,", "max_tokens": 8},
                gives=Completion,
                streams=Completion,
            ),
        ]

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._chat_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        has_functions = request.functions is not None
        request, custom = with_plain_tools(request)
        submits = chat_submits(request, self._service.config, scope["state"]["salt"])
        transfer = read_transfer(request.kv_transfer_params, self._service.config)
        submits = with_transfer(submits, transfer, request.cache_hit_threshold)
        submits = self._service.classify(submits, scope)
        reply = ChatReply(
            model=model,
            created=int(time.time()),
            n=request.n or 1,
            is_streamed=bool(request.stream),
            include_usage=_includes_usage(request),
            continuous_usage=_tells_usage_continuously(request),
            has_logprobs=bool(request.logprobs),
            has_prompt_logprobs=request.prompt_logprobs is not None,
            names_ids=bool(request.return_tokens_as_token_ids),
            has_token_ids=bool(request.return_token_ids),
            prefix=final_words(request),
            new_turn=lambda: read_turn(request, self._service.config, custom),
            has_functions=has_functions,
            has_timings=bool(request.return_timings),
            transfer=transfer,
            service_tier=submits[0].latency_class or UNSET,
        )
        await self._answer(request, submits, reply, scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._completion_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        submits = completion_submits(request, self._service.config, scope["state"]["salt"])
        transfer = read_transfer(request.kv_transfer_params, self._service.config)
        submits = with_transfer(submits, transfer, request.cache_hit_threshold)
        submits = self._service.classify(submits, scope)
        reply = CompletionReply(
            model=model,
            created=int(time.time()),
            submits=submits,
            num_candidates=num_candidates(request),
            n=request.n or 1,
            is_streamed=bool(request.stream),
            include_usage=_includes_usage(request),
            continuous_usage=_tells_usage_continuously(request),
            echo=bool(request.echo),
            has_logprobs=request.logprobs is not None,
            has_prompt_logprobs=request.prompt_logprobs is not None,
            names_ids=bool(request.return_tokens_as_token_ids),
            has_token_ids=bool(request.return_token_ids),
            has_timings=bool(request.return_timings),
            transfer=transfer,
            service_tier=submits[0].latency_class or UNSET,
        )
        await self._answer(request, submits, reply, scope, receive, send)

    async def _answer(
        self,
        request: GenerationRequest,
        submits: list[Submit],
        reply: Reply,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if request.use_beam_search:
            self._service.check_health()
            with scope["state"]["account"].hold(submits) as hold:
                work = answer_with_beams(self._service.gateway, self._service.config, request, submits, reply)
                limit_s = self._service.http.clients.request_timeout_s
                hold.num_tokens = sum(map(estimated_tokens, submits))  # a client that leaves pays for the steps so far
                try:
                    async with asyncio.timeout(limit_s):
                        body = await while_connected(receive, work)
                except TimeoutError:
                    assert limit_s is not None
                    raise too_slow(limit_s) from None
                except (HttpError, RequestError):
                    hold.num_tokens = 0
                    raise
            await send_body(send, 200, body)
        else:
            await self._service.answer(submits, reply, bool(request.stream), scope, receive, send)


def _includes_usage(request: GenerationRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _tells_usage_continuously(request: GenerationRequest) -> bool:
    return _includes_usage(request) and bool(request.stream_options and request.stream_options.continuous_usage_stats)

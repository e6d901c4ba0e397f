"""The render endpoints: the tokens of a request and its parameters, as a request to /inference/v1/generate.

Routers ask for the tokens to find out which engine has their KV; a coordinator sends the result to engines that need no
tokenizer. What such a request cannot say, a beam search or a forced format of a chat's output for example, stands in
`extra_args` under its field's name, so that /inference/v1/generate refuses it rather than ignore it.
"""

import asyncio
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from ...config.config import EngineConfig
from ...errors import RequestError, prompt_too_long
from ...ipc.messages import ChatPrompt, IdsPrompt, Submit, TextPrompt
from ..http.exchange import read_json, send_json
from ..http.operation import Operation
from ..output.reply import id_list
from ..output.service import Service
from ..output.shapes import GenerationRequest
from .generate_types import GenerateRequest, GenerateSampling
from .plain_tools import with_plain_tools
from .translate import chat_submits, completion_submits, decode_body, num_candidates, request_decoder
from .types import ChatRequest, CompletionRequest

_FORMATS = (
    "tool_choice", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "regex", "ebnf", "grammar", "json_schema", "thinking_token_budget", "thinking_budget",
)  # fmt: skip

_OTHERS = ("use_beam_search", "echo", "resume_token_ids")


class RenderEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat_decoder = request_decoder(ChatRequest)
        self._completion_decoder = request_decoder(CompletionRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/chat/completions/render",
                self.chat,
                "The tokens of a conversation, as a request to generate",
                takes=ChatRequest,
                example={"messages": [{"role": "user", "content": "Count from 1 to 5"}], "temperature": 0},
                gives=GenerateRequest,
            ),
            Operation(
                "POST",
                "/v1/completions/render",
                self.completions,
                "The tokens of prompts, as requests to generate",
                takes=CompletionRequest,
                example={"prompt": "One, two, three,", "max_tokens": 8},
                gives=list[GenerateRequest],
            ),
        ]

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._chat_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        request, _ = with_plain_tools(request)
        submits = chat_submits(request, self._service.config, b"")
        await send_json(send, (await rendered(self._service, request, submits[:1], model))[0])

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._completion_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        submits = completion_submits(request, self._service.config, b"")
        await send_json(send, await rendered(self._service, request, submits, model))


async def rendered(
    service: Service, request: GenerationRequest, submits: Sequence[Submit], model: str
) -> list[GenerateRequest]:
    """A request to generate for each submit. Raises HttpError and RequestError."""
    ids = await asyncio.gather(*(_ids(service, submit) for submit in submits))
    return [
        GenerateRequest(
            token_ids=own,
            sampling_params=_params(request, submit),
            model=model,
            stream=request.stream,
            stream_options=request.stream_options,
            cache_salt=request.cache_salt,
            priority=request.priority,
            return_token_ids=request.return_token_ids,
            kv_transfer_params=request.kv_transfer_params,
            cache_hit_threshold=request.cache_hit_threshold,
        )
        for own, submit in zip(ids, submits, strict=True)
    ]


async def _ids(service: Service, submit: Submit) -> list[int]:
    prompt = submit.prompt
    match prompt:
        case IdsPrompt(data):
            ids = id_list(data)
        case TextPrompt() | ChatPrompt():
            ids = id_list((await service.gateway.tokenize(prompt)).ids)
        case _:
            raise AssertionError(f"{type(prompt).__name__} is not rendered")
    return _truncated(ids, submit, service.config)


def _truncated(ids: list[int], submit: Submit, config: EngineConfig) -> list[int]:
    longest = config.max_model_len
    if not ids:
        raise RequestError("invalid_request", "The prompt is empty.")
    if submit.truncate is not None:
        room = longest - (submit.limits.max_tokens or 1) if submit.truncate == -1 else submit.truncate
        ids = ids[: max(1, room)] if submit.keeps_start else ids[-max(1, room) :]
    if len(ids) >= longest:
        raise prompt_too_long(longest, f"the prompt has {len(ids)} tokens", num_tokens=len(ids))
    return ids


def _params(request: GenerationRequest, submit: Submit) -> GenerateSampling:
    sampling, limits, text = submit.sampling, submit.limits, submit.text
    structured, logprobs = request.structured_outputs, sampling.logprobs
    lost = [name for name in _OTHERS if getattr(request, name, None)]
    if isinstance(request, CompletionRequest):
        logprobs = request.logprobs  # without those by which candidates are ranked
        if num_candidates(request) > (request.n or 1):
            lost.append("best_of")
    if submit.constraint is not None:
        lost += [name for name in _FORMATS if getattr(request, name, None)]
    if submit.constraint is not None and structured is not None and isinstance(request, ChatRequest):
        lost.append("structured_outputs")  # a chat's constraint also covers the reasoning
        structured = None
    return GenerateSampling(
        n=request.n or 1,
        max_tokens=limits.max_tokens,
        min_tokens=limits.min_tokens or None,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or None,
        min_p=sampling.min_p or None,
        seed=request.seed,
        stop=list(text.stop) or None,
        stop_token_ids=list(limits.stop_token_ids) or None,
        include_stop_str_in_output=text.include_stop or None,
        ignore_eos=limits.ignore_eos or None,
        presence_penalty=sampling.presence_penalty or None,
        frequency_penalty=sampling.frequency_penalty or None,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words=list(submit.bad_words) or None,
        logprobs=logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        skip_special_tokens=None if text.skip_special_tokens else False,
        structured_outputs=structured,
        extra_args={**(request.vllm_xargs or {}), **dict.fromkeys(lost, True)} or None,
    )

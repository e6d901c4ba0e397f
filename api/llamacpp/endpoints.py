"""llama-server's endpoints that OpenAI's API does not have: /completion, /infill, /props and /slots."""

import msgspec
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ..http.exchange import read_json, send_json
from ..http.http_error import HttpError, as_http_error, unsupported
from ..http.operation import Operation
from ..openai.infill import infill_prompt
from ..openai.translate import completion_submits, decode_body
from ..openai.types import CompletionRequest
from ..output.service import Service
from ..output.shapes import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from .reply import LlamaReply
from .sampling import OWN_NAMES, sampling_fields
from .types import (
    CompletionPart,
    DefaultSettings,
    InfillRequest,
    LlamaCompletionRequest,
    Props,
    Slot,
    TextRequest,
)

_MAX_BIAS = 100.0
_OWN = OWN_NAMES | {"max_tokens": "n_predict", "response_format": "json_schema", "structured_outputs": "grammar"}


class LlamaCppEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._completion_decoder = msgspec.json.Decoder(LlamaCompletionRequest)
        self._infill_decoder = msgspec.json.Decoder(InfillRequest)

    def routes(self) -> list[Operation]:
        return [
            *(
                Operation(
                    "POST",
                    path,
                    self.completion,
                    "Go on with a text, as llama-server",
                    takes=LlamaCompletionRequest,
                    example={"prompt": "One, two, three,", "n_predict": 8},
                    gives=CompletionPart,
                    streams=CompletionPart,
                )
                for path in ("/completion", "/completions")
            ),
            Operation(
                "POST",
                "/infill",
                self.infill,
                "Write what belongs between two texts",
                takes=InfillRequest,
                gives=CompletionPart,
                streams=CompletionPart,
            ),
            Operation("GET", "/props", self.props, "The server's properties, as llama-server", gives=Props),
            Operation("GET", "/slots", self.slots, "The rows of the engine, as llama-server's slots", gives=list[Slot]),
        ]

    async def completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._completion_decoder, await read_json(scope, receive))
        prompt: str | list[str | int | list[int]]
        prompt = request.prompt if isinstance(request.prompt, str) else [*request.prompt]
        await self._answer(request, prompt, (), scope, receive, send)

    async def infill(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._infill_decoder, await read_json(scope, receive))
        infill = self._service.config.model.infill
        prompt = infill_prompt(infill, request.input_prefix or "", request.input_suffix or "", field="input_suffix")
        assert infill is not None, "infill_prompt has refused"
        extra = "".join(f"{infill.file}{file.filename}\n{file.text}\n" for file in request.input_extra or ())
        await self._answer(request, extra + prompt + (request.prompt or ""), infill.stop_ids, scope, receive, send)

    async def props(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        described = await self._service.gateway.describe_tokenizer()
        defaults = config.model.sampling
        params = {name: float(getattr(defaults, name)) for name in defaults.__struct_fields__}
        params["repeat_penalty"] = params.pop("repetition_penalty")
        cores = self._service.gateway.snapshots
        props = Props(
            default_generation_settings=DefaultSettings(config.max_model_len, params),
            total_slots=self._num_slots,
            model_path=config.model.path,
            model_alias=config.served_model_names[0],
            chat_template=described.chat_template or "",
            bos_token=described.special_tokens.get("bos_token") or "",
            eos_token=described.special_tokens.get("eos_token") or "",
            build_info=f"pagewire {self._service.version}",
            is_sleeping=bool(cores) and all(core.is_asleep for core in cores),
        )
        await send_json(send, props)

    async def slots(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A slot is a row, and rows are told by their number only: the first ones are shown as those that run."""
        num_running = sum(core.num_running for core in self._service.gateway.snapshots)
        length = self._service.config.max_model_len
        await send_json(send, [Slot(i, length, i < num_running) for i in range(self._num_slots)])

    @property
    def _num_slots(self) -> int:
        return self._service.config.max_num_seqs * len(self._service.gateway.engines)

    async def _answer(
        self,
        request: TextRequest,
        prompt: str | list[str | int | list[int]],
        stop_ids: tuple[int, ...],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        model = self._service.model_name(request.model)
        try:
            asked = completion_request(request, prompt, stop_ids)
            submits = completion_submits(asked, self._service.config, scope["state"]["salt"], default_tokens=None)
            reply = LlamaReply(
                model=model,
                has_logprobs=bool(request.n_probs),
                has_tokens=bool(request.return_tokens),
                is_streamed=bool(request.stream),
            )
            await self._service.answer(submits, reply, bool(request.stream), scope, receive, send)
        except (HttpError, RequestError) as error:
            raise as_http_error(error).with_name(lambda name: _OWN.get(name.partition(".")[0], name)) from None


def completion_request(
    request: TextRequest, prompt: str | list[str | int | list[int]], stop_ids: tuple[int, ...]
) -> CompletionRequest:
    """The request in OpenAI's shape. Raises HttpError."""
    for name in ("lora", "image_data"):
        if getattr(request, name):
            raise unsupported(name)
    if request.grammar and request.json_schema is not None:
        raise HttpError(400, "grammar and json_schema cannot both be given.", param="grammar")
    schema = None if request.json_schema is None else JsonSchemaFormat(request.json_schema)
    return CompletionRequest(
        **sampling_fields(request, request.max_tokens if request.n_predict is None else request.n_predict),  # type: ignore[arg-type]
        prompt=prompt,
        logprobs=request.n_probs or None,
        ignore_eos=request.ignore_eos,
        stop_token_ids=list(stop_ids) or None,
        logit_bias=_biases(request.logit_bias),
        response_format=None if schema is None else ResponseFormat("json_schema", schema),
        structured_outputs=StructuredOutputs(grammar=request.grammar) if request.grammar else None,
    )


def _biases(given: list[list[int | float | bool]] | dict[int, float] | None) -> dict[int, float] | None:
    """Token → bias, cut to what the sampler takes. Raises HttpError."""
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, dict) else [tuple(pair) for pair in given]
    biases: dict[int, float] = {}
    for token, bias in (pair if len(pair) == 2 else (-1, True) for pair in pairs):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0 or bias is True:
            detail = "logit_bias must be a list of [token id, bias], or of [token id, false]."
            raise HttpError(400, detail, param="logit_bias")
        biases[token] = -_MAX_BIAS if bias is False else max(-_MAX_BIAS, min(_MAX_BIAS, float(bias)))
    return biases

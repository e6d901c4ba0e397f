"""`use_beam_search`: the best beams of each prompt, by batches of requests for one token.

A beam is a request like any other, so searches share steps with all other requests, and the engine does not know of
beams.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ...config.config import EngineConfig
from ...errors import RequestError
from ...ipc.messages import (
    Chunk,
    IdsPrompt,
    Limits,
    PairPrompt,
    PromptEcho,
    Sampling,
    Submit,
    TextSpec,
    TokenLogprob,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from ..gateway.gateway import Gateway
from ..http.http_error import HttpError
from ..output.beam_search import MAX_BEAMS, BeamSearch, BeamSearchParams, BeamSearchSequence
from ..output.reply import Reply
from ..output.shapes import GenerationRequest

# Beams are ranked by the model's own log-probabilities and become text when they have ended. So these parameters, which
# change logits or need the text or tokens of every step, would be ignored.
_REFUSED = (
    "stream", "echo", "stop", "logit_bias", "presence_penalty", "frequency_penalty",
    "min_tokens", "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "best_of", "kv_transfer_params", "cache_hit_threshold",
)  # fmt: skip
_NUM_END_IDS = 16  # of the prompt, whose text is `Chunk.prompt_end`


async def answer_with_beams(
    gateway: Gateway, config: EngineConfig, request: GenerationRequest, submits: Sequence[Submit], reply: Reply
) -> bytes:
    """The plain answer. Raises HttpError and RequestError."""
    for name in _REFUSED:
        if getattr(request, name, None):
            raise _not_beside(name)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(submits[0].sampling, name) is not None:
            raise _not_beside(name)
    if submits[0].constraint is not None and submits[0].constraint.thinking_budget is not None:
        raise _not_beside("thinking_token_budget")
    if request.repetition_penalty not in (None, 1):
        raise _not_beside("repetition_penalty")
    if getattr(request, "tool_choice", None) not in (None, "none", "auto"):
        raise _not_beside("tool_choice")
    form = getattr(request, "response_format", None)
    if form is not None and form.type != "text":
        raise _not_beside("response_format")
    n = request.n or 1
    if n > MAX_BEAMS:
        raise HttpError(400, f"n must be at most {MAX_BEAMS} beside use_beam_search.", param="n")
    for i, submit in enumerate(submits):
        if not (ids := await _prompt_ids(gateway, submit)):
            raise RequestError("invalid_request", "The prompt is empty.")
        max_output = max(1, config.max_model_len - len(ids))
        asked = submit.limits.max_tokens
        params = BeamSearchParams(
            beam_width=n,
            max_tokens=max_output if asked is None else max(1, min(max_output, asked)),
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            early_stopping=bool(request.early_stopping),
        )
        eos = () if submit.limits.ignore_eos else config.model.eos_token_ids
        search = BeamSearch(ids, params, frozenset((*eos, *submit.limits.stop_token_ids)))
        num_cached: int | None = None
        while beams := search.prompts:
            candidates, found = await _expand(gateway, submit, beams, search.num_candidates)
            num_cached = found if num_cached is None else num_cached
            search.take(candidates)
        ended = search.output().sequences
        assert len(ended) == n, f"{len(ended)} beams of {n}"
        for k, beam in enumerate(ended):
            reply.take(i * n + k, await _chunk(gateway, submit, beam, ids, num_cached or 0))
    return reply.body()


def _not_beside(name: str) -> HttpError:
    return HttpError(400, f"{name} is not supported beside use_beam_search.", code="unsupported_value", param=name)


async def _prompt_ids(gateway: Gateway, submit: Submit) -> list[int]:
    if isinstance(submit.prompt, IdsPrompt):
        return bytes_to_ids(submit.prompt.ids).tolist()
    assert not isinstance(submit.prompt, PairPrompt), "pairs are scored"
    return bytes_to_ids((await gateway.tokenize(submit.prompt)).ids).tolist()


async def _expand(
    gateway: Gateway, submit: Submit, beams: list[list[int]], num: int
) -> tuple[list[dict[int, float]], int]:
    """The `num` best next tokens of each beam, and how many tokens of the first beam's prompt were cached."""
    one_token = replace(
        submit,
        n=1,
        sampling=Sampling(temperature=0, logprobs=num),
        limits=Limits(max_tokens=1, ignore_eos=True, queue_timeout_s=submit.limits.queue_timeout_s),
        text=TextSpec(detokenize=False),
    )
    stream = gateway.submit([replace(one_token, prompt=IdsPrompt(ids_to_bytes(beam))) for beam in beams])
    candidates: list[dict[int, float]] = [{} for _ in beams]
    num_cached = 0
    try:
        async for chunks in stream:
            for index, chunk in chunks:
                for position in chunk.logprobs or ():
                    candidates[index] = _best(position)
                if index == 0 and chunk.usage is not None:
                    num_cached = chunk.usage.num_cached
    finally:
        stream.cancel()
    return candidates, num_cached


def _best(position: TokenLogprob) -> dict[int, float]:
    return {candidate.id: candidate.logprob for candidate in position.top}


async def _chunk(
    gateway: Gateway, submit: Submit, beam: BeamSearchSequence, prompt: list[int], num_cached: int
) -> Chunk:
    """The whole output of a beam as one chunk."""
    text, output = submit.text, beam.tokens[len(prompt) :]
    is_stop = beam.finish_reason == "stop"
    shown = output[:-1] if is_stop and not text.include_stop else output
    words = ""
    if text.detokenize:
        words = await gateway.detokenize(ids_to_bytes(shown), skip_special_tokens=text.skip_special_tokens)
    prompt_end = await gateway.detokenize(ids_to_bytes(prompt[-_NUM_END_IDS:])) if text.prompt_end else None
    return Chunk(
        rid=0,
        text=words,
        ids=ids_to_bytes(output),
        prompt=PromptEcho(ids_to_bytes(prompt), "") if text.prompt else None,
        finish="stop" if is_stop else "length",
        stop_reason=output[-1] if is_stop and output[-1] in submit.limits.stop_token_ids else None,
        usage=Usage(len(prompt), len(output), num_cached),
        prompt_end=prompt_end,
    )

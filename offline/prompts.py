"""Prompts as vLLM's classes take them: a text, token ids, or a dict of one of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict, cast

from ..errors import RequestError
from ..ipc import messages
from ..ipc.messages import IdsPrompt, ids_to_bytes


class TextPrompt(TypedDict, total=False):
    """A text. `cache_salt`: only prompts with the same salt share KV."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, which go before `prompt`."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | Mapping[str, object]

_NOT_THERE = {
    "prompt_embeds": "prompts are texts or token ids",
    "multi_modal_data": "prompts are texts or token ids, without images, audio or video",
    "encoder_prompt": "models with an encoder for the prompt are not served",
}
_IGNORED = ("prompt", "prompt_token_ids", "cache_salt", "type", "multi_modal_uuids", "mm_processor_kwargs")


class Parsed(NamedTuple):
    """One prompt."""

    wire: messages.TextPrompt | IdsPrompt
    text: str | None
    cache_salt: str


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several as several."""
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def parse(prompt: Prompt, *, prefix: str = "", add_special_tokens: bool = True) -> Parsed:
    """`prefix`: goes before a text. Raises RequestError."""
    if isinstance(prompt, str):
        return Parsed(messages.TextPrompt(prefix + prompt, add_special_tokens), prompt, "")
    if not isinstance(prompt, Mapping):
        return Parsed(IdsPrompt(_ids(prompt)), None, "")
    for name, value in prompt.items():
        if name in _NOT_THERE and value is not None:
            raise RequestError("invalid_request", f"{name}: {_NOT_THERE[name]}.", param=name)
        if name not in _IGNORED and name not in _NOT_THERE:
            raise RequestError("invalid_request", f"A prompt has no field {name!r}.", param=str(name))
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError("invalid_request", "cache_salt must be a text.", param="cache_salt")
    if ids is not None:
        return Parsed(IdsPrompt(_ids(ids)), text if isinstance(text, str) else None, salt)
    if not isinstance(text, str):
        raise RequestError("invalid_request", "A prompt needs prompt (a text) or prompt_token_ids.", param="prompt")
    return Parsed(messages.TextPrompt(prefix + text, add_special_tokens), text, salt)


def _ids(given: object) -> bytes:
    if not isinstance(given, Sequence) or not all(isinstance(one, int) for one in given):
        raise RequestError("invalid_request", "Token ids must be a list of integers.", param="prompt_token_ids")
    try:
        return ids_to_bytes(list(given))
    except OverflowError:
        raise RequestError("invalid_request", "A token id is out of range.", param="prompt_token_ids") from None

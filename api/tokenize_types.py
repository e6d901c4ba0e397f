"""The bodies of /tokenize and /detokenize, as vLLM's users know them."""

from typing import Annotated

from msgspec import Meta, Raw, Struct

from .openai_types import TokenId


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /tokenize: of a text, or of a conversation as the chat template shows it."""

    model: str | None = None
    prompt: str | None = None
    messages: Raw = Raw(b"")
    tools: Raw = Raw(b"")
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None

    # Understood and refused.
    chat_template: object = None


class TokenizeAnswer(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize: special tokens are shown."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**22)]
    model: str | None = None


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str

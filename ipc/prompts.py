"""The forms of a prompt, and how its hidden states become a vector."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TextPrompt(Struct, frozen=True, array_like=True, tag="text"):
    """A plain prompt. Special tokens written in it are parsed, so that a client may send a rendered conversation."""

    text: str
    add_special_tokens: bool = True  # those that the tokenizer adds, such as BOS


class ChatPrompt(Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation for the chat template. The first three fields are JSON as the client sent it."""

    messages: bytes  # a JSON array of message objects
    tools: bytes = b""  # a JSON array of tool definitions, or nothing
    template_kwargs: bytes = b""  # a JSON object of extra template variables, or nothing
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""  # replaces the model's (--trust-request-chat-template)


class IdsPrompt(Struct, frozen=True, array_like=True, tag="ids"):
    """Token ids, int32. The tokenizer process checks them against the vocabulary."""

    ids: bytes


class PairPrompt(Struct, frozen=True, array_like=True, tag="pair"):
    """Two texts to compare, which the tokenizer joins in the model's format."""

    first: str
    second: str


class Pooling(Struct, frozen=True, array_like=True):
    """Asks for a vector of the prompt, or of each of its tokens, instead of new tokens."""

    how: Literal[
        "last", "mean", "cls", "all", "score"
    ]  # cls: of the first token; score: the output of the classification head
    is_normalized: bool = False  # to length 1
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # keep this many leading numbers, before normalizing
    truncate: Annotated[int, Meta(ge=1)] | None = None  # keep this many leading tokens of the prompt

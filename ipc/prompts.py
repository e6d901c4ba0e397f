"""The shapes of a prompt, and what may be wanted of one instead of tokens. `messages` has all names of this file."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TextPrompt(Struct, frozen=True, array_like=True, tag="text"):
    """A plain prompt. Special tokens written in it are parsed, so that a client may send a rendered conversation."""

    text: str
    add_special_tokens: bool = True  # what the model's tokenizer adds by itself, such as a BOS


class ChatPrompt(Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation for the model's chat template. All three are JSON as the client sent it."""

    messages: bytes  # a JSON array of message objects
    tools: bytes = b""  # a JSON array of tool definitions, or nothing
    template_kwargs: bytes = b""  # a JSON object of extra template variables, or nothing
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""  # a jinja template instead of the model's, if the operator lets requests bring theirs


class IdsPrompt(Struct, frozen=True, array_like=True, tag="ids"):
    """Token ids, int32; checked against the vocabulary by the tokenizer process."""

    ids: bytes


class PairPrompt(Struct, frozen=True, array_like=True, tag="pair"):
    """Two texts that a model is to compare, joined in its tokenizer's own way."""

    first: str
    second: str


class Pooling(Struct, frozen=True, array_like=True):
    """What is wanted of a prompt instead of tokens: one vector, or the vectors of all its tokens."""

    how: Literal[
        "last", "mean", "cls", "all", "score"
    ]  # cls: the first token's; score: what a cross-encoder's head says
    is_normalized: bool = False  # of length 1
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # so many leading numbers are kept, before they are normalized
    truncate: Annotated[int, Meta(ge=1)] | None = None  # so many leading tokens of the prompt are kept

"""The shapes in which a prompt comes. `messages` has all names of this file."""

from msgspec import Struct


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

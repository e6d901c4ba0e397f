"""The tokenizer process: prompts of every shape become token ids that fit the model, or a clear refusal.

A prompt or a template that fails here fails its own request; nothing of it reaches the core.
"""

import logging
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, assert_never

from msgspec.structs import asdict, replace

from ..config import EngineConfig
from ..engine.text.chat_template import ChatTemplate, load_chat_template
from ..engine.text.tokenizer import Tokenizer, load_tokenizer
from ..errors import ConfigError, RequestError
from ..ipc.actor import Post
from ..ipc.messages import (
    Cancel,
    ChatPrompt,
    Constraint,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Enqueue,
    Facts,
    Failed,
    IdsPrompt,
    PairPrompt,
    Ping,
    Reset,
    Stop,
    Submit,
    TextPrompt,
    Times,
    Tokenize,
    Tokenized,
    ToTokenizer,
    bytes_to_ids,
)
from .checks import check_ids, check_min_tokens, check_parameters, check_task

log = logging.getLogger("pagewire.tokenizer")
Q = TypeVar("Q", Tokenize, Detokenize, Describe)


class TokenizerActor:
    """api → core."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer: Tokenizer
        self._template: ChatTemplate

    def start(self, post: Post) -> Facts:
        """See `Actor`. Raises ConfigError if the model has no tokenizer that can be read."""
        self._post = post
        self._tokenizer, self._template = load_text(self._config)
        return Facts()

    def handle(self, messages: list[ToTokenizer]) -> None:
        """See `Actor`."""
        for message in messages:
            match message:
                case Submit():
                    self._submit(message)
                case Cancel():
                    self._post("core", message)
                case Tokenize():
                    self._answer(message, self._tokenized)
                case Detokenize():
                    self._answer(message, self._detokenized)
                case Describe():
                    self._answer(message, self._described)
                case Ping() | Reset() | Stop():
                    pass
                case _:
                    assert_never(message)

    async def stop(self, grace_s: float) -> None:
        """See `Actor`."""

    def _submit(self, submit: Submit) -> None:
        taken = time.monotonic()
        try:
            check_task(self._config.purpose, submit.pooling)
            ids, type_ids = self._prompt_ids(submit)
            constraint = self._constraint(submit)
        except RequestError as error:
            self._fail(submit, Failed(0, error.kind, str(error)))
            return
        except Exception:
            log.exception("request %d could not be tokenized", submit.rid)
            self._fail(submit, Failed(0, "internal", "The prompt could not be tokenized."))
            return
        self._post(
            "core",
            Enqueue(
                submit.rid,
                ids.tobytes(),
                submit.sampling,
                submit.limits,
                submit.text,
                submit.priority,
                submit.salt,
                submit.tenant,
                submit.n,
                constraint=constraint,
                times=Times(taken, time.monotonic()),
                pooling=submit.pooling,
                type_ids=type_ids,
                resume_ids=submit.resume_ids,
                resume_chars=submit.resume_chars,
                attempt=submit.attempt,
            ),
        )

    def _fail(self, submit: Submit, failed: Failed) -> None:
        for i in range(submit.n):
            self._post("api", replace(failed, rid=submit.rid + i))

    def _answer(self, question: Q, answer: Callable[[Q], Tokenized | Detokenized | Described]) -> None:
        try:
            self._post("api", answer(question))
        except RequestError as error:
            self._post("api", Failed(question.rid, error.kind, str(error)))
        except Exception:
            log.exception("question %d could not be answered", question.rid)
            self._post("api", Failed(question.rid, "internal", "The text could not be converted."))

    def _tokenized(self, question: Tokenize) -> Tokenized:
        ids = self._encode(question.prompt)
        pieces = tuple(map(self._tokenizer.token_text, ids)) if question.pieces else ()
        return Tokenized(question.rid, ids.tobytes(), pieces)

    def _detokenized(self, question: Detokenize) -> Detokenized:
        ids = bytes_to_ids(question.ids)
        check_ids(self._config.vocab_size, "tokens", ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=question.skip_special_tokens)
        return Detokenized(question.rid, text)

    def _described(self, question: Describe) -> Described:
        return Described(question.rid, self._tokenizer.special_tokens, self._template.source)

    def _encode(self, prompt: TextPrompt | ChatPrompt | IdsPrompt, max_tokens: int | None = None) -> "array[int]":
        match prompt:
            case TextPrompt(text, add_special_tokens):
                return array("i", self._tokenizer.encode(text, add_special_tokens, max_tokens=max_tokens))
            case ChatPrompt():
                fields = asdict(prompt)
                template = self._template_of(fields.pop("template"))
                return array("i", template.encode(self._tokenizer, **fields))
            case IdsPrompt(data):
                return bytes_to_ids(data)[:max_tokens]
            case _:
                assert_never(prompt)

    def _template_of(self, source: str) -> ChatTemplate:
        if not source:
            return self._template
        try:
            return ChatTemplate({"default": source}, self._tokenizer.special_tokens)
        except ConfigError as error:
            raise RequestError("invalid_request", f"chat_template: {error}") from None

    def _constraint(self, submit: Submit) -> Constraint | None:
        """The constraint with its bad words' ids: each at the start of a text and after a space, as vLLM does."""
        if not submit.bad_words:
            return submit.constraint
        spelled = [
            array("i", ids).tobytes()
            for word in submit.bad_words
            for before in ("", " ")
            if (ids := self._tokenizer.encode(before + word.lstrip(" "), add_special_tokens=False))
        ]
        return replace(submit.constraint or Constraint(), bad_words=tuple(dict.fromkeys(spelled)))

    def _prompt_ids(self, submit: Submit) -> tuple["array[int]", bytes]:
        """The prompt's ids, and for a pair which text each is of. Raises RequestError if the request cannot be
        served."""
        max_tokens, type_ids = None if submit.pooling is None else submit.pooling.truncate, b""
        if isinstance(submit.prompt, PairPrompt):
            pair = self._tokenizer.encode_pair(submit.prompt.first, submit.prompt.second, max_tokens=max_tokens)
            ids, type_ids = array("i", pair[0]), bytes(pair[1])
        else:
            ids = self._encode(submit.prompt, max_tokens)
        if not ids:
            raise RequestError("invalid_request", "The prompt is empty.")
        check_ids(self._config.vocab_size, "prompt", ids)  # a tokenizer may have more tokens than its model
        check_parameters(self._config.vocab_size, submit.sampling, submit.limits, submit.constraint)
        check_min_tokens(self._config.eos_token_ids, submit.sampling, submit.limits)
        if submit.truncate is not None:
            ids = ids[-self._num_kept(submit.truncate, submit.limits.max_tokens) :]
        longest, generates = self._config.max_model_len, submit.limits.max_tokens != 0
        if len(ids) > longest - generates:
            raise RequestError(
                "context_length_exceeded",
                f"This model's maximum context length is {longest} tokens. However, the prompt has {len(ids)} tokens"
                f"{', and at least one is to be generated' if generates else ''}. Shorten the prompt.",
            )
        return ids, type_ids

    def _num_kept(self, truncate: int, max_tokens: int | None) -> int:
        if truncate == 0:
            raise RequestError("invalid_request", "truncate_prompt_tokens must be -1 or at least 1.")
        room = self._config.max_model_len - (1 if max_tokens is None else max_tokens)
        return truncate if truncate > 0 else max(room, 1)


def load_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    """The model's tokenizer and its chat template. Raises ConfigError."""
    folder = Path(config.model_path)
    tokenizer = load_tokenizer(folder)
    operator_file = Path(config.chat_template) if config.chat_template else None
    return tokenizer, load_chat_template(folder, tokenizer, operator_file)

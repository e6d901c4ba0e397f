"""The tokenizer process: turns prompts of every shape into token ids that fit the model, or refuses them.

A prompt or a template that fails here fails its own request and never reaches the core. Prompts that could make all
others wait are tokenized in other processes, which may be killed (`prompt_sandbox.py`).
"""

import logging
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar, assert_never

from msgspec.structs import asdict, replace

from ..config.config import EngineConfig
from ..engine.text.chat_template import DEFAULT_MAX_CHARS, ChatBounds, ChatTemplate, load_chat_template
from ..engine.text.piece_cache import PieceCache
from ..engine.text.tokenizer import Tokenizer, load_tokenizer
from ..errors import ConfigError, RequestError, prompt_too_long
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
    Leave,
    PairPrompt,
    Ping,
    Reset,
    Settings,
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
from .limits import CpuLimit, OutOfTime, limit_memory
from .prompt_sandbox import MEMORY_BYTES, TOO_LARGE, PromptSandbox, cpu_s, too_slow

# Bounds the bytes of a text that is encoded. Some vocabularies have tokens of a hundred spaces, but megabytes of spaces
# are useless as a prompt, and encoding them would take seconds.
_BYTES_A_TOKEN = 16
_ALWAYS_ENCODED_BYTES = 1 << 20

log = logging.getLogger("pagewire.tokenizer")
T = TypeVar("T")
Q = TypeVar("Q", Tokenize, Detokenize, Describe)
Kept = Literal["all", "start", "end"]
"""The part of a prompt that is kept if it is too long."""


class TokenizerActor:
    """Takes submits from the api, and sends the core their token ids."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        limit: CpuLimit | None = None,
        has_prompt_sandbox: bool = False,
        is_replacement: bool = False,
    ) -> None:
        """limit: for each prompt; needs a process of its own. has_prompt_sandbox: prompts may be tokenized in other
        processes. is_replacement: the previous tokenizer died, maybe of a prompt that comes again."""
        self._config = config
        self._limit = limit
        self._has_prompt_sandbox = has_prompt_sandbox
        self._is_replacement = is_replacement
        self._prompt_sandbox: PromptSandbox | None = None
        self._tokenizer: Tokenizer
        self._pieces: PieceCache
        self._template: ChatTemplate

    def start(self, post: Post) -> Facts:
        """Raises ConfigError if the model has no tokenizer that can be read."""
        self._post = post
        self._tokenizer, self._template = load_text(self._config)
        self._pieces = PieceCache(self._tokenizer)
        if self._limit is not None:
            limit_memory(2 * MEMORY_BYTES)  # more than one prompt may be held here
        if self._has_prompt_sandbox:
            self._prompt_sandbox = PromptSandbox(self._config, post, is_wary=self._is_replacement)
        return Facts()

    def handle(self, messages: list[ToTokenizer]) -> None:
        for message in messages:
            match message:
                case Submit() | Tokenize() if self._prompt_sandbox is not None and self._prompt_sandbox.take(message):
                    pass
                case Submit():
                    self._submit(message)
                case Cancel():
                    now = message if self._prompt_sandbox is None else self._prompt_sandbox.hold_back(message)
                    if now.rids:
                        self._post("core", now)
                case Tokenize():
                    self._answer(message, self._tokenized)
                case Detokenize():
                    self._answer(message, self._detokenized)
                case Describe():
                    self._answer(message, self._described)
                case Reset():
                    if self._prompt_sandbox is not None:
                        self._prompt_sandbox.close()  # the api sends again what it still wants
                case Ping() | Settings() | Leave() | Stop():
                    pass
                case _:
                    assert_never(message)

    async def stop(self, grace_s: float) -> None:
        if self._prompt_sandbox is not None:
            self._prompt_sandbox.close()

    def _submit(self, submit: Submit) -> None:
        taken = time.monotonic()
        num_chars, num_known = self._pieces.num_chars, self._pieces.num_cached_chars
        try:
            check_task(self._config.model.purpose, submit.pooling, is_pair=isinstance(submit.prompt, PairPrompt))
            ids, type_ids = self._within_limits(submit.prompt, lambda: self._prompt_ids(submit))
            constraint = self._constraint(submit)
            marks = self._within_limits(submit.prompt, lambda: self._marks(submit.prompt, len(ids)))
        except RequestError as error:
            self._fail(submit, Failed(0, error.kind, str(error), error.param, error.num_tokens))
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
                times=Times(
                    taken,
                    time.monotonic(),
                    num_chars=self._pieces.num_chars - num_chars,
                    num_known_chars=self._pieces.num_cached_chars - num_known,
                ),
                pooling=submit.pooling,
                type_ids=type_ids,
                resume_ids=submit.resume_ids,
                resume_chars=submit.resume_chars,
                attempt=submit.attempt,
                marks=marks,
                cache_salt=submit.cache_salt,
                awaits_kv=submit.awaits_kv,
                kv_peer=submit.kv_peer,
                cache_hit_threshold=submit.cache_hit_threshold,
                latency_class=submit.latency_class,
            ),
        )

    def _fail(self, submit: Submit, failed: Failed) -> None:
        for i in range(submit.n):
            self._post("api", replace(failed, rid=submit.rid + i))

    def _answer(self, question: Q, answer: Callable[[Q], Tokenized | Detokenized | Described]) -> None:
        try:
            self._post("api", answer(question))
        except RequestError as error:
            self._post("api", Failed(question.rid, error.kind, str(error), error.param, error.num_tokens))
        except Exception:
            log.exception("question %d could not be answered", question.rid)
            self._post("api", Failed(question.rid, "internal", "The text could not be converted."))

    def _within_limits(self, prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt, work: Callable[[], T]) -> T:
        """Raises RequestError if `work` takes too much time or memory."""
        if self._limit is None:
            return work()
        try:
            return self._limit.within(cpu_s(prompt), work)
        except (OutOfTime, MemoryError) as error:
            self._pieces.forget()
            if self._prompt_sandbox is not None:
                self._prompt_sandbox.beware()
            text = TOO_LARGE if isinstance(error, MemoryError) else too_slow(prompt)
            raise RequestError("invalid_request", text) from None

    def _tokenized(self, question: Tokenize) -> Tokenized:
        ids = self._within_limits(question.prompt, lambda: self._encode(question.prompt, "all"))
        pieces = tuple(map(self._tokenizer.piece, ids)) if question.pieces else ()
        return Tokenized(question.rid, ids.tobytes(), pieces)

    def _detokenized(self, question: Detokenize) -> Detokenized:
        ids = bytes_to_ids(question.ids)
        check_ids(self._config.model.vocab_size, "tokens", ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=question.skip_special_tokens)
        return Detokenized(question.rid, text)

    def _described(self, question: Describe) -> Described:
        tokenizer = self._tokenizer
        return Described(question.rid, tokenizer.special_tokens, self._template.source, tokenizer.class_name)

    def _encode(
        self,
        prompt: TextPrompt | ChatPrompt | IdsPrompt,
        kept: Kept,
        max_tokens: int | None = None,
        *,
        owner: tuple[bytes, str] | None = None,
    ) -> "array[int]":
        """owner: of the pieces that the prompt shares with earlier ones; None: it is encoded by itself."""
        if isinstance(prompt, IdsPrompt):
            return bytes_to_ids(prompt.ids)[:max_tokens]
        text = prompt.text if isinstance(prompt, TextPrompt) else self._rendered(prompt)
        text, add_special_tokens = self._within_reach(text, kept), prompt.add_special_tokens
        if max_tokens is None and owner is not None:
            return self._pieces.encode(text, add_special_tokens, owner=owner)
        return array("i", self._tokenizer.encode(text, add_special_tokens, max_tokens=max_tokens))

    def _rendered(self, prompt: ChatPrompt) -> str:
        fields = asdict(prompt)
        template = self._template_of(fields.pop("template"))
        del fields["add_special_tokens"]
        return template.render(**fields, neutralize=self._tokenizer.neutralize)

    def _marks(self, prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt, num_ids: int) -> tuple[int, ...]:
        """Where a recurrent state is worth keeping: before the generation prompt. The next turn repeats the answer in
        another form, because templates leave out its reasoning."""
        if not self._config.model.has_states or not isinstance(prompt, ChatPrompt) or not prompt.add_generation_prompt:
            return ()
        try:
            history = self._rendered(replace(prompt, add_generation_prompt=False))
        except RequestError:
            return ()  # the template does not render it without a generation prompt
        text = self._rendered(prompt)
        num_behind = len(self._tokenizer.encode_rendered(text[len(history) :])) if text.startswith(history) else num_ids
        return (num_ids - num_behind,) if 0 < num_behind < num_ids else ()

    def _within_reach(self, text: str, kept: Kept) -> str:
        """`text` without what truncation would cut off anyway, because all other prompts wait while it is encoded.
        Raises RequestError if it cannot fit and must not be cut."""
        longest = self._config.max_model_len
        most = min(self._tokenizer.most_bytes(longest), max(_ALWAYS_ENCODED_BYTES, _BYTES_A_TOKEN * longest))
        num_bytes = len(text.encode())
        if num_bytes <= most:
            return text
        if kept == "all":
            raise prompt_too_long(longest, f"the prompt has {num_bytes} bytes, more than the {most} that are encoded")
        return text[:most] if kept == "start" else text[-most:]

    def _template_of(self, source: str) -> ChatTemplate:
        if not source:
            return self._template
        try:
            return ChatTemplate(
                {"default": source},
                self._tokenizer.special_tokens,
                bounds=_bounds(self._config, self._tokenizer),
            )
        except ConfigError as error:
            raise RequestError("invalid_request", f"chat_template: {error}") from None

    def _constraint(self, submit: Submit) -> Constraint | None:
        """The constraint with the ids of the bad words: each at the start of a text and after a space, as in vLLM."""
        if not submit.bad_words:
            return submit.constraint
        spelled = [
            array("i", ids).tobytes()
            for word in submit.bad_words
            for before in ("", " ")
            if (ids := self._tokenizer.encode(before + word.lstrip(" "), add_special_tokens=False))
            and max(ids) < self._config.model.vocab_size  # ids beyond the logits are never sampled
        ]
        return replace(submit.constraint or Constraint(), bad_words=tuple(dict.fromkeys(spelled)))

    def _prompt_ids(self, submit: Submit) -> tuple["array[int]", bytes]:
        """The prompt's ids, and a pair's type ids as bytes. Raises RequestError if the request cannot be served."""
        max_tokens, type_ids = None if submit.pooling is None else submit.pooling.truncate, b""
        kept: Kept = "end" if submit.truncate is not None else "all"
        if max_tokens is not None or (submit.truncate is not None and submit.keeps_start):
            kept = "start"
        if isinstance(submit.prompt, PairPrompt):
            texts = [self._within_reach(text, kept) for text in (submit.prompt.first, submit.prompt.second)]
            pair = self._tokenizer.encode_pair(*texts, max_tokens=max_tokens)
            ids, type_ids = array("i", pair[0]), bytes(pair[1])
        else:
            ids = self._encode(submit.prompt, kept, max_tokens, owner=(submit.salt, submit.cache_salt))
        if not ids:
            raise RequestError("invalid_request", "The prompt is empty.")
        check_ids(self._config.model.vocab_size, "prompt", ids)  # a tokenizer may have more tokens than its model
        check_parameters(self._config.model.vocab_size, submit.sampling, submit.limits, submit.constraint)
        check_min_tokens(self._config.model.eos_token_ids, submit.sampling, submit.limits)
        if submit.truncate is not None:
            num_kept = self._num_kept(submit.truncate, submit.limits.max_tokens)
            ids = ids[:num_kept] if submit.keeps_start else ids[-num_kept:]
        longest, generates = self._config.max_model_len, submit.limits.max_tokens != 0
        if starts := self._config.model.decoder_start_ids:
            if submit.sampling.prompt_logprobs is not None:
                text = "This model's encoder reads the prompt, so its tokens have no log-probabilities."
                raise RequestError("invalid_request", text, param="prompt_logprobs")
            generates = False  # what is generated is a text of its own, which the core bounds
            if len(starts) >= longest and submit.limits.max_tokens != 0:
                raise RequestError("invalid_request", "The context has no room for any output.")
        if len(ids) > longest - generates:
            more = ", and at least one is to be generated" if generates else ""
            raise prompt_too_long(longest, f"the prompt has {len(ids)} tokens{more}", num_tokens=len(ids))
        return ids, type_ids

    def _num_kept(self, truncate: int, max_tokens: int | None) -> int:
        if truncate == 0:
            raise RequestError("invalid_request", "truncate_prompt_tokens must be -1 or at least 1.")
        room = self._config.max_model_len - (1 if max_tokens is None else max_tokens)
        if self._config.model.decoder_start_ids:
            room = self._config.max_model_len
        return truncate if truncate > 0 else max(room, 1)


def load_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    """The model's tokenizer and its chat template. Raises ConfigError."""
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    operators, bounds = config.chat_template or None, _bounds(config, tokenizer)
    return tokenizer, load_chat_template(folder, tokenizer, operators, bounds=bounds)


def _bounds(config: EngineConfig, tokenizer: Tokenizer) -> ChatBounds:
    """The bounds of a chat's prompt: rendering stops once it cannot fit the model's context."""
    longest = config.max_model_len
    return ChatBounds(max_chars=min(DEFAULT_MAX_CHARS, tokenizer.most_bytes(longest)), max_model_len=longest)

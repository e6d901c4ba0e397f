"""POST /v1/completions: the answer's shape, plain and streamed, with echo and log-probabilities."""

from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk, IdsPrompt, PromptEcho, Submit, TextPrompt, TokenLogprob
from ..reply import Reply, UsageCount, id_list, json_text, new_id
from ..sse import as_event
from .types import Completion, CompletionChoice, CompletionLogprobs, FinishReason, UsageBody

_encode = msgspec.json.Encoder().encode


class CompletionReply(Reply):
    """The answer to one completion request: prompt-major choices, `n` for each prompt."""

    def __init__(
        self,
        *,
        model: str,
        created: int,
        orders: Sequence[Submit],
        include_usage: bool = False,
        echo: bool = False,
        has_logprobs: bool = False,
        has_token_ids: bool = False,
    ) -> None:
        n = orders[0].n
        self._id = new_id("cmpl-")
        self._model = model
        self._created = created
        self._include_usage = include_usage
        self._has_token_ids = has_token_ids
        self._usage = UsageCount(n)
        self._choices = [_Choice(order.prompt, echo, has_logprobs) for order in orders for _ in range(n)]
        # Most events carry a piece of text and nothing else: two constants around an encoded string.
        self._is_simple = not (echo or has_logprobs or has_token_ids)
        head = f'"id":{json_text(self._id)},"object":"text_completion","created":{created},"model":{json_text(model)}'
        usage = ',"usage":null' if include_usage else ""
        self._heads = [f'data: {{{head},"choices":[{{"index":{i},"text":'.encode() for i in range(len(self._choices))]
        self._tail = f',"logprobs":null,"finish_reason":null,"stop_reason":null}}]{usage}}}\n\n'.encode()

    # ── streamed ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def opening(self) -> list[bytes]:
        """Nothing comes before the text."""
        return []

    def events(self, index: int, chunk: Chunk) -> list[bytes]:
        """The news of one choice; the last has the finish reason."""
        if self._is_simple and chunk.finish is None:
            return [self._heads[index] + _encode(chunk.text) + self._tail] if chunk.text else []
        self._usage.add(index, chunk.usage)
        choice = self._choices[index]
        text = choice.text_of(chunk)
        logprobs = choice.logprobs_of(chunk)
        ids = id_list(chunk.ids) if self._has_token_ids else msgspec.UNSET
        has_news = text or logprobs is not None or ids or chunk.finish is not None
        if not has_news:
            return []
        prompt_ids = id_list(chunk.prompt.ids) if self._has_token_ids and chunk.prompt else msgspec.UNSET
        return [
            self._event(
                [
                    CompletionChoice(
                        index=index,
                        text=text,
                        logprobs=logprobs,
                        finish_reason=_finish_reason(chunk),
                        stop_reason=chunk.stop_reason,
                        token_ids=ids,
                        prompt_token_ids=prompt_ids,
                    )
                ]
            )
        ]

    def closing(self) -> list[bytes]:
        """The usage, if it was asked for."""
        return [self._event([], self._usage.body())] if self._include_usage else []

    def _event(self, choices: list[CompletionChoice], usage: UsageBody | None = None) -> bytes:
        chunk = Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._include_usage else msgspec.UNSET,
        )
        return as_event(_encode(chunk))

    # ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, index: int, chunk: Chunk) -> None:
        """Takes one choice's news."""
        self._usage.add(index, chunk.usage)
        choice = self._choices[index]
        choice.texts.append(choice.text_of(chunk))
        if (logprobs := choice.logprobs_of(chunk)) is not None:
            choice.logprobs.append(logprobs)
        if self._has_token_ids:
            choice.token_ids += id_list(chunk.ids)
            if chunk.prompt is not None:
                choice.prompt_token_ids = id_list(chunk.prompt.ids)
        if chunk.finish is not None:
            choice.last = chunk

    def body(self) -> bytes:
        """The text_completion object."""
        return _encode(
            Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._plain_choice(i, choice) for i, choice in enumerate(self._choices)],
                usage=self._usage.body(),
            )
        )

    def _plain_choice(self, index: int, choice: "_Choice") -> CompletionChoice:
        assert choice.last is not None, f"choice {index} has not ended"
        return CompletionChoice(
            index=index,
            text="".join(choice.texts),
            logprobs=_join(choice.logprobs) if choice.has_logprobs else None,
            finish_reason=_finish_reason(choice.last),
            stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self._has_token_ids else msgspec.UNSET,
            prompt_token_ids=choice.prompt_token_ids if self._has_token_ids else msgspec.UNSET,
        )


class _Choice:
    """One choice on its way."""

    def __init__(self, prompt: object, echo: bool, has_logprobs: bool) -> None:
        assert isinstance(prompt, TextPrompt | IdsPrompt), f"{type(prompt).__name__} is no completion prompt"
        self._prompt = prompt
        self._echo = echo
        self.has_logprobs = has_logprobs
        self._offset = 0  # characters of the tokens so far
        self.texts: list[str] = []
        self.logprobs: list[CompletionLogprobs] = []
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] = []
        self.last: Chunk | None = None

    def text_of(self, chunk: Chunk) -> str:
        """The chunk's text, after the prompt's if this is the first and echo was asked for."""
        if not self._echo or chunk.prompt is None:
            return chunk.text
        # The text that the client sent, not what a BOS and a round through the vocabulary make of it.
        prompt = self._prompt.text if isinstance(self._prompt, TextPrompt) else chunk.prompt.text
        return prompt + chunk.text

    def logprobs_of(self, chunk: Chunk) -> CompletionLogprobs | None:
        """The chunk's log-probabilities, after the prompt's, if there are any."""
        if not self.has_logprobs:
            return None
        rows = CompletionLogprobs([], [], [], [])
        if self._echo and chunk.prompt is not None and chunk.prompt.logprobs:
            self._append_first(rows, chunk.prompt)
            for position in chunk.prompt.logprobs[1:]:
                if position is not None:
                    self._append(rows, position)
        for position in chunk.logprobs or ():
            self._append(rows, position)
        return rows if rows.tokens else None

    def _append(self, rows: CompletionLogprobs, position: TokenLogprob) -> None:
        chosen = position.chosen
        # Clients compare the chosen token's value with the best one's, so it has the last word on its own text.
        top = {candidate.token: candidate.logprob for candidate in position.top}
        top[chosen.token] = chosen.logprob
        self._append_row(rows, chosen.token, chosen.logprob, top)

    def _append_first(self, rows: CompletionLogprobs, prompt: PromptEcho) -> None:
        """The prompt's first token has no entry: its text is what the others leave of the prompt's."""
        others = sum(len(position.chosen.bytes) for position in (prompt.logprobs or ())[1:] if position is not None)
        data = prompt.text.encode()
        self._append_row(rows, data[: max(len(data) - others, 0)].decode(errors="replace"), None, None)

    def _append_row(
        self, rows: CompletionLogprobs, token: str, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        rows.tokens.append(token)
        rows.token_logprobs.append(logprob)
        rows.top_logprobs.append(top)
        rows.text_offset.append(self._offset)
        self._offset += len(token)


def _join(pieces: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token for piece in pieces for token in piece.tokens],
        token_logprobs=[value for piece in pieces for value in piece.token_logprobs],
        top_logprobs=[top for piece in pieces for top in piece.top_logprobs],
        text_offset=[offset for piece in pieces for offset in piece.text_offset],
    )


def _finish_reason(chunk: Chunk) -> FinishReason | None:
    assert chunk.finish != "abort", "the gateway turns an abort into an error"
    return chunk.finish

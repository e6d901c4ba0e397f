"""POST /v1/completions: the answer's shape, plain and streamed, with echo and log-probabilities."""

from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk, IdsPrompt, PromptEcho, Submit, TextPrompt, TokenLogprob
from ..gateway.timeline import Timeline
from ..output.reply import Reply, UsageCount, id_list, json_text, new_id, prompt_logprobs, timings_body, token_name
from ..output.shapes import FinishReason, PromptLogprobs, TimingsBody, UsageBody
from ..output.sse import as_event
from .kv_transfer import Transfer, transferred
from .types import Completion, CompletionChoice, CompletionLogprobs

_encode = msgspec.json.Encoder().encode


class CompletionReply(Reply):
    """The answer to one completion request: prompt-major choices, `n` for each prompt."""

    def __init__(
        self,
        *,
        model: str,
        created: int,
        submits: Sequence[Submit],
        num_candidates: int,
        is_streamed: bool,
        n: int | None = None,
        include_usage: bool = False,
        continuous_usage: bool = False,
        echo: bool = False,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
        names_ids: bool = False,
        has_token_ids: bool = False,
        has_timings: bool = False,
        transfer: Transfer | None = None,
        service_tier: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        """`num_candidates`: outputs of each prompt. `n`: how many of them the answer has, if not all. `names_ids`:
        log-probabilities name tokens by their ids."""
        self._num_candidates = num_candidates
        self._n = n or self._num_candidates
        self._id = new_id("cmpl-")
        self._transfer = transfer
        self._service_tier = service_tier
        self._model = model
        self._created = created
        self._is_streamed = is_streamed
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._has_prompt_logprobs = has_prompt_logprobs and not is_streamed
        self._has_token_ids = has_token_ids
        self._has_timings = has_timings
        self._timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET  # until the request has ended
        self._usage = UsageCount(self._num_candidates)
        self._choices = [_Choice(submit, echo, has_logprobs, names_ids) for submit in submits for _ in range(submit.n)]
        # Most chunks are a piece of text and nothing else: their event is two constants around an encoded string.
        self._is_simple = is_streamed and not (echo or has_logprobs or has_token_ids or continuous_usage)
        head = f'"id":{json_text(self._id)},"object":"text_completion","created":{created},"model":{json_text(model)}'
        if service_tier is not msgspec.UNSET:
            head += f',"service_tier":{json_text(service_tier)}'
        usage = ',"usage":null' if include_usage else ""
        self._heads = [f'data: {{{head},"choices":[{{"index":{i},"text":'.encode() for i in range(len(self._choices))]
        self._tail = f',"logprobs":null,"finish_reason":null,"stop_reason":null}}]{usage}}}\n\n'.encode()

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        self._usage.begin(nums_prompt)

    def ended(self, timeline: Timeline) -> None:
        if self._has_timings:
            self._timings = timings_body(timeline)

    def opening(self) -> list[bytes]:
        return []

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        if self._is_simple and chunk.finish is None:
            return [self._heads[index] + _encode(chunk.text) + self._tail] if chunk.text else []
        choice, piece = self._choices[index], self._piece(index, chunk)
        if not self._is_streamed:
            choice.collect(piece, chunk)
        elif piece.text or piece.logprobs is not None or piece.token_ids or piece.finish_reason is not None:
            return [self._event([piece])]
        return []

    def closing(self) -> list[bytes]:
        """The usage and the timings, if they were asked for."""
        return [self._event([], self._usage.body())] if self._include_usage or self._has_timings else []

    def body(self) -> bytes:
        """The text_completion object."""
        return _encode(
            Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._whole_choice(i, choice) for i, choice in enumerate(self._chosen())],
                usage=self._usage.body(),
                timings=self._timings,
                service_tier=self._service_tier,
                kv_transfer_params=transferred(self._transfer, self._id, self._usage.body().prompt_tokens),
            )
        )

    def _piece(self, index: int, chunk: Chunk) -> CompletionChoice:
        """What a chunk adds to its choice."""
        self._usage.count(index, chunk)
        self._usage.add(index, chunk.usage)
        choice, prompt = self._choices[index], chunk.prompt
        assert chunk.finish != "abort", "the gateway turns an abort into an error"
        return CompletionChoice(
            index=index,
            text=choice.text_of(chunk),
            logprobs=choice.logprobs_of(chunk),
            finish_reason=chunk.finish,
            stop_reason=chunk.stop_reason,
            token_ids=id_list(chunk.ids) if self._has_token_ids else msgspec.UNSET,
            prompt_token_ids=id_list(prompt.ids) if self._has_token_ids and prompt else msgspec.UNSET,
            prompt_logprobs=prompt_logprobs(prompt) if self._has_prompt_logprobs and prompt else msgspec.UNSET,
        )

    def _event(self, choices: list[CompletionChoice], usage: UsageBody | None = None) -> bytes:
        if self._continuous_usage and choices:
            usage = self._usage.so_far(choices[0].index)
        chunk = Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._include_usage else msgspec.UNSET,
            timings=self._timings,
            service_tier=self._service_tier,
        )
        return as_event(_encode(chunk))

    def _chosen(self) -> list["_Choice"]:
        """All choices; or of each prompt the `n` with the best mean log-probability, best first."""
        if self._n == self._num_candidates:
            return self._choices
        groups = [
            self._choices[i : i + self._num_candidates] for i in range(0, len(self._choices), self._num_candidates)
        ]
        return [choice for group in groups for choice in sorted(group, key=_Choice.mean, reverse=True)[: self._n]]

    def _whole_choice(self, index: int, choice: "_Choice") -> CompletionChoice:
        assert choice.finish_reason is not None, f"choice {index} has not ended"
        return CompletionChoice(
            index=index,
            text="".join(choice.texts),
            logprobs=_join(choice.logprobs) if choice.has_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._has_token_ids else None,
            prompt_token_ids=choice.prompt_token_ids if self._has_token_ids else None,
            prompt_logprobs=choice.prompt_logprobs or None,
        )


class _Choice:
    """One choice, and for a plain answer what was read so far."""

    def __init__(self, submit: Submit, echo: bool, has_logprobs: bool, names_ids: bool) -> None:
        prompt = submit.prompt
        assert isinstance(prompt, TextPrompt | IdsPrompt), f"{type(prompt).__name__} is no completion prompt"
        # The text that the client sent; decoding the prompt's ids would add a BOS and may change characters.
        self._prompt = prompt.text if isinstance(prompt, TextPrompt) and submit.truncate is None else None
        self._echo = echo
        self._names_ids = names_ids
        self.has_logprobs = has_logprobs
        self._offset = 0  # characters of the tokens so far
        self.texts: list[str] = []
        self.logprobs: list[CompletionLogprobs] = []
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
        self.total_logprob = 0.0  # of the `num_sampled` tokens
        self.num_sampled = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def collect(self, piece: CompletionChoice, chunk: Chunk) -> None:
        """Keeps a piece for the plain answer."""
        self.texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        self.token_ids += piece.token_ids or ()
        if chunk.prompt is not None:
            self.prompt_token_ids = piece.prompt_token_ids or []
            self.prompt_logprobs = piece.prompt_logprobs
        positions = chunk.logprobs or ()
        self.total_logprob += sum(position.chosen.logprob for position in positions)
        self.num_sampled += len(positions)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def mean(self) -> float:
        """The mean log-probability of its tokens."""
        return self.total_logprob / max(1, self.num_sampled)

    def text_of(self, chunk: Chunk) -> str:
        """The chunk's text, after the prompt's if this is the first and echo was asked for."""
        if not self._echo or chunk.prompt is None:
            return chunk.text
        return (chunk.prompt.text if self._prompt is None else self._prompt) + chunk.text

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
        if chunk.lengths:  # a replayed output has no log-probabilities
            self._offset += len(chunk.text)
        return rows if rows.tokens else None

    def _append(self, rows: CompletionLogprobs, position: TokenLogprob) -> None:
        chosen = position.chosen
        # The token itself comes first, as in vLLM. Of several candidates with the same text it counts, then the best.
        name = token_name(chosen, self._names_ids)
        top = {name: chosen.logprob}
        for candidate in position.top:
            top.setdefault(token_name(candidate, self._names_ids), candidate.logprob)
        self._append_row(rows, name, len(chosen.token), chosen.logprob, top)

    def _append_first(self, rows: CompletionLogprobs, prompt: PromptEcho) -> None:
        """The prompt's first token has no log-probability. Its text is the prompt without the other tokens' bytes."""
        others = sum(len(position.chosen.bytes) for position in (prompt.logprobs or ())[1:] if position is not None)
        data = prompt.text.encode()
        text = data[: max(len(data) - others, 0)].decode(errors="replace")
        name = f"token_id:{id_list(prompt.ids)[0]}" if self._names_ids else text
        self._append_row(rows, name, len(text), None, None)

    def _append_row(
        self, rows: CompletionLogprobs, token: str, length: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        rows.tokens.append(token)
        rows.token_logprobs.append(logprob)
        rows.top_logprobs.append(top)
        rows.text_offset.append(self._offset)
        self._offset += length


def _join(pieces: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token for piece in pieces for token in piece.tokens],
        token_logprobs=[value for piece in pieces for value in piece.token_logprobs],
        top_logprobs=[top for piece in pieces for top in piece.top_logprobs],
        text_offset=[offset for piece in pieces for offset in piece.text_offset],
    )

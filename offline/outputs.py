"""What generating calls of the offline APIs return, with vLLM's names."""

from dataclasses import dataclass, field, replace

from ..ipc.messages import Chunk, TokenLogprob, bytes_to_ids


@dataclass(frozen=True)
class Logprob:
    """One candidate token of one position."""

    logprob: float  # natural log
    rank: int | None  # 1: most likely; None: not among the top candidates
    decoded_token: str


@dataclass
class CompletionOutput:
    """One output of one prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  # by position: id → candidate
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt and its outputs. The last four fields are vLLM's and always None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    metrics: None = None  # vLLM's; an answer over HTTP has `timings`
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None

    def add(self, index: int, chunk: Chunk) -> None:
        """Appends more of one output."""
        output = self.outputs[index]
        output.text += chunk.text
        output.token_ids.extend(bytes_to_ids(chunk.ids))
        if chunk.logprobs is not None:
            output.logprobs = (output.logprobs or []) + [_candidates(position) for position in chunk.logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                p.chosen.logprob for p in chunk.logprobs
            )
        if chunk.prompt is not None:
            self.prompt_token_ids = list(bytes_to_ids(chunk.prompt.ids))
            if self.prompt is None:
                self.prompt = chunk.prompt.text
            if chunk.prompt.logprobs is not None:
                self.prompt_logprobs = [None if p is None else _candidates(p) for p in chunk.prompt.logprobs]
        if chunk.finish is not None:
            output.finish_reason, output.stop_reason = chunk.finish, chunk.stop_reason
            if chunk.usage is not None:
                self.num_cached_tokens = max(self.num_cached_tokens, chunk.usage.num_cached)
            self.finished = all(other.finish_reason for other in self.outputs)

    def copy(self) -> "RequestOutput":
        """All output so far, which later output does not change."""
        copies = [
            replace(one, token_ids=[*one.token_ids], logprobs=None if one.logprobs is None else [*one.logprobs])
            for one in self.outputs
        ]
        return replace(self, outputs=copies)

    def news(self, told: dict[int, tuple[int, int, bool]]) -> "RequestOutput":
        """The output since the last call with the same `told`: by choice, the characters and tokens that were
        returned, and whether it had ended."""
        fresh = []
        for one in self.outputs:
            num_chars, num_tokens, had_ended = told.get(one.index, (0, 0, False))
            told[one.index] = now = len(one.text), len(one.token_ids), one.finished()
            if now != (num_chars, num_tokens, had_ended):
                logprobs = None if one.logprobs is None else one.logprobs[num_tokens:]
                ids = one.token_ids[num_tokens:]
                fresh.append(replace(one, text=one.text[num_chars:], token_ids=ids, logprobs=logprobs))
        return replace(self, outputs=fresh)


def _candidates(position: TokenLogprob) -> dict[int, Logprob]:
    found = {c.id: Logprob(c.logprob, rank, c.token) for rank, c in enumerate(position.top, start=1)}
    chosen = position.chosen
    return {chosen.id: found.get(chosen.id, Logprob(chosen.logprob, None, chosen.token))} | found

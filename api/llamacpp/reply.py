"""Answers of /completion and /infill, plain and streamed."""

from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk, TopLogprob, Usage
from ..gateway.timeline import Timeline
from ..output.reply import Reply, id_list
from ..output.sse import as_event
from .types import Candidate, CompletionPart, StopType, Timings, TokenProbability

_encode = msgspec.json.Encoder().encode


class LlamaReply(Reply):
    """The answer to one prompt."""

    def __init__(self, *, model: str, has_logprobs: bool, has_tokens: bool, is_streamed: bool) -> None:
        self._model = model
        self._has_logprobs = has_logprobs
        self._has_tokens = has_tokens or is_streamed  # a stream always has them, as llama-server's
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenProbability] = []
        self._num_prompt = 0
        self._num_output = 0
        self._usage: Usage | None = None
        self._stop_type: StopType = "none"
        self._word = ""
        self._timeline: Timeline | None = None

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        (self._num_prompt,) = nums_prompt

    def ended(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def opening(self) -> list[bytes]:
        return []

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        ids = id_list(chunk.ids)
        self._num_output += len(ids)
        logprobs = _probabilities(chunk) if self._has_logprobs else []
        if chunk.finish is not None:
            assert chunk.finish != "abort", "the gateway turns an abort into an error"
            self._usage = chunk.usage
            if isinstance(chunk.stop_reason, str):
                self._stop_type, self._word = "word", chunk.stop_reason
            else:
                self._stop_type = "limit" if chunk.finish == "length" else "eos"
        self._texts.append(chunk.text)
        self._tokens += ids
        self._logprobs += logprobs
        if not chunk.text and not logprobs:
            return []
        return [as_event(_encode(self._part(chunk.text, ids, logprobs)))]

    def closing(self) -> list[bytes]:
        return [as_event(_encode(self._whole(self._part("", [], []))))]

    def ending(self) -> bytes:
        return b""  # the event with `stop` is the last

    def body(self) -> bytes:
        tokens = self._tokens if self._has_tokens else []
        return _encode(self._whole(self._part("".join(self._texts), tokens, self._logprobs)))

    def _part(self, text: str, ids: list[int], logprobs: list[TokenProbability]) -> CompletionPart:
        return CompletionPart(
            content=text,
            tokens=ids,
            tokens_predicted=self._num_output,
            tokens_evaluated=self._num_prompt,
            completion_probabilities=logprobs or msgspec.UNSET,
        )

    def _whole(self, part: CompletionPart) -> CompletionPart:
        assert self._usage is not None and self._timeline is not None, "a sequence ended without its usage"
        parts, usage = self._timeline.parts(), self._usage
        num_computed = usage.num_prompt - usage.num_cached
        prompt_s, output_s = parts.get("prefill", 0.0), parts.get("decode", 0.0)
        return msgspec.structs.replace(
            part,
            stop=True,
            model=self._model,
            tokens_predicted=usage.num_output,
            stop_type=self._stop_type,
            stopping_word=self._word,
            truncated=False,
            has_new_line=any("\n" in text for text in self._texts),
            tokens_cached=usage.num_prompt + usage.num_output,
            timings=Timings(
                prompt_n=num_computed,
                prompt_ms=1000 * prompt_s,
                prompt_per_second=num_computed / prompt_s if prompt_s else 0.0,
                predicted_n=usage.num_output,
                predicted_ms=1000 * output_s,
                predicted_per_second=usage.num_output / output_s if output_s else 0.0,
                cache_n=usage.num_cached,
            ),
        )


def _probabilities(chunk: Chunk) -> list[TokenProbability]:
    def candidate(top: TopLogprob) -> Candidate:
        return Candidate(top.id, top.token, list(top.bytes), top.logprob)

    return [
        TokenProbability(
            id=position.chosen.id,
            token=position.chosen.token,
            bytes=list(position.chosen.bytes),
            logprob=position.chosen.logprob,
            top_logprobs=[candidate(top) for top in position.top],
        )
        for position in chunk.logprobs or ()
    ]

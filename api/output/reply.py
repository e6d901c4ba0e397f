"""What all answers share: the `Reply` protocol, usage, ids and log-probabilities."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from ...ipc.messages import Chunk, PromptEcho, TopLogprob, Usage, bytes_to_ids
from ..gateway.timeline import Timeline
from ..http.http_error import HttpError, error_body
from .shapes import (
    CompletionTokensDetails,
    PromptLogprobBody,
    PromptLogprobs,
    PromptTokensDetails,
    TimingsBody,
    TokenLogprobBody,
    TopLogprobBody,
    UsageBody,
)

DONE = b"data: [DONE]\n\n"
EMPTY_OBJECT = msgspec.Raw(b"{}")


class Reply(Protocol):
    """Turns the chunks of one request into its answer: a stream of events, or one body.

    `ending`, `failure` and the stream's type are OpenAI's unless an API overrides them."""

    content_type: bytes = b"text/event-stream; charset=utf-8"  # of a stream
    keep_alive: bytes = b": keep-alive\n\n"  # what is sent when there was nothing to send for a while, if anything
    body_type: bytes = b"application/json"  # of the `body`

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        """Comes first. `nums_prompt`: tokens of each choice's prompt."""
        return

    def ended(self, timeline: Timeline) -> None:
        """Comes when every sequence has ended, before `closing` or `body`."""
        return

    async def settle(self) -> None:
        """Comes after `ended`: stores what must be there when the client knows that its answer has ended."""
        return

    def opening(self) -> list[bytes]:
        """The events before any chunk."""

    def take(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Takes a chunk of a choice. In a stream what it returns are its events, to be sent before the next call."""

    def closing(self) -> list[bytes]:
        """The events after all chunks, without the `ending`."""

    def ending(self) -> bytes:
        """The last event of a stream that has not failed."""
        return DONE

    def failure(self, error: HttpError) -> bytes:
        """The last event of a stream that has failed."""
        return b"data: " + error_body(error) + b"\n\n"

    def body(self) -> bytes:
        """The plain answer."""

    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """More headers of the plain answer; called after `body`."""
        return ()


class UsageCount:
    """The usage of one request: all outputs, and each prompt once."""

    def __init__(self, n: int) -> None:
        """`n`: choices of each prompt."""
        self._n = n
        self._num_prompt = 0
        self._num_cached = 0
        self._num_output = 0
        self._num_reasoning: int | None = None  # None: left out
        self._nums_prompt: Sequence[int] = ()  # of each choice, for `so_far`
        self._nums_sampled: dict[int, int] = {}  # of each choice so far

    def begin(self, nums_prompt: Sequence[int]) -> None:
        """Tokens of each choice's prompt."""
        self._nums_prompt = nums_prompt

    def count(self, index: int, chunk: Chunk) -> None:
        """Tokens of a choice, for `so_far`."""
        self._nums_sampled[index] = self._nums_sampled.get(index, 0) + len(chunk.ids) // 4

    def so_far(self, index: int) -> UsageBody:
        """The usage of one choice before it has ended."""
        num_prompt, num_output = self._nums_prompt[index], self._nums_sampled.get(index, 0)
        return UsageBody(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(0))

    def add_reasoning(self, num_tokens: int) -> None:
        """Tokens of a choice's reasoning, which are part of its output."""
        self._num_reasoning = (self._num_reasoning or 0) + num_tokens

    def add(self, index: int, usage: Usage | None) -> None:
        """The usage that came with a choice's last chunk, if this is it."""
        if usage is None:
            return
        self._num_output += usage.num_output
        if index % self._n == 0:
            self._num_prompt += usage.num_prompt
            self._num_cached += usage.num_cached

    def body(self) -> UsageBody:
        return UsageBody(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_output,
            total_tokens=self._num_prompt + self._num_output,
            prompt_tokens_details=PromptTokensDetails(self._num_cached),
            completion_tokens_details=msgspec.UNSET
            if self._num_reasoning is None
            else CompletionTokensDetails(self._num_reasoning),
        )


def timings_body(timeline: Timeline) -> TimingsBody:
    """The timings of an answer, for `return_timings`."""
    parts = {f"{part}_ms": round(1000 * seconds, 3) for part, seconds in timeline.parts().items()}
    return TimingsBody(**parts, total_ms=round(1000 * timeline.total, 3))


def new_id(prefix: str) -> str:
    """A random id."""
    return f"{prefix}{secrets.token_hex(12)}"


def json_text(text: str) -> str:
    """A JSON string, quotes included."""
    return msgspec.json.encode(text).decode()


def id_list(ids: bytes) -> list[int]:
    """A message's int32 ids as a list."""
    return bytes_to_ids(ids).tolist()


def token_name(candidate: TopLogprob, as_id: bool) -> str:
    """A token's name in log-probabilities: its text, or `token_id:5`, because several tokens may have the same text."""
    return f"token_id:{candidate.id}" if as_id else candidate.token


def prompt_logprobs(prompt: PromptEcho) -> PromptLogprobs:
    """The prompt's log-probabilities in vLLM's shape."""
    positions: PromptLogprobs = []
    for position in prompt.logprobs or (None,):
        if position is None:
            positions.append(None)
            continue
        ranked = [(rank, candidate) for rank, candidate in enumerate(position.top, start=1)]
        found = {c.id: PromptLogprobBody(c.logprob, rank, c.token) for rank, c in ranked}
        chosen = position.chosen
        positions.append({chosen.id: PromptLogprobBody(chosen.logprob, None, chosen.token)} | found)
    return positions


def chat_logprobs(chunk: Chunk, *, as_ids: bool = False) -> list[TokenLogprobBody]:
    """The chunk's log-probabilities in chat's shape. `as_ids`: see `token_name`."""

    def top(candidate: TopLogprob) -> TopLogprobBody:
        return TopLogprobBody(token_name(candidate, as_ids), candidate.logprob, list(candidate.bytes))

    return [
        TokenLogprobBody(
            token=token_name(position.chosen, as_ids),
            logprob=position.chosen.logprob,
            bytes=list(position.chosen.bytes),
            top_logprobs=[top(candidate) for candidate in position.top],
        )
        for position in chunk.logprobs or ()
    ]


def json_object(text: str) -> msgspec.Raw:
    """`text` if it is a JSON object, else {}: for shapes without a place for arguments that a length limit cut."""
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return EMPTY_OBJECT
    return msgspec.Raw(text)

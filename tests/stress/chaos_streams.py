"""The streams of `chaos`: requests, answers with their times, and the comparison of two answers.

It has its own client because other clients hide the time of every token, and whether an answer ended with exactly one
finish reason for each choice, one usage, and `[DONE]`.
"""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ...bench.workload import conversations

SILENCE_LIMIT_S = 60.0  # without a byte; then the stream counts as hung
_LOGPROB_TOLERANCE = 1e-3  # KV that was computed again in one chunk may differ in its last bits


@dataclass(frozen=True)
class Request:
    """One request for a stream."""

    path: str
    body: dict[str, Any]


def requests(num: int, num_tokens: int) -> list[Request]:
    """`num` requests for about `num_tokens` each, half of them greedy and half seeded, of eight kinds in turn."""
    questions = conversations(num, seed=7)
    found = []
    for i, messages in enumerate(questions):
        text = messages[0]["content"]
        chat: dict[str, Any] = {"messages": messages}
        completion: dict[str, Any] = {"prompt": text + "\n"}
        path, body = (
            ("chat/completions", chat),
            ("completions", completion | {"stop": ["\n\n\n", "9, 9"], "include_stop_str_in_output": True}),
            ("chat/completions", chat | {"logprobs": True, "top_logprobs": 3}),
            ("completions", completion | {"logprobs": 2, "echo": True}),
            ("chat/completions", chat | {"n": 2, "presence_penalty": 0.4, "frequency_penalty": 0.2}),
            ("chat/completions", chat | _forced_call(num_tokens)),
            ("completions", completion | {"min_tokens": num_tokens // 2, "logit_bias": {"300": 2.0}}),
            ("chat/completions", chat | {"structured_outputs": {"regex": f"[a-z0-9 ,]{{{3 * num_tokens}}}"}}),
        )[i // 2 % 8]
        sampling = {"temperature": 1.0, "seed": 1000 + i} if i % 2 else {"temperature": 0.0}
        common = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        found.append(Request(f"/v1/{path}", body | sampling | common | options))
    return found


def _forced_call(num_tokens: int) -> dict[str, Any]:
    """A forced call with a long list of numbers."""
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": num_tokens // 3}
    schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    function = {"name": "add", "parameters": schema, "strict": True}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


@dataclass
class Choice:
    """One sequence of an answer."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # index → name and arguments
    logprob_tokens: list[Any] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[tuple[str, Any]] = field(default_factory=list)  # finish and stop reason; exactly one is right
    times: list[float] = field(default_factory=list, compare=False)  # when ids arrived

    def difference(self, other: "Choice") -> str:
        """The first difference; empty: none."""
        for name in ("ids", "text", "calls", "logprob_tokens", "ends"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                at = _first_difference(mine, others) if isinstance(mine, str | list) else ""
                return f"{name}{at}: {str(mine)[:200]!r} instead of {str(others)[:200]!r}"
        for i, (a, b) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            if not math.isclose(a, b, abs_tol=_LOGPROB_TOLERANCE):
                return f"logprobs[{i}]: {a} instead of {b}"
        return ""


def _first_difference(mine: "str | list[Any]", others: "str | list[Any]") -> str:
    at = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), min(len(mine), len(others)))
    return f"[{at}] of {len(mine)} and {len(others)}"


class Answer:
    """The result of a stream so far, and its failure, if it has one."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [Choice() for _ in range(num_choices)]
        self.usages: list[dict[str, int]] = []
        self.failure = ""  # empty: none so far
        self.ended = False

    def open_choices(self) -> list[Choice]:
        """The choices that have not finished."""
        return [] if self.ended else [choice for choice in self.choices if not choice.ends]

    def difference(self, other: "Answer") -> str:
        """The first difference between two answers without failures; empty: none."""
        for index, (mine, others) in enumerate(zip(self.choices, other.choices, strict=True)):
            if found := mine.difference(others):
                return f"choice {index}: {found}"
        return "" if self.usages == other.usages else f"usage: {self.usages} instead of {other.usages}"

    def contradiction(self) -> str:
        """A difference between the answer's token ids and its usage; empty: none."""
        num_ids, counted = sum(len(choice.ids) for choice in self.choices), self.usages[0]["completion_tokens"]
        return "" if num_ids == counted else f"{num_ids} token ids, and a usage of {counted}"

    def take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self.failure = f"error event: {event['error']}"
            return
        if usage := event.get("usage"):
            self.usages.append({name: n for name, n in usage.items() if isinstance(n, int)})
        for part in event["choices"]:
            choice = self.choices[part["index"]]
            delta = part.get("delta") or {}
            choice.text += part.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                known = choice.calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            if ids := part.get("token_ids"):
                choice.ids += ids
                choice.times.append(now)
            for token, logprob in _logprobs(part.get("logprobs") or {}):
                choice.logprob_tokens.append(token)
                choice.logprobs.append(logprob)
            if part.get("finish_reason"):
                choice.ends.append((part["finish_reason"], part.get("stop_reason")))

    def end(self, is_done: bool) -> None:
        """The body has ended. `is_done`: with `[DONE]`."""
        self.ended = True
        if not self.failure:
            if not is_done:
                self.failure = "the body ended without [DONE]"
            elif wrong := [choice.ends for choice in self.choices if len(choice.ends) != 1]:
                self.failure = f"a choice has the finish reasons {wrong[0]}"
            elif len(self.usages) != 1:
                self.failure = f"{len(self.usages)} usages"


def _logprobs(found: dict[str, Any]) -> Iterator[tuple[Any, float]]:
    """Tokens, and candidates, with their log-probabilities, in the format of chat or of completions."""
    for entry in found.get("content") or ():
        yield entry["token"], entry["logprob"]
        yield from ((top["token"], top["logprob"]) for top in entry["top_logprobs"])
    for token, value, top in zip(
        found.get("tokens") or (),
        found.get("token_logprobs") or (),
        found.get("top_logprobs") or (),
        strict=True,
    ):
        yield token, value or 0.0  # the first token of an echo has none
        yield from (top or {}).items()


async def read(host: str, port: int, request: Request, answer: Answer) -> None:
    """Reads one stream into `answer`; an error becomes its failure."""
    is_done = False
    try:
        async for line in _lines(host, port, request, answer):
            if line == b"data: [DONE]":
                is_done = True
            elif is_done:
                answer.failure = f"after [DONE]: {line[:200]!r}"
            elif line.startswith(b"data: "):
                answer.take(json.loads(line[6:]), time.monotonic())
    except TimeoutError:
        answer.failure = answer.failure or f"silent for {SILENCE_LIMIT_S:g} s"
    except (OSError, EOFError, ValueError) as error:
        answer.failure = answer.failure or f"the connection broke: {type(error).__name__} {error}"
    answer.end(is_done)


async def _lines(host: str, port: int, request: Request, answer: Answer) -> Any:
    """The lines of a chunked body."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(http_request(host, port, "POST", request.path, request.body))
        status = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SILENCE_LIMIT_S)
        if b" 200 " not in status.partition(b"\r\n")[0]:
            answer.failure = f"{status.partition(bytes((13, 10)))[0].decode()}: {(await reader.read(2000)).decode()}"
            return
        rest = b""
        while size := int(await asyncio.wait_for(reader.readline(), SILENCE_LIMIT_S), 16):
            *lines, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
            for line in filter(None, lines):
                yield line
    finally:
        writer.close()


def http_request(host: str, port: int, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """The bytes of a request with `Connection: close`."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(
    host: str, port: int, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
) -> tuple[int, bytes, bytes]:
    """Status, head and body of a plain answer. Status 0: the connection broke; -1: no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(http_request(host, port, method, path, body))
                head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
                return int(head.split(b" ", 2)[1]), head.lower(), rest
            finally:
                writer.close()
    except TimeoutError:
        return -1, b"", b""
    except (OSError, IndexError, ValueError):
        return 0, b"", b""


def longest_pause(times: list[float], begun_from: float, begun_until: float) -> tuple[float, float]:
    """Begin and end of the longest time without a token that ended after `begun_from` and began before `begun_until`;
    two equal times if there is none."""
    pauses = [(a, b) for a, b in pairwise(times) if b > begun_from and a < begun_until]
    return max(pauses, key=lambda pause: pause[1] - pause[0], default=(begun_from, begun_from))

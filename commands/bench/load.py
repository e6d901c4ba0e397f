"""The load on an OpenAI-compatible server: requests at given times, each answer streamed and its times noted.

It knows nothing of what a figure is; `figures.py` computes those from what is returned here.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import aiohttp

from ...errors import PagewireError


@dataclass(frozen=True)
class Sample:
    """One request of a data set."""

    prompt: str | Sequence[int]
    num_prompt: int  # tokens, or an estimate of them
    num_output: int  # tokens that are asked for


@dataclass
class Outcome:
    """What became of one request. Times are seconds."""

    start: float = 0.0  # of the clock
    ttft: float = 0.0  # until the first piece of text; 0: there was none
    latency: float = 0.0  # until the last piece
    itl: list[float] = field(default_factory=list)  # between the pieces
    num_prompt: int = 0  # tokens, by the server's usage if it sends one
    num_output: int = 0  # tokens, by the server's usage, or else pieces
    text: str = ""
    error: str = ""  # why it failed; empty: it succeeded

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and what each request has besides its prompt."""

    url: str  # of the endpoint
    is_chat: bool
    model: str
    fields: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    verifies: bool = True  # certificates

    def body(self, sample: Sample) -> bytes:
        """The body of one request."""
        prompt: dict[str, object] = {"prompt": sample.prompt}
        if self.is_chat:
            prompt = {"messages": [{"role": "user", "content": sample.prompt}]}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        limit = {"max_completion_tokens" if self.is_chat else "max_tokens": sample.num_output}
        return json.dumps({"model": self.model, **prompt, **limit, **stream, **self.fields}).encode()


async def send(session: aiohttp.ClientSession, target: Target, sample: Sample) -> Outcome:
    """Sends one request and reads its answer to the end. Raises nothing: a failure is in the outcome."""
    outcome = Outcome(num_prompt=sample.num_prompt, start=time.perf_counter())
    body, last, is_done = target.body(sample), outcome.start, False
    try:
        async with session.post(target.url, data=body, headers=dict(target.headers)) as response:
            if response.status != 200:
                outcome.error = f"{response.status}: {(await response.text())[:500]}"
                return outcome
            async for event in _events(response):
                if event == b"[DONE]":
                    is_done = True
                    break
                text = _read(event, outcome)
                now = time.perf_counter()
                if text is None:
                    continue
                if not outcome.ttft:
                    outcome.ttft = now - outcome.start
                else:
                    outcome.itl.append(now - last)
                last = now
                outcome.text += text
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        outcome.error = str(error) or type(error).__name__
        return outcome
    outcome.latency = last - outcome.start
    outcome.num_output = outcome.num_output or len(outcome.itl) + bool(outcome.ttft)
    if not outcome.error and not (is_done and outcome.ttft):
        outcome.error = "the answer ended before its first token" if is_done else "the stream broke off"
    return outcome


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _read(event: bytes, outcome: Outcome) -> str | None:
    """The text of an event; None if it has no choices, or neither text nor reasoning nor a call."""
    found = json.loads(event)
    if not isinstance(found, dict):
        raise ValueError("an event of the stream is no object")
    if "error" in found:
        outcome.error = str(found["error"])[:500]
    if usage := found.get("usage"):
        outcome.num_prompt = int(usage.get("prompt_tokens") or outcome.num_prompt)
        outcome.num_output = int(usage.get("completion_tokens") or outcome.num_output)
    if not found.get("choices"):
        return None
    choice = found["choices"][0]
    if "text" in choice:
        return choice["text"] or None
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return text or ("" if delta.get("tool_calls") else None)


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each of `num` requests is sent, in seconds from the start. `rate`: requests per second; inf: all at once.
    `burstiness`: the shape of the gamma distribution of the pauses; 1: a Poisson process, less: more bursty."""
    if rate == float("inf"):
        return [0.0] * num
    draw = random.Random(seed)
    pauses = [draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num)]
    times = [*accumulate(pauses)]
    scale = (num / rate) / times[-1] if times and times[-1] > 0 else 1.0  # the last is sent when the rate says so
    return [moment * scale for moment in times]


async def run(
    target: Target,
    samples: Sequence[Sample],
    times: Sequence[float],
    *,
    max_concurrency: int | None,
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Sends all requests at their times, at most `max_concurrency` at once, and returns their outcomes in order."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    connector = aiohttp.TCPConnector(limit=0, ssl=target.verifies)
    timeout = aiohttp.ClientTimeout(total=6 * 3600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = asyncio.get_running_loop().time()

        async def one(sample: Sample, moment: float) -> Outcome:
            await asyncio.sleep(max(0.0, started + moment - asyncio.get_running_loop().time()))
            async with gate:
                outcome = await send(session, target, sample)
            on_end(outcome)
            return outcome

        return [*await asyncio.gather(*map(one, samples, times))]


async def wait_ready(target: Target, sample: Sample, timeout_s: float) -> None:
    """Sends one request until it succeeds. Raises PagewireError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        (outcome,) = await run(target, [sample], [0.0], max_concurrency=None, on_end=lambda outcome: None)
        if not outcome.error:
            return
        if time.monotonic() > deadline:
            raise PagewireError(f"{target.url} does not answer a first request: {outcome.error}")
        await asyncio.sleep(0.5)

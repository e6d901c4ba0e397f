"""Streams of many kinds through a router or an engine, and their results: for benchmarks and tests."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from ...tools.servers import Server, wait_until

_QUESTIONS = ("Count from 1 to 300", "Say the alphabet", "Count down from 200", "Repeat: one two three four five")

_EXACT = ("texts", "token_ids", "reasons", "usage")
_CLOSE = 0.02  # nats

Body = dict[str, Any]


class Told(msgspec.Struct, frozen=True):
    """The result of one stream; the lists are by choice."""

    texts: list[str]
    token_ids: list[list[int]]
    reasons: list[str | None]
    logprobs: list[list[float]]
    usage: list[int]  # prompt and output
    error: str | None = None


def bodies(num: int, num_tokens: int) -> list[tuple[str, Body]]:
    """(path, body) of `num` streams, half greedy and half sampled with a seed: chat and completions, some with two
    choices, log-probabilities, stop strings, a grammar or token ids; some messages and responses."""
    rng = random.Random(num)
    found = []
    for i in range(num):
        body: Body = {"stream": True, "ignore_eos": True}
        body |= {"temperature": 0} if i % 2 == 0 else {"temperature": 1.0, "seed": rng.randrange(2**31)}
        question = f"{_QUESTIONS[i % len(_QUESTIONS)]} ({i})"
        if i % 7 == 3:
            found.append(("/v1/responses", {**body, "input": question, "max_output_tokens": num_tokens}))
            continue
        body["max_tokens"] = num_tokens
        if i % 7 == 5:
            found.append(("/v1/messages", {**body, "messages": [{"role": "user", "content": question}]}))
            continue
        body |= {"return_token_ids": i % 4 < 2, "stream_options": {"include_usage": True}}
        if i % 3 == 0:
            body |= {"prompt": question, "logprobs": 2} if i % 6 == 0 else {"prompt": question, "n": 2}
            found.append(("/v1/completions", body))
        else:
            body |= {"messages": [{"role": "user", "content": question}]}
            body |= {"logprobs": True} if i % 5 == 0 else {"stop": ["9", "z"]} if i % 5 == 1 else {}
            if i % 5 == 2:
                body |= {"structured_outputs": {"regex": "([a-z]{3,7} ){100,200}"}, "ignore_eos": False}
            found.append(("/v1/chat/completions", body))
    return found


async def read_stream(session: aiohttp.ClientSession, url: str, path: str, body: Body, count: list[int]) -> Told:
    """Reads a whole stream; adds its number of events to `count[0]`."""
    n = int(body.get("n", 1))
    told = Told([""] * n, [[] for _ in range(n)], [None] * n, [[] for _ in range(n)], [0, 0])
    async with session.post(url + path, json=body) as response:
        if response.status != 200:
            return msgspec.structs.replace(told, error=f"status {response.status}: {(await response.text())[:200]}")
        rest, is_done = b"", False
        async for data in response.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                count[0] += 1
                if event == b"data: [DONE]":
                    is_done = True
                elif event.startswith(b"event: "):
                    fields = msgspec.json.decode(event.partition(b"\ndata: ")[2])
                    if fields["type"] in ("error", "response.failed"):
                        return msgspec.structs.replace(told, error=str(fields))
                    _note_typed(told, fields)
                    is_done = fields["type"] in ("message_stop", "response.completed", "response.incomplete")
                elif event.startswith(b"data: "):
                    fields = msgspec.json.decode(event[6:])
                    if "error" in fields:
                        return msgspec.structs.replace(told, error=str(fields["error"]))
                    _note(told, fields)
    return told if is_done else msgspec.structs.replace(told, error="the stream ended too early")


def _note(told: Told, fields: dict[str, Any]) -> None:
    if usage := fields.get("usage"):
        told.usage[:] = [told.usage[0] + usage["prompt_tokens"], told.usage[1] + usage["completion_tokens"]]
    for choice in fields["choices"]:
        index = choice["index"]
        told.texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        told.token_ids[index] += choice.get("token_ids") or []
        told.reasons[index] = told.reasons[index] or choice["finish_reason"]
        if logprobs := choice.get("logprobs"):
            values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or ()]
            told.logprobs[index] += values


def _note_typed(told: Told, fields: dict[str, Any]) -> None:
    """An event of messages or responses."""
    delta = fields.get("delta", "")
    if fields["type"] in ("response.output_text.delta", "content_block_delta"):
        told.texts[0] += delta if isinstance(delta, str) else delta.get("text", "")
    if fields["type"] == "message_delta":
        told.reasons[0] = delta["stop_reason"]
    if usage := fields.get("usage") or fields.get("response", {}).get("usage"):
        cached = usage.get("cache_read_input_tokens", 0)  # which messages do not count in input_tokens
        told.usage[:] = [usage["input_tokens"] + cached, usage["output_tokens"]]


async def read_streams(url: str, asked: Sequence[tuple[str, Body]], count: list[int]) -> list[Told]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=120)
    ) as session:
        return await asyncio.gather(*(read_stream(session, url, path, body, count) for path, body in asked))


def differences(expected: Sequence[Told], told: Sequence[Told]) -> list[str]:
    """One line for each stream that failed or differs."""
    found = []
    for i, (want, got) in enumerate(zip(expected, told, strict=True)):
        if got.error is not None:
            found.append(f"stream {i} failed: {got.error}")
        elif wrong := [name for name in _EXACT if getattr(want, name) != getattr(got, name)]:
            found.append(f"stream {i} differs in {wrong[0]}: {str(getattr(got, wrong[0]))[:200]}")
        elif not all(map(_are_close, want.logprobs, got.logprobs)):
            found.append(f"stream {i} differs in its log-probabilities: {str(got.logprobs)[:200]}")
    return found


def _are_close(want: list[float], got: list[float]) -> bool:
    """Compares with a tolerance: KV computed in one step is rounded differently from KV computed by decoding."""
    return len(want) == len(got) and all(abs(a - b) < _CLOSE for a, b in zip(want, got, strict=True))


def wait_until_all_ready(router: Server, num: int) -> None:
    """Waits until the router has found `num` engines ready."""
    wait_until(lambda: router.metric("pagewire_router_engine_ready") >= num, "the router sees its engines", 60.0)

"""Completions of a server over HTTP that return token ids."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from http.client import HTTPResponse
from typing import Any

from waiting import until

from pagewire.tools.servers import Server


def ask(server: Server, prompt: Any, **more: Any) -> HTTPResponse:
    """The open response to greedy completions of 24 tokens. more: fields of the body, also instead of these."""
    fields = {"max_tokens": 24, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    body = json.dumps({"prompt": prompt, **fields, **more}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=120)
    return response


def choices_of(server: Server, prompt: Any, **more: Any) -> list[dict[str, Any]]:
    """In order."""
    with ask(server, prompt, **more) as response:
        return sorted(json.load(response)["choices"], key=lambda choice: int(choice["index"]))


def complete(server: Server, prompt: Any, **more: Any) -> list[list[int]]:
    """The tokens of each choice."""
    return [choice["token_ids"] for choice in choices_of(server, prompt, **more)]


def stream(server: Server, prompt: Any, on_first: Callable[[], object] = lambda: None, **more: Any) -> list[int]:
    """The tokens of a stream that ends as it should. on_first: called when the first of them have come."""
    with ask(server, prompt, stream=True, **more) as response:
        events = [response.readline()]
        on_first()
        events += [line for line in response if line.strip()]
    assert events[-1].strip() == b"data: [DONE]", events[-1]
    choices = [json.loads(line[6:])["choices"][0] for line in events[:-1] if line.strip()]
    return [token for choice in choices for token in choice["token_ids"] or ()]


def open_streams(
    pool: Executor, server: Server, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[Future[None]], list[list[int]]]:
    """Streams that have begun, of which at least one goes on, and the tokens of each, to which more are added. `pool`:
    has a thread for each."""

    def read(prompt: list[int], got: list[int]) -> None:
        with ask(server, prompt, max_tokens=num_tokens, stream=True) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        got += choice.get("token_ids") or []

    def begin() -> tuple[list[Future[None]], list[list[int]]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        streams = [pool.submit(read, prompt, got) for prompt, got in zip(prompts, outputs, strict=True)]
        pairs = list(zip(streams, outputs, strict=True))
        until(lambda: all(got or each.done() for each, got in pairs), "every stream has begun", 120)
        return streams, outputs

    for _ in range(5):  # all may end while this process does not run
        streams, outputs = begin()
        if min(map(len, outputs)) < num_tokens:
            break
    assert min(map(len, outputs)) < num_tokens, "all streams have ended"
    return streams, outputs

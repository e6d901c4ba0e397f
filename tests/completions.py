"""Completions of a server over HTTP that return token ids."""

import json
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from typing import Any

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

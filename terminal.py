"""`pagewire chat` and `pagewire complete`: a client in the terminal, over the same HTTP as everyone else.

Uses the standard library's HTTP client, so that the commands start at once and need nothing installed.
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from .errors import PagewireError, StartError

DEFAULT_URL = "http://127.0.0.1:8000"
_START_TIMEOUT_S = 600.0
_GREETING = "You are talking to {model} at {url}. Ctrl-D or /exit ends, /new forgets the conversation."


class _Server:
    """An OpenAI-compatible server to talk to."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def _request(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
        data = None if body is None else json.dumps(body)
        connection.request(method, parts.path.removesuffix("/v1") + path, data, self._headers)
        return connection.getresponse()

    def answers(self) -> bool:
        """Whether it is there and healthy."""
        try:
            with self._request("GET", "/health", timeout_s=2.0) as response:
                return response.status == 200
        except OSError:
            return False

    def model(self) -> str:
        """The first model it serves."""
        with self._request("GET", "/v1/models", timeout_s=10.0) as response:
            return str(json.loads(_checked(response))["data"][0]["id"])

    def stream(self, path: str, body: dict[str, object]) -> Iterator[str]:
        """The text of a streamed answer, piece by piece."""
        with self._request("POST", path, body | {"stream": True}) as response:
            if response.status != 200:
                _checked(response)
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise PagewireError(str(event["error"]["message"]))
                for choice in event["choices"]:
                    yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def _checked(response: http.client.HTTPResponse) -> bytes:
    """The body. Raises PagewireError with the server's own words if it is an error."""
    body = response.read()
    if response.status == 200:
        return body
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {response.status}"
    raise PagewireError(str(message))


@contextlib.contextmanager
def _server(url: str | None, api_key: str | None, model: str | None) -> Iterator[_Server]:
    """The server that was named, the one that runs here, or a new one that ends with the command."""
    server = _Server(url or DEFAULT_URL, api_key or os.environ.get("PAGEWIRE_API_KEY"))
    if url is not None or (model is None and server.answers()):
        yield server
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pagewire", "serve", *([model] if model else []), "--port", str(port)]
    print("starting a server …", file=sys.stderr)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        server = _Server(f"http://127.0.0.1:{port}", os.environ.get("PAGEWIRE_API_KEY"))
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not server.answers():
            if process.poll() is not None:
                assert process.stderr is not None
                raise StartError(
                    process.stderr.read().strip().removeprefix("pagewire: ") or "The server did not start."
                )
            if time.monotonic() > deadline:
                raise StartError(f"The server was not ready after {_START_TIMEOUT_S:g} s.")
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def main(arguments: argparse.Namespace) -> int:
    """Runs `chat` or `complete`. Returns the exit code."""
    try:
        with _server(arguments.url, arguments.api_key, arguments.model) as server:
            return (_chat if arguments.command == "chat" else _complete)(server, arguments)
    except ConnectionError as error:
        raise PagewireError(f"No server answers at {arguments.url or DEFAULT_URL}: {error}.") from error


def _options(server: _Server, arguments: argparse.Namespace) -> dict[str, object]:
    options: dict[str, object] = {"model": server.model(), "temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    return options


def _show(pieces: Iterator[str]) -> str:
    """Prints a stream as it comes. Returns all of it."""
    text = ""
    for piece in pieces:
        text += piece
        print(piece, end="", flush=True)
    print()
    return text


def _chat(server: _Server, arguments: argparse.Namespace) -> int:
    options = _options(server, arguments)
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    if sys.stdin.isatty():
        import readline  # noqa: F401  # line editing and history for input()

        print(_GREETING.format(model=options["model"], url=server.url), file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/new":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = _show(server.stream("/v1/chat/completions", options | {"messages": messages}))
                messages.append({"role": "assistant", "content": answer})
            except PagewireError as error:
                messages.pop()
                print(f"pagewire: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                messages.pop()
                print("\n(interrupted)", file=sys.stderr)


def _complete(server: _Server, arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    options = {"max_tokens": 128} | _options(server, arguments)
    _show(server.stream("/v1/completions", options | {"prompt": prompt}))
    return 0

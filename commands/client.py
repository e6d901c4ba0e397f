"""A client of an OpenAI-compatible server, which starts a server if none is running.

It uses the standard library's HTTP client, because the commands start faster without an HTTP package.
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from urllib.parse import urlsplit

from ..api.batches.format import error_message
from ..errors import PagewireError, StartError
from ..procs import interpreter

DEFAULT_URL = "http://127.0.0.1:8000"
_START_TIMEOUT_S = 600.0


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="the server's address: http:// or https://, or unix:PATH of its socket "
        f"(default: {DEFAULT_URL} if one answers there)",
    )
    parser.add_argument("--api-key", default=None, help="API key of the server (default: PAGEWIRE_API_KEY)")
    parser.add_argument("--cacert", metavar="FILE", default=None, help="CA certificates that verify an https server")


class RemoteServer:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None, cacert: str | None = None) -> None:
        """`cacert`: a file of CA certificates; default: the system's. Raises PagewireError."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        is_file = parts.scheme == "unix" and parts.path and not parts.netloc
        if not is_file and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise PagewireError(f"{url} is not a server's address; write http://host:port, or unix:/path.")
        self._parts = parts
        try:
            self._tls = ssl.create_default_context(cafile=cacert) if parts.scheme == "https" else None
        except OSError as error:
            raise PagewireError(f"--cacert {cacert} cannot be used: {error.strerror or error}.") from error
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def connect(self, timeout_s: float | None = None) -> http.client.HTTPConnection:
        """A connection, which opens with its first request."""
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path, timeout_s)
        host, port = self._parts.hostname or "", self._parts.port
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def path(self, path: str) -> str:
        """`path` below the path of the server's address, which may end in /v1 as in OpenAI's clients."""
        return path if self._parts.scheme == "unix" else self._parts.path.removesuffix("/v1") + path

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> http.client.HTTPResponse:
        """Sends one request. The caller closes the response, which also closes the connection. Raises PagewireError."""
        connection = self.connect(timeout_s)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, self.path(path), data, self.headers | {"Connection": "close"})
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise PagewireError(f"No server answers at {self.url}: {str(error) or type(error).__name__}.") from error

    def answers(self) -> bool:
        """Whether the server is healthy."""
        try:
            with self.request("GET", "/health", timeout_s=2.0) as response:
                return response.status == 200
        except PagewireError:
            return False

    def get(self, path: str) -> bytes:
        """The body of an answer. Raises PagewireError, with the server's message if there is one."""
        with self.request("GET", path, timeout_s=10.0) as response:
            return checked(response)

    def model(self) -> str:
        """The name of the first model that it serves. Raises PagewireError."""
        try:
            return str(json.loads(self.get("/v1/models"))["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PagewireError(
                f"{self.url} does not list its models; check that it is an OpenAI-compatible server."
            ) from error

    def events(self, path: str, body: dict[str, object]) -> Generator[dict[str, object]]:
        """The objects of a streamed answer as they arrive; the last may have `usage`. Closing the iterator ends the
        request. Raises PagewireError."""
        wanted = body | {"stream": True, "stream_options": {"include_usage": True}}
        with self.request("POST", path, wanted) as response:
            if response.status != 200:
                checked(response)
            is_done = False
            for line in _lines(response):
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    event: dict[str, object] = json.loads(line[6:])
                    if "error" in event:
                        raise PagewireError(error_message(event) or "The server failed.")
                    yield event
            if not is_done:
                raise PagewireError("The server ended the answer before it was complete.")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, file: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._file = file

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._file)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        raise PagewireError(f"The connection to the server broke: {str(error) or type(error).__name__}.") from error


def checked(response: http.client.HTTPResponse) -> bytes:
    """The body. If it is an error, raises PagewireError with the server's message."""
    body = response.read()
    if response.status == 200:
        return body
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = None
    raise PagewireError(message or f"The server answered {response.status}.")


def named_server(arguments: argparse.Namespace) -> RemoteServer:
    """The server that the flags of `add_client_flags` name; default: `DEFAULT_URL`. Raises PagewireError."""
    key = arguments.api_key or os.environ.get("PAGEWIRE_API_KEY")
    return RemoteServer(arguments.url or DEFAULT_URL, key, arguments.cacert)


@contextlib.contextmanager
def find_server(arguments: argparse.Namespace) -> Iterator[RemoteServer]:
    """The server that `--url` names, the one at `DEFAULT_URL`, or a new one that ends with the command. Raises
    StartError."""
    server = named_server(arguments)
    if arguments.url is not None or (arguments.model is None and server.answers()):
        yield server
        return
    with _own_server(arguments.model) as server:
        yield server


@contextlib.contextmanager
def _own_server(model: str | None) -> Iterator[RemoteServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*interpreter.COMMAND, "pagewire", "serve", *([model] if model else []), "--port", str(port)]
    print("starting a server …", file=sys.stderr)
    # Its output goes to a file: a pipe that is not read would fill up and block it.
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            env=interpreter.environment(interpreter.SECRETS),
        )
        try:
            server = RemoteServer(f"http://127.0.0.1:{port}", os.environ.get("PAGEWIRE_API_KEY"))
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not server.answers():
                if process.poll() is not None:
                    log.seek(0)
                    said = log.read().strip().removeprefix("pagewire: ")
                    raise StartError(said or "The server did not start.")
                if time.monotonic() > deadline:
                    raise StartError(f"The server was not ready after {_START_TIMEOUT_S:g} s.")
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
            process.wait()

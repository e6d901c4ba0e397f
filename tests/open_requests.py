"""Requests to a server whose responses are read on threads while a test goes on."""

import http.client
import json
import threading
from typing import Any, Protocol

from waiting import until

END_S = 60.0  # limit for all waits
GREEDY = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
CHAT = GREEDY | {"messages": [{"role": "user", "content": "hello"}]}
STREAMS: dict[str, Any] = {
    "/v1/completions": GREEDY | {"prompt": "hello"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 4000, "ignore_eos": True, "temperature": 0},
    "/v1/messages": CHAT,
}


class Listening(Protocol):
    """What listens on a port of 127.0.0.1, such as a `Server`."""

    @property
    def port(self) -> int: ...


class OpenRequest:
    """A request whose response is read to its end on a thread."""

    def __init__(self, server: Listening, path: str, body: dict[str, object], *, timeout_s: float = END_S) -> None:
        """`timeout_s`: the longest time without a byte of the response."""
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self.status = 0
        self.headers: dict[str, str] = {}
        self._lines: list[str] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            response = self.connection.getresponse()
            self.status, self.headers = response.status, {k.lower(): v for k, v in response.getheaders()}
            while line := response.readline():
                self._lines.append(line.decode())
        except (OSError, http.client.HTTPException) as failure:
            self._failure = failure

    @property
    def num_events(self) -> int:
        return sum(line.startswith("data: ") for line in list(self._lines))

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def body(self) -> str:
        """The whole body. Fails unless the response ends properly."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "the response has not ended"
        self.connection.close()
        assert self._failure is None, self._failure
        return "".join(self._lines)

    def events(self) -> list[str]:
        """The data of all events. Fails unless the stream ends properly."""
        return [line.removeprefix("data: ") for line in self.body().splitlines() if line.startswith("data: ")]


def open_stream(server: Listening, path: str, **more: object) -> OpenRequest:
    """A stream that has begun."""
    request = OpenRequest(server, path, STREAMS[path] | {"stream": True} | more)
    until(lambda: request.num_events > 5, "the stream has begun", END_S)
    return request

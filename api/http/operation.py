"""A route that describes its input and output, from which /openapi.json and the page at /docs are made."""

from collections.abc import Awaitable, Callable

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .exchange import Endpoint


class Operation(Route):
    """One method of one path."""

    def __init__(
        self,
        method: str,
        path: str,
        call: Callable[[Scope, Receive, Send], Awaitable[None]],
        summary: str,
        *,
        takes: object = None,
        takes_as: str = "application/json",
        example: dict[str, object] | None = None,
        query: object = None,
        gives: object,
        gives_as: str = "application/json",
        streams: object = None,
        streams_as: str = "text/event-stream",
    ) -> None:
        """`takes`, `query`, `gives` and `streams`: the types of the body, the query (a struct), the answer and the data
        of a stream's events. `example`: a body that a server with any model answers."""
        super().__init__(path, Endpoint(call), methods=[method])
        self.method = method
        self.summary = summary
        self.takes = takes
        self.takes_as = takes_as
        self.example = example
        self.query = query
        self.gives = gives
        self.gives_as = gives_as
        self.streams = streams
        self.streams_as = streams_as

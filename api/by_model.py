"""Several models behind one port: each request goes to the application of the model that it names."""

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Struct
from starlette.routing import BaseRoute, Match, Router
from starlette.types import Receive, Scope, Send

from .http.exchange import read_json, replayed
from .http.operation import Operation


class _Named(Struct, frozen=True):
    """The fields of a body that name the model."""

    model: object = None
    name: object = None  # Ollama's older one


class ByModel:
    """The application of each model; the first one's answers what names none, or a model that is not there."""

    def __init__(self, routers: Sequence[Router], names: Sequence[Sequence[str]]) -> None:
        """`names`: what clients call each model."""
        self._routers = routers
        self._numbers: Mapping[str, int] = {name: number for number, own in enumerate(names) for name in own}
        self._decoder = msgspec.json.Decoder(_Named)

    @property
    def routes(self) -> list[BaseRoute]:
        return self._routers[0].routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number: int | None = None
        if b"model=" in scope["query_string"]:
            number, scope = self._by_query(scope)
        if number is None and self._takes_json(scope):
            body = await read_json(scope, receive, any_type=True)
            number, receive = self._by_body(body), replayed(body, receive)
        await self._routers[number or 0](scope, receive, send)

    def _takes_json(self, scope: Scope) -> bool:
        if scope["method"] != "POST":
            return False
        matching = (route for route in self.routes if isinstance(route, Operation) and route.method == "POST")
        found = next((route for route in matching if route.matches(scope)[0] is Match.FULL), None)
        return found is not None and found.takes is not None and found.takes_as == "application/json"

    def _by_body(self, body: bytes) -> int | None:
        try:
            named = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # the endpoint says what is wrong
        return self._number(named.model or named.name)

    def _by_query(self, scope: Scope) -> tuple[int | None, Scope]:
        """The model of the query, and the scope without it."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        number = self._number(dict(query).get("model"))
        if number is None:
            return None, scope
        rest = urlencode([(name, value) for name, value in query if name != "model"]).encode()
        return number, {**scope, "query_string": rest}

    def _number(self, name: object) -> int | None:
        if not isinstance(name, str):
            return None
        return self._numbers.get(name, self._numbers.get(name.removesuffix(":latest")))

"""/admin/models of a server of several models: administrators see which are loaded, load, unload, pin and replace
them."""

import math
import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ..http.exchange import read_json, send_body, send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.translate import decode_body
from ..output.service import Service
from .swapping import Replacement, Swap, SwapAnswer


class ModelChange(Struct, frozen=True, forbid_unknown_fields=True):
    """What is not given stays as it is."""

    model: str  # one of its names
    loaded: bool | None = None  # load it now, or unload it when it is idle
    pinned: bool | None = None
    replace: Replacement | None = None  # serve something else under its names; alone, and with --enable-model-swap


class ModelStatus(Struct, frozen=True):
    name: str
    aliases: tuple[str, ...]  # other names of it
    state: str  # unloaded, loading, loaded, leaving or failed
    since_s: float | None  # how long; null: since the start
    progress: float | None  # of reading its weights, 0 to 1; null: it is not loading
    load_s: float | None  # what its last load took; null: none has ended
    need_bytes: int  # of memory while it is loaded, by the memory plan
    pinned: bool
    expires_in_s: float | None  # it is unloaded then if nobody uses it; null: not by itself
    open: int  # requests of this api process, with those that wait for it
    problem: str | None  # why it failed last
    version: int  # one more with each replacement
    root: str  # its folder


class ModelStatuses(Struct, frozen=True):
    data: list[ModelStatus]


class ModelEndpoints:
    def __init__(self, services: Sequence[Service], swap: Swap) -> None:
        """`services`: of all models."""
        self._services = services
        self._swap = swap
        self._decoder = msgspec.json.Decoder(ModelChange)

    def routes(self) -> list[Operation]:
        """Changes need an administrator's key, so a server without one has no operation for them."""
        name = self._services[0].config.served_model_names[0]
        shows = Operation("GET", "/admin/models", self.models, "Which models are loaded", gives=ModelStatuses)
        changes = Operation(
            "POST",
            "/admin/models",
            self.change,
            "Load, unload, pin, unpin or replace a model",
            takes=ModelChange,
            example={"model": name, "loaded": True},
            gives=SwapAnswer,
        )
        return [shows, changes] if self._services[0].http.admin_keys else [shows]

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, ModelStatuses([_status(service) for service in self._services]))

    async def change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 202 at once; the list shows how it goes on."""
        asked = decode_body(self._decoder, await read_json(scope, receive))
        named = [asked.model in service.config.served_model_names for service in self._services]
        if not any(named):
            raise HttpError(
                404, f"The model {asked.model[:200]!r} does not exist.", code="model_not_found", param="model"
            )
        if asked.loaded is None and asked.pinned is None and asked.replace is None:
            raise HttpError(400, "Say what to change: loaded, pinned or replace.", param="loaded")
        settings: dict[str, object] | None = None
        version: int | None = None
        if asked.replace is not None:
            if not self._services[0].http.admin.enable_model_swap:
                raise HttpError(403, "Models are replaced only with --enable-model-swap.", param="replace")
            if asked.loaded is not None or asked.pinned is not None:
                raise HttpError(400, "Replace a model first, and then load or pin it.", param="replace")
            settings = msgspec.to_builtins(asked.replace)
            settings.pop("version", None)
            version = None if asked.replace.version is UNSET else asked.replace.version
            if not settings and version is None:
                raise HttpError(400, "Name the model, version or other setting to be served.", param="replace")
        if (refusal := self._services[0].gateway.refusal) is not None:
            raise RequestError("unavailable", refusal)
        change = {
            "model": named.index(True), "loaded": asked.loaded, "pinned": asked.pinned, "settings": settings
        }  # fmt: skip
        answer = await self._swap(msgspec.json.encode(change), version, False)
        if answer.status >= 400:
            raise HttpError(answer.status, answer.detail)
        await send_body(send, answer.status, msgspec.json.encode(SwapAnswer(answer.detail)))


def _status(service: Service) -> ModelStatus:
    assert service.residence is not None
    found, now = service.residence.state, time.monotonic()
    name, *aliases = service.config.served_model_names
    return ModelStatus(
        name=name,
        aliases=tuple(aliases),
        state=found.state,
        since_s=now - found.since if found.since else None,
        progress=found.progress,
        load_s=found.load_s or None,
        need_bytes=found.need_bytes,
        pinned=found.is_pinned,
        expires_in_s=None if math.isinf(found.expires_at) else max(0.0, found.expires_at - now),
        open=service.gateway.num_requests,
        problem=found.problem or None,
        version=found.version,
        root=service.config.model.path,
    )

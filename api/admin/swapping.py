"""Another model without another server: what administrators ask for, and how they see what became of it."""

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from ...config.config import ModelVersion
from ...ipc.messages import Swapped
from ..http.exchange import read_json, send_body, send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.translate import decode_body
from ..output.service import Service

Swap = Callable[[bytes, int | None, bool], Awaitable[Swapped]]
"""Asks the supervisor: a JSON object of changed settings, the version to go back to, whether the old model goes
first."""

_OWN = ("version", "drain")  # of the request's fields; the others are settings


class SwapRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What is not said stays as it is, or as it was in `version`."""

    model: str | UnsetType = UNSET  # a folder, or a repository's name
    revision: str | UnsetType = UNSET
    served_model_name: list[str] | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    quantization: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    max_num_seqs: int | UnsetType = UNSET
    kv_cache_memory: int | str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET
    tool_call_parser: str | UnsetType = UNSET
    reasoning_parser: str | UnsetType = UNSET
    version: int | UnsetType = UNSET  # one that was served before
    drain: bool = False  # open requests end first, even if there is room for both


class SwapAnswer(Struct, frozen=True):
    detail: str


class Versions(Struct, frozen=True):
    data: tuple[ModelVersion, ...]


class SwapEndpoints:
    """Only with `--enable-model-swap`."""

    def __init__(self, service: Service, swap: Swap) -> None:
        self._service = service
        self._swap = swap
        self._decoder = msgspec.json.Decoder(SwapRequest)

    def routes(self) -> list[Operation]:
        """Paths, and who answers there."""
        if not self._service.http.admin.enable_model_swap:
            return []
        return [
            Operation(
                "POST",
                "/admin/models",
                self.swap,
                "Serve another model, another version, or the same otherwise",
                takes=SwapRequest,
                gives=SwapAnswer,
            ),
            Operation("GET", "/admin/models", self.versions, "What was and is served", gives=Versions),
        ]

    async def swap(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /admin/models: 200 when the other model is served, 202 when it will be once open requests have ended."""
        request = decode_body(self._decoder, await read_json(scope, receive))
        fields = {name: value for name, value in msgspec.to_builtins(request).items() if name not in _OWN}
        if not fields and request.version is UNSET:
            raise HttpError(400, "Say which model, version or other setting is to be served.", param="model")
        version = None if request.version is UNSET else request.version
        answer = await self._swap(msgspec.json.encode(fields), version, request.drain)
        if answer.status >= 400:
            raise HttpError(answer.status, answer.detail)
        await send_body(send, answer.status, msgspec.json.encode(SwapAnswer(answer.detail)))

    async def versions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/models"""
        await send_json(send, Versions(self._service.http.versions))

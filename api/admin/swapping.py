"""/admin/models: administrators swap the model of a running server, and list the versions that were served."""

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
"""Asks the supervisor for a swap: changed settings as a JSON object, the version to go back to, and whether open
requests are drained first."""

_OWN = ("version", "drain")  # of the request's fields; the others are settings


class Replacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that are not given stay as they are, or as they were in `version`."""

    model: str | UnsetType = UNSET  # a folder, or a repository's name
    revision: str | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    quantization: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    max_num_seqs: int | UnsetType = UNSET
    kv_cache_memory: int | str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET
    tool_call_parser: str | UnsetType = UNSET
    reasoning_parser: str | UnsetType = UNSET
    version: int | UnsetType = UNSET  # one that was served before


class SwapRequest(Replacement, frozen=True, forbid_unknown_fields=True):
    served_model_name: list[str] | UnsetType = UNSET
    drain: bool = False  # wait for open requests first, even if there is memory for both models


class SwapAnswer(Struct, frozen=True):
    detail: str


class Versions(Struct, frozen=True):
    data: tuple[ModelVersion, ...]


class SwapEndpoints:
    def __init__(self, service: Service, swap: Swap) -> None:
        self._service = service
        self._swap = swap
        self._decoder = msgspec.json.Decoder(SwapRequest)

    def routes(self) -> list[Operation]:
        if not self._service.http.admin.enable_model_swap:
            return []
        return [
            Operation(
                "POST",
                "/admin/models",
                self.swap,
                "Serve another model, another version, or other settings",
                takes=SwapRequest,
                gives=SwapAnswer,
            ),
            Operation("GET", "/admin/models", self.versions, "The versions served before and now", gives=Versions),
        ]

    async def swap(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 200 once the other model is served, or 202 if it will be when open requests have ended."""
        request = decode_body(self._decoder, await read_json(scope, receive))
        fields = {name: value for name, value in msgspec.to_builtins(request).items() if name not in _OWN}
        if not fields and request.version is UNSET:
            raise HttpError(400, "Name the model, version or other setting to be served.", param="model")
        version = None if request.version is UNSET else request.version
        answer = await self._swap(msgspec.json.encode(fields), version, request.drain)
        if answer.status >= 400:
            raise HttpError(answer.status, answer.detail)
        await send_body(send, answer.status, msgspec.json.encode(SwapAnswer(answer.detail)))

    async def versions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, Versions(self._service.http.versions))

"""The ASGI application: routes, and the edge that every request passes.

The edge gives each answer its x-request-id, refuses what has no key, a foreign origin, a strange Host or too large a
body before any endpoint sees it, and turns every exception into OpenAI's error object.
"""

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import EngineConfig
from .about import AboutEndpoints
from .anthropic.endpoints import AnthropicEndpoints
from .batches.endpoints import BatchEndpoints
from .batches.store import MAX_FILE_BYTES
from .gateway import ClientGone, Gateway
from .http_error import HttpError, anthropic_error_body, as_http_error, error_body
from .openai.endpoints import OpenAIEndpoints
from .page import PAGE_FILES, PageFile
from .request_end import Observer
from .responses.endpoints import ResponsesEndpoints
from .service import MAX_BODY_BYTES, Service, send_body, too_large
from .tokenizing import TokenizeEndpoints

_OPEN_PATHS = frozenset({"/health", "/ready", "/version", *PAGE_FILES})
_FILES_PATH = "/v1/files"
_ANTHROPIC_PATH = "/v1/messages"
_HOST = re.compile(rb"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

log = logging.getLogger(__name__)


def create_app(
    gateway: Gateway,
    config: EngineConfig,
    *,
    healthy: Callable[[], str | None],
    version: str,
    observers: Sequence[Observer] = (),
) -> "Edge":
    """The whole application. See `Service`."""
    service = Service(gateway, config, healthy=healthy, version=version, observers=observers)
    routes = [
        *OpenAIEndpoints(service).routes(),
        *ResponsesEndpoints(service).routes(),
        *AnthropicEndpoints(service).routes(),
        *TokenizeEndpoints(service).routes(),
        *AboutEndpoints(service).routes(),
        *(Route(path, PageFile(name), methods=["GET"]) for path, name in PAGE_FILES.items()),
    ]
    router = Router(routes, redirect_slashes=False)
    batches = BatchEndpoints(service, router)
    router.routes += batches.routes()
    return Edge(router, batches, api_keys=config.api_keys)


class Edge:
    """The outermost application."""

    def __init__(self, app: ASGIApp, batches: BatchEndpoints, *, api_keys: tuple[str, ...] = ()) -> None:
        self._app = app
        self._batches = batches
        self._key_digests = tuple(hashlib.sha256(key.encode()).digest() for key in api_keys)

    def start(self) -> None:
        """The engine is there: begins what goes on without a client."""
        self._batches.start()

    async def stop(self) -> None:
        """Ends it."""
        await self._batches.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # the router raises instead of answering by itself
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{secrets.token_hex(12)}".encode()
        is_anthropic = scope["path"].startswith(_ANTHROPIC_PATH)
        id_headers = [(b"x-request-id", request_id), *([(b"request-id", request_id)] if is_anthropic else [])]
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                message = {**message, "headers": [*message["headers"], *id_headers]}
            await send(message)

        try:
            self._check_origin(scope, headers)
            scope["state"] = {
                **scope.get("state", {}),
                "salt": self._check_key(scope, headers),
                "request_id": request_id.decode(),
            }
            self._check_body(headers, MAX_FILE_BYTES if scope["path"] == _FILES_PATH else MAX_BODY_BYTES)
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            pass  # nobody is left to be told
        except Exception as error:
            http_error = _from_starlette(error) if isinstance(error, HTTPException) else as_http_error(error)
            if http_error.status == 500:
                log.exception("request %s failed", request_id.decode())
            if has_started:
                raise
            body = anthropic_error_body(http_error) if is_anthropic else error_body(http_error)
            await send_body(send_with_id, http_error.status, body, headers=http_error.headers)

    def _check_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """A web page must not use a server on its reader's machine, whatever name it has found for it."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (hosts and not _HOST.fullmatch(hosts[0])):
            raise HttpError(400, "The Host header is not valid.")
        origin = headers.get(b"origin")
        if origin is not None and (not hosts or origin.partition(b"://")[2].lower() != hosts[0].lower()):
            raise HttpError(403, "Requests from other origins are not allowed.")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> bytes:
        """The salt that keeps this key's prefix cache apart, or nothing with fewer than two keys. Raises HttpError."""
        if not self._key_digests or scope["path"] in _OPEN_PATHS:
            return b""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not scheme and b"x-api-key" in headers:  # Anthropic's way
            scheme, key = b"bearer", headers[b"x-api-key"]
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so the time tells nothing of which one was close.
        is_known = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != b"bearer" or not any(is_known):
            raise HttpError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return digest[:16] if len(self._key_digests) > 1 else b""

    def _check_body(self, headers: dict[bytes, bytes], max_bytes: int) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise HttpError(400, "The Content-Length header is not valid.")
        if len(length) > 18 or int(length) > max_bytes:
            raise too_large(max_bytes)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(415, "Compressed bodies are not accepted.")


def _from_starlette(error: HTTPException) -> HttpError:
    """What the router raises: no such path, or not with this method."""
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    if error.status_code == 404:
        return HttpError(404, "There is nothing at this path.", code="not_found", headers=headers)
    if error.status_code == 405:
        return HttpError(405, "This method is not allowed here.", headers=headers)
    return HttpError(error.status_code, "The request cannot be served.", headers=headers)

"""The shape of every error response: OpenAI's error object, or Anthropic's on the paths of its API.

Owns the table from errors to status, type and code. Texts are ours, never `str` of a library's exception.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from ...errors import ErrorKind, PagewireError, RequestError

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]
ErrorCode = Literal[
    "invalid_json",
    "unsupported_value",
    "context_length_exceeded",
    "invalid_api_key",
    "model_not_found",
    "not_found",
    "previous_response_not_found",
    "queue_full",
    "rate_limit_exceeded",
    "request_timeout",
    "client_too_slow",
    "engine_unavailable",
    "engine_failed",
    "shutting_down",
    "state_unavailable",
]


class ErrorFields(Struct, frozen=True):
    message: str
    type: ErrorType
    param: str | None
    code: ErrorCode | None


class ErrorBody(Struct, frozen=True):
    error: ErrorFields


class OllamaErrorBody(Struct, frozen=True):
    error: str


class AnthropicErrorFields(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(Struct, frozen=True, tag="error"):
    error: AnthropicErrorFields


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_OF_KIND: dict[ErrorKind, tuple[int, ErrorCode | None]] = {
    "invalid_request": (400, None),
    "context_length_exceeded": (400, "context_length_exceeded"),
    "queue_full": (429, "queue_full"),
    "unavailable": (503, "engine_unavailable"),
    "internal": (500, None),
}


class HttpError(PagewireError):
    """A response with another status than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        num_tokens: int = 0,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """`num_tokens`: of a prompt that is too long; 0 if they were not counted."""
        super().__init__(message)
        self.status = status
        self.code: ErrorCode | None = code
        self.param = param
        self.num_tokens = num_tokens
        # After 500 and 504 the same request would fail again. `app` adds Retry-After to 429 and 503.
        self.headers = (*headers, (b"x-should-retry", b"false")) if status in (500, 504) else headers

    def with_name(self, name: Callable[[str], str]) -> "HttpError":
        """The same error for another API, which calls the field `name(param)`."""
        if self.param is None or (own := name(self.param)) == self.param:
            return self
        return HttpError(self.status, str(self).replace(self.param, own), code=self.code, param=own)


def unsupported(param: str, detail: str = "") -> HttpError:
    """A 400 for a field or value that this server or model does not support. `detail`: a sentence in place of the usual
    one."""
    return HttpError(400, detail or f"{param} is not supported.", code="unsupported_value", param=param)


class ShuttingDown(RequestError):
    """The server is shutting down."""

    def __init__(self, detail: str) -> None:
        super().__init__("unavailable", detail)


class EngineFailed(RequestError):
    """The engine has failed for good while it worked on this request."""

    def __init__(self, detail: str) -> None:
        super().__init__("unavailable", detail)


def as_http_error(error: Exception) -> HttpError:
    """The error that a client gets for `error`; an unexpected one becomes a 500 that tells nothing of its cause."""
    match error:
        case HttpError():
            return error
        case ShuttingDown():
            # A new connection reaches another server, or this one's successor.
            return HttpError(503, str(error), code="shutting_down", headers=((b"connection", b"close"),))
        case EngineFailed():
            return HttpError(503, str(error), code="engine_failed", headers=((b"connection", b"close"),))
        case RequestError():
            status, code = _OF_KIND[error.kind]
            return HttpError(status, str(error), code=code, param=error.param or None, num_tokens=error.num_tokens)
        case _:
            return HttpError(500, "The server failed on this request.")


def error_body(error: HttpError) -> bytes:
    """`{"error": {…}}` as JSON."""
    kind: ErrorType = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return msgspec.json.encode(ErrorBody(ErrorFields(str(error), kind, error.param, error.code)))


def anthropic_error_body(error: HttpError) -> bytes:
    """The error in Anthropic's shape, which has no `param`: the message names the field."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorFields(kind, str(error))))


def ollama_error_body(error: HttpError) -> bytes:
    """The error in Ollama's shape, a text: the message names the field."""
    return msgspec.json.encode(OllamaErrorBody(str(error)))


def error_body_at(path: str, error: HttpError) -> bytes:
    """The error in the shape of the API at `path`."""
    if path.startswith("/api/"):
        return ollama_error_body(error)
    return anthropic_error_body(error) if speaks_anthropic(path) else error_body(error)


def speaks_anthropic(path: str) -> bool:
    """Whether errors at `path` have Anthropic's shape."""
    return path.startswith("/v1/messages")

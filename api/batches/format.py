"""The lines of batch files; `pagewire run-batch` reads and writes them, too.

A request is {"custom_id", "method", "url", "body"}; its answer is {"id", "custom_id", "response", "error"}.
"""

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/score")


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the input. Unknown fields are ignored."""

    custom_id: str
    url: str
    body: dict[str, object]
    method: str = "POST"


_decode = msgspec.json.Decoder(BatchRequest).decode


def read_request(line: bytes) -> BatchRequest:
    """Decodes a line. Raises ValueError with a sentence that says what is wrong."""
    try:
        request = _decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError("this is not JSON.") from error
    if request.method != "POST" or request.url not in URLS:
        raise ValueError(
            f"{request.method[:20]} {request.url[:80]} cannot be a request of a batch; use POST {', '.join(URLS)}."
        )
    if request.body.get("stream"):
        raise ValueError("a batch has no streams; leave `stream` out.")
    return request


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The output line of a request. `body`: of the server's answer."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = None
    answer = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": content},
        "error": None
        if status == 200
        else {"code": str(status), "message": error_message(content) or f"the server answered {status}"},
    }
    return msgspec.json.encode(answer) + b"\n"


def error_message(body: object) -> str | None:
    """The message of an error object of OpenAI's; None if `body` is not one."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else None

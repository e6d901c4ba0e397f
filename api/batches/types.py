"""The bodies of OpenAI's files and batches. The rules are those of `api/openai/types.py`."""

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta, Struct

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

T = TypeVar("T")
Binary = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class Upload(Struct, frozen=True):
    """The fields of the multipart form."""

    file: Binary
    purpose: Literal["batch"]


class PageQuery(Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 20
    after: str | None = None


class Page(Struct, Generic[T], frozen=True):
    """A page of a list."""

    data: Sequence[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileBody(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileDeleted(Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class CreateBatch(Struct, frozen=True, kw_only=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None

    # Refused.
    output_expires_after: object = None


class BatchError(Struct, frozen=True):
    """An error in a line of the input."""

    message: str
    line: int | None = None
    code: str = "invalid_request"
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchBody(Struct, frozen=True, kw_only=True):
    """The batch object. Times are whole seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

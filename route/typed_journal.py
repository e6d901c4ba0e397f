"""The journal (see `journal`) of a stream of typed events, such as those of /v1/responses and /v1/messages.

The order of such events is fixed, and their ids follow from the answer's id (`api/output/resumable.py`). What the
client has is therefore a number of events plus a number of characters of each growing text; only the pieces of texts
may differ between engines. Token ids come in SSE comments, each before the events of its tokens.
"""

from typing import cast

import msgspec

from ..api.output.resumable import FAILED, TOKEN_IDS
from .journal import Delivered, Fields, Journal, check_error

_decode = msgspec.json.Decoder().decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_encode = msgspec.json.Encoder().encode

_FAILURES = ("error", "response.failed")
_LAST = (*_FAILURES, "message_stop", "response.completed", "response.incomplete")
_GROWING = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}  # of /v1/messages


class TypedJournal(Journal):
    """The journal of one answer, which has one output."""

    def __init__(self) -> None:
        self._delivered = Delivered()
        self._num_delivered = 0  # events that the client has, without pieces of texts
        self._num_seen = 0  # the same, of the present engine
        self._num_sent = 0  # all events that the client has
        self._is_first = True
        self._created_at: object = None
        self._id = ""
        self.num_prompt = 0
        self.has_ended = False

    @property
    def id(self) -> str:
        return self._id

    @property
    def num_ids(self) -> int:
        return len(self._delivered.ids)

    def restart(self) -> int:
        self._is_first = False
        self._num_seen = 0
        self._delivered.restart()
        return self._delivered.num_resumable

    def resumption(self, num_choices: int) -> dict[str, object]:
        fields: dict[str, object] = {"resume_id": self._id} if self._id else {}
        if self._delivered.num_resumable:
            fields["resume_token_ids"] = [self._delivered.resumable_ids()]
        return fields

    def take(self, event: bytes) -> bytes | None:
        if event.startswith(TOKEN_IDS):
            self._delivered.new_ids(_decode_ids(event[len(TOKEN_IDS) :]))
            return None
        if event.startswith(FAILED):
            check_error(event[len(FAILED) :].decode("latin-1"))
            return None
        head, found, data = event.partition(b"\ndata: ")
        if not found:
            return event + b"\n\n"  # a keep-alive comment
        fields = cast(Fields, _decode(data))
        if fields["type"] not in _FAILURES and not self._keep_new(fields):
            return None
        self.has_ended = fields["type"] in _LAST
        whole = fields.get("message") or fields.get("response")
        if whole:
            self._take_whole(whole)
        number, self._num_sent = self._num_sent, self._num_sent + 1
        if self._is_first:
            return event + b"\n\n"
        if "sequence_number" in fields:
            fields["sequence_number"] = number
        return head + b"\ndata: " + _encode(fields) + b"\n\n"

    def _keep_new(self, fields: Fields) -> bool:
        """Removes from an event the text that the client has. False: nothing new is left."""
        index = fields.get("output_index", fields.get("index"))
        delta = fields.get("delta")
        piece, name = (
            (fields, "delta") if isinstance(delta, str) else (delta, _GROWING.get((delta or {}).get("type", "")))
        )
        if piece is not None and name is not None:
            piece[name] = fresh = self._delivered.new_text(("piece", cast(int, index)), piece[name])
            return bool(fresh) or self._is_first
        self._num_seen += 1
        if self._num_seen <= self._num_delivered:
            return False
        self._num_delivered = self._num_seen
        return True

    def _take_whole(self, whole: Fields) -> None:
        """Reads the answer so far, which some events carry, and keeps its first creation time."""
        self._id = whole["id"]
        if "created_at" in whole:
            self._created_at = whole["created_at"] if self._created_at is None else self._created_at
            whole["created_at"] = self._created_at
        if (usage := whole.get("usage")) is not None:
            self.num_prompt = usage["input_tokens"]

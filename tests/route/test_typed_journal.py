"""A stream of typed events from several engines, one after another: the client receives it complete and once."""

import random
from typing import Any

import msgspec
import pytest

from pagewire.api.anthropic.reply import MessagesReply
from pagewire.api.output.parsers.registry import find_grammar
from pagewire.api.output.reply import Reply
from pagewire.api.output.resumable import WithTokenIds
from pagewire.api.output.turn import Turn
from pagewire.api.responses.reply import ResponsesReply, new_response
from pagewire.api.responses.types import ResponseBody, ResponsesRequest
from pagewire.ipc.messages import Chunk, Usage, ids_to_bytes
from pagewire.route.journal import StreamDiffers
from pagewire.route.typed_journal import TypedJournal

from .test_journal import OUTPUT

Fields = dict[str, Any]


async def _ignore(response: ResponseBody) -> None:
    pass


def engine(api: str, text: str, resumption: Fields, created_at: int) -> list[bytes]:
    """The events of an engine that samples one character per token, without the empty lines between them."""
    turn = Turn(find_grammar("hermes", "qwen3", True) if "<" in text else None)
    reply: Reply
    if api == "messages":
        reply = MessagesReply(model="m", turn=turn, id=resumption.get("resume_id"))
    else:
        request = ResponsesRequest(resume_id=resumption.get("resume_id"))
        response = new_response(request, model="m", temperature=1.0, top_p=1.0)
        response = msgspec.structs.replace(response, created_at=created_at)
        reply = ResponsesReply(response, turn=turn, has_logprobs=False, on_end=_ignore)
    reply = WithTokenIds(reply)
    reply.admitted([3])
    (resumed,) = resumption.get("resume_token_ids", [[]])
    cuts = range(len(resumed) + (not resumed), len(text))
    written = reply.opening()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        is_last = end == len(text)
        chunk = Chunk(
            0,
            text[start:end],
            ids_to_bytes([ord(c) for c in text[start:end]]),
            lengths=ids_to_bytes([1] * end) if start == 0 and resumed else b"",
            prompt_end="<|im_start|>assistant\n" if start == 0 else None,
            finish="stop" if is_last else None,
            usage=Usage(3, len(text), 0) if is_last else None,
        )
        written += reply.take(0, chunk)
    return b"".join([*written, *reply.closing()]).removesuffix(b"\n\n").split(b"\n\n")


def merged_events(events: list[bytes]) -> list[Fields]:
    """The events of a stream, with consecutive deltas of one text merged."""
    found: list[Fields] = []
    for number, event in enumerate(events):
        head, _, data = event.removesuffix(b"\n\n").partition(b"\ndata: ")
        fields: Fields = msgspec.json.decode(data)
        assert head == f"event: {fields['type']}".encode()
        assert fields.pop("sequence_number", number) == number, "one stream has one numbering"
        fields.get("response", {}).pop("completed_at", None)
        before = found[-1] if found else {}
        if text_key(fields) and text_key(before) == text_key(fields):
            fields = merged(before, fields)
            found.pop()
        found.append(fields)
    return found


def text_key(fields: Fields) -> Any:
    """The text that an event extends, or None."""
    delta = fields.get("delta", {})
    if isinstance(delta, str):
        return fields["item_id"]
    return (delta["type"], fields["index"]) if delta.get("type", "signature_delta") != "signature_delta" else None


def merged(before: Fields, fields: Fields) -> Fields:
    """The deltas of two events in one."""
    if isinstance(fields["delta"], str):
        return fields | {"delta": before["delta"] + fields["delta"]}
    (name,) = fields["delta"].keys() - {"type"}
    return fields | {"delta": fields["delta"] | {name: before["delta"][name] + fields["delta"][name]}}


@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.parametrize("text", [OUTPUT, "Nothing but a few words."])
def test_a_stream_is_complete_and_without_repetition_wherever_it_breaks(api: str, text: str) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        journal = TypedJournal()
        got: list[bytes] = []
        resumption: Fields = {}
        for created_at in range(rng.randrange(1, 4)):  # engines that fail, each resuming after the one before
            events = engine(api, text, resumption, created_at)
            for event in events[: rng.randrange(len(events))]:
                got += [fresh] if (fresh := journal.take(event)) is not None else []
            assert not journal.has_ended
            journal.restart()
            resumption = journal.resumption(1)
        for event in engine(api, text, resumption, 9):
            got += [fresh] if (fresh := journal.take(event)) is not None else []
        assert journal.has_ended and (journal.num_ids, journal.num_prompt) == (len(text), 3)
        known = {"resume_id": journal.id}
        created = merged_events(got)[0].get("response", {}).get("created_at", 0)
        whole = [event for event in engine(api, text, known, created) if not event.startswith(b":")]
        assert merged_events(got) == merged_events(whole), f"seed {seed}"


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_an_error_is_passed_on_before_the_replay_is_complete(api: str) -> None:
    journal = TypedJournal()
    for event in engine(api, OUTPUT, {}, 1)[:200]:
        journal.take(event)
    journal.restart()
    kind = "error" if api == "messages" else "response.failed"
    error = b'event: %b\ndata: {"type":"%b"}' % (kind.encode(), kind.encode())
    assert journal.take(b": failed timeout") is None
    assert journal.take(error) == error + b"\n\n" and journal.has_ended


def test_a_different_output_is_detected() -> None:
    journal = TypedJournal()
    for event in engine("messages", "One two", {}, 0)[:9]:
        journal.take(event)
    assert journal.num_ids == 4
    journal.restart()
    with pytest.raises(StreamDiffers):
        for event in engine("messages", "On two", {}, 0):
            journal.take(event)

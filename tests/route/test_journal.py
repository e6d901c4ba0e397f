"""A chat stream that several engines produced, one after another: the client receives it complete and once."""

import random
from typing import Any

import msgspec
import pytest

from pagewire.api.openai.chat import ChatReply
from pagewire.api.output.parsers.registry import find_grammar
from pagewire.api.output.turn import Turn
from pagewire.ipc.messages import Chunk, TokenLogprob, TopLogprob, Usage, ids_to_bytes
from pagewire.route.journal import ChatJournal, Journal, StreamDiffers

OUTPUT = (
    "<think>Both are needed — I'd say.</think>I look. <tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>\n<tool_call>\n'
    '{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
)


class Output:
    """One output with a token per character, and the streams in which engines send it."""

    def __init__(self, text: str, *, has_logprobs: bool = False) -> None:
        self.text = text
        self._has_logprobs = has_logprobs

    def events(self, cuts: list[int], num_resumed: int = 0) -> list[bytes]:
        """The events of a chat stream, cut into pieces after `num_resumed` tokens that another engine sampled."""
        reply = ChatReply(
            model="m",
            created=len(cuts) + num_resumed,
            n=1,
            is_streamed=True,
            include_usage=True,
            has_logprobs=self._has_logprobs,
            has_token_ids=True,
            new_turn=lambda: Turn(find_grammar("hermes", "qwen3", True)),
        )
        reply.admitted([3])
        events = reply.opening()
        if num_resumed:
            events += reply.take(0, self._resumed(num_resumed))
        for start, end in zip([num_resumed, *cuts], [*cuts, len(self.text)], strict=True):
            events += reply.take(0, self._chunk(start, end))
        events += reply.closing()
        return [event.removesuffix(b"\n\n") for event in events]

    def _resumed(self, num: int) -> Chunk:
        """The first chunk of an engine that resumes."""
        chunk = self._chunk(0, num)
        return msgspec.structs.replace(chunk, logprobs=None, lengths=ids_to_bytes([1] * num))

    def _chunk(self, start: int, end: int) -> Chunk:
        piece = self.text[start:end]
        rows = tuple(TokenLogprob(TopLogprob(ord(c), c, c.encode(), -0.5), ()) for c in piece)
        is_last = end == len(self.text)
        return Chunk(
            0,
            piece,
            ids_to_bytes([ord(c) for c in piece]),
            logprobs=rows if self._has_logprobs else None,
            prompt_end="<|im_start|>assistant\n" if start == 0 else None,
            finish="stop" if is_last else None,
            usage=Usage(3, len(self.text), 0) if is_last else None,
        )


def assembled(events: list[bytes]) -> dict[str, Any]:
    """All that a client assembles from a stream."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ids": [], "logprobs": [], "ends": []}
    for event in (msgspec.json.decode(event[6:]) for event in events):
        found.setdefault("id", event["id"])
        assert event["id"] == found["id"], "one stream has one id"
        found["ends"] += [event["usage"]] if event.get("usage") else []
        for choice in event["choices"]:
            delta = choice["delta"]
            found["ends"] += [delta["role"]] if "role" in delta else []
            found["content"] += delta.get("content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            found["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if "name" in call["function"]:
                    assert call["index"] == len(found["calls"]) and call["id"]
                    found["calls"].append([call["function"]["name"], ""])
                found["calls"][call["index"]][1] += call["function"]["arguments"]
            found["ids"] += choice.get("token_ids", [])
            found["logprobs"] += [row["token"] for row in (choice["logprobs"] or {}).get("content", [])]
            found["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    del found["id"]
    return found


def num_resumed_by(journal: Journal) -> int:
    """The number of tokens that are sent to the next engine."""
    resumption: dict[str, Any] = journal.resumption(1)
    return len(resumption.get("resume_token_ids", [[]])[0])


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_stream_is_complete_and_without_repetition_wherever_it_breaks(shows_ids: bool, has_logprobs: bool) -> None:
    output = Output(OUTPUT, has_logprobs=has_logprobs)
    whole = assembled(output.events(list(range(1, len(OUTPUT)))))
    assert len(whole["calls"]) == 2 and whole["reasoning"] and whole["content"] and whole["ids"]
    assert whole["ends"][-1]["completion_tokens_details"]["reasoning_tokens"] > 20
    if not shows_ids:
        whole["ids"] = []
    for seed in range(40):
        rng = random.Random(seed)
        journal = ChatJournal(shows_ids=shows_ids)
        got: list[bytes] = []
        num_resumed = 0
        for _ in range(rng.randrange(1, 4)):  # engines that fail, each resuming after the one before
            events = output.events(list(range(num_resumed + 1, len(OUTPUT))), num_resumed)
            for event in events[: rng.randrange(len(events))]:
                got += [fresh] if (fresh := journal.take(event)) is not None else []
            journal.restart()
            num_resumed = num_resumed_by(journal)
        for event in output.events(list(range(num_resumed + 1, len(OUTPUT))), num_resumed):
            got += [fresh] if (fresh := journal.take(event)) is not None else []
        assert assembled(got) == whole, f"seed {seed}"
        assert journal.num_ids == len(OUTPUT)


def test_the_next_engine_may_cut_the_output_into_other_pieces() -> None:
    """An engine that cannot resume repeats the whole output, perhaps in larger pieces."""
    output = Output(OUTPUT, has_logprobs=True)
    whole = assembled(output.events([]))
    for seed in range(40):
        rng = random.Random(seed)
        journal = ChatJournal(shows_ids=True)
        got: list[bytes] = []
        for is_last in (False, True):
            events = output.events(sorted(rng.sample(range(1, len(OUTPUT)), 60)))
            for event in events if is_last else events[: rng.randrange(len(events))]:
                got += [fresh] if (fresh := journal.take(event)) is not None else []
            journal.restart()
        both = assembled(got)
        assert both.pop("ends")[:2] == whole["ends"][:2]  # all tokens of a piece count as reasoning, or none
        assert both == {name: value for name, value in whole.items() if name != "ends"}, f"seed {seed}"


def test_token_ids_that_the_client_did_not_request_are_hidden() -> None:
    journal = ChatJournal(shows_ids=False)
    events = [journal.take(event) for event in Output(OUTPUT).events(list(range(1, len(OUTPUT))))]
    assert None in events, "an event with token ids only is dropped"
    assert not any(b"token_ids" in event for event in events if event is not None)


def test_a_different_output_is_detected() -> None:
    journal = ChatJournal(shows_ids=False)
    for event in Output("One two").events([1, 2, 3, 4])[:4]:
        journal.take(event)
    journal.restart()
    with pytest.raises(StreamDiffers):
        for event in Output("On two").events([1, 2, 3, 4]):
            journal.take(event)

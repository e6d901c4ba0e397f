"""What a stream's client gets, whoever goes on with it, and wherever the stream broke off."""

import random
from typing import Any

import msgspec
import pytest

from pagewire.api.openai.chat import ChatReply
from pagewire.api.output.parsers.registry import find_grammar
from pagewire.ipc.messages import Chunk, TokenLogprob, TopLogprob, Usage, ids_to_bytes
from pagewire.route.journal import ChatJournal, Journal, StreamDiffers

OUTPUT = (
    "<think>Both are needed — I'd say.</think>I look. <tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>\n<tool_call>\n'
    '{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
)


class Output:
    """One output, a token a character, as an engine tells of it."""

    def __init__(self, text: str, *, has_logprobs: bool = False) -> None:
        self.text = text
        self._has_logprobs = has_logprobs

    def events(self, cuts: list[int], num_resumed: int = 0) -> list[bytes]:
        """A chat stream's events, of an engine that draws these pieces behind so many resumed tokens."""
        reply = ChatReply(
            model="m",
            created=len(cuts) + num_resumed,
            n=1,
            is_streamed=True,
            include_usage=True,
            has_logprobs=self._has_logprobs,
            has_token_ids=True,
            grammar=find_grammar("hermes", "qwen3", True),
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
        """What an engine that goes on says first."""
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


def told(events: list[bytes]) -> dict[str, Any]:
    """Everything that a client puts together from a stream."""
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
    """Tokens that the next engine is told of."""
    resumption: dict[str, Any] = journal.resumption(1)
    return len(resumption.get("resume_token_ids", [[]])[0])


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_wherever_it_breaks_the_client_gets_the_whole_once(shows_ids: bool, has_logprobs: bool) -> None:
    output = Output(OUTPUT, has_logprobs=has_logprobs)
    whole = told(output.events(list(range(1, len(OUTPUT)))))
    assert len(whole["calls"]) == 2 and whole["reasoning"] and whole["content"] and whole["ids"]
    assert whole["ends"][-1]["completion_tokens_details"]["reasoning_tokens"] > 20
    if not shows_ids:
        whole["ids"] = []
    for seed in range(40):
        rng = random.Random(seed)
        journal = ChatJournal(shows_ids=shows_ids)
        got: list[bytes] = []
        num_resumed = 0
        for _ in range(rng.randrange(1, 4)):  # engines that break off, each going on behind the one before
            events = output.events(list(range(num_resumed + 1, len(OUTPUT))), num_resumed)
            for event in events[: rng.randrange(len(events))]:
                got += [fresh] if (fresh := journal.take(event)) is not None else []
            journal.restart()
            num_resumed = num_resumed_by(journal)
        for event in output.events(list(range(num_resumed + 1, len(OUTPUT))), num_resumed):
            got += [fresh] if (fresh := journal.take(event)) is not None else []
        assert told(got) == whole, f"seed {seed}"
        assert journal.num_ids == len(OUTPUT)


def test_pieces_may_be_cut_in_other_places() -> None:
    """An engine that resumes nothing says everything again, and perhaps in larger pieces."""
    output = Output(OUTPUT, has_logprobs=True)
    whole = told(output.events([]))
    for seed in range(40):
        rng = random.Random(seed)
        journal = ChatJournal(shows_ids=True)
        got: list[bytes] = []
        for is_last in (False, True):
            events = output.events(sorted(rng.sample(range(1, len(OUTPUT)), 60)))
            for event in events if is_last else events[: rng.randrange(len(events))]:
                got += [fresh] if (fresh := journal.take(event)) is not None else []
            journal.restart()
        both = told(got)
        assert both.pop("ends")[:2] == whole["ends"][:2]  # of a piece of several tokens all or none are reasoning
        assert both == {name: value for name, value in whole.items() if name != "ends"}, f"seed {seed}"


def test_what_the_client_did_not_ask_for_is_hidden() -> None:
    journal = ChatJournal(shows_ids=False)
    events = [journal.take(event) for event in Output(OUTPUT).events(list(range(1, len(OUTPUT))))]
    assert None in events, "what has only token ids is nothing to its client"
    assert not any(b"token_ids" in event for event in events if event is not None)


def test_another_output_is_noticed() -> None:
    journal = ChatJournal(shows_ids=False)
    for event in Output("One two").events([1, 2, 3, 4])[:4]:
        journal.take(event)
    journal.restart()
    with pytest.raises(StreamDiffers):
        for event in Output("On two").events([1, 2, 3, 4]):
            journal.take(event)

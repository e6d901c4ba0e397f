"""`resume_token_ids`: the answer holds the whole output, though another engine sampled its beginning."""

from typing import Any

import pytest
from harness import FakeEngine, chat, complete, request

from pagewire.api.gateway.journal import Entry
from pagewire.ipc.messages import (
    Chunk,
    Limits,
    Sampling,
    Submit,
    TextPrompt,
    TextSpec,
    bytes_to_ids,
    ids_to_bytes,
)

PIECES = ["Hel", "lo ", "wor", "ld"]
TEXT = "".join(PIECES)


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_every_choice_resumes_with_its_own_seed() -> None:
    engine = FakeEngine(PIECES)
    answer = complete(engine, prompt=["a", "b"], n=2, seed=5, resume_token_ids=[ids("Hel"), [], ids("Hello "), []])
    assert [choice["text"] for choice in answer.json["choices"]] == [TEXT] * 4
    submits = [(submit.n, submit.sampling.seed, submit.resume_chars) for submit in engine.submits]
    assert submits == [(1, 5, -1), (1, 6, 0), (1, 5, -1), (1, 6, 0)]
    assert [bytes_to_ids(submit.resume_ids).tolist() for submit in engine.submits] == [
        ids("Hel"),
        [],
        ids("Hello "),
        [],
    ]
    assert answer.json["usage"]["prompt_tokens"] == 6, "a prompt counts once"


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_holds_the_whole_output(stream: bool) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "resume_token_ids": [ids("Hello ")], "stream": stream}
    for ask in (chat, complete):
        answer = ask(FakeEngine(PIECES), **fields)
        pieces = [e["choices"][0] for e in answer.events[:-1]] if stream else answer.json["choices"]
        texts = [p.get("text") or p.get("delta", p.get("message", {})).get("content") or "" for p in pieces]
        assert "".join(texts) == TEXT
        assert [id for p in pieces for id in p.get("token_ids") or ()] == ids(TEXT)


def test_only_new_tokens_have_logprobs_at_their_offsets() -> None:
    answer = complete(FakeEngine(PIECES), logprobs=1, resume_token_ids=[ids("Hello ")])
    logprobs = answer.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("world") and logprobs["text_offset"] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("path", "body", "id"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50}, "msg_" + 24 * "a"),
        ("/v1/responses", {"input": "a"}, "resp_" + 24 * "a"),
    ],
)
def test_token_ids_of_typed_events_are_sent_in_comments(path: str, body: dict[str, Any], id: str) -> None:
    fields = {**body, "resume_id": id, "resume_token_ids": [ids("Hello ")], "return_token_ids": True}
    answer = request(FakeEngine(PIECES), path, {**fields, "stream": True})
    comments = [line for line in answer.body.decode().split("\n\n") if line.startswith(":")]
    assert comments == [f": token_ids {ids(piece)}".replace(", ", ",") for piece in ("Hello ", "wor", "ld")]
    assert f'"id":"{id}"' in answer.body.decode()
    refused = request(FakeEngine(PIECES), path, fields)
    assert refused.status == 400 and b"return_token_ids without stream" in refused.body
    assert request(FakeEngine(PIECES), path, {**body, "resume_id": "anything"}).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"resume_token_ids": []},
        {"resume_token_ids": [[1], [2]]},
        {"resume_token_ids": [[1]], "n": 2},
        {"resume_token_ids": [[1000]]},
        {"resume_token_ids": [[-1]]},
        {"resume_token_ids": ["a"]},
        {"resume_token_ids": [[1, 2, 3]], "max_tokens": 2},
        {"resume_token_ids": [[1]], "use_beam_search": True, "n": 1},
        {"resume_token_ids": [[1]], "best_of": 2},
    ],
)
def test_invalid_resume_token_ids_are_refused(fields: dict[str, Any]) -> None:
    engine = FakeEngine(PIECES)
    answer = complete(engine, **fields)
    assert answer.status == 400 and answer.error["param"].startswith("resume_token_ids") and not engine.submits
    assert "resume_token_ids" in answer.error["message"]


def test_replayed_ids_are_in_the_journal_once() -> None:
    """The first chunk repeats the ids of the request, which the journal holds already."""
    data = ids_to_bytes(ids("Hel"))
    submit = Submit(0, 1, TextPrompt("x"), Sampling(), Limits(), TextSpec(), resume_ids=data, resume_chars=-1)
    entry = Entry(submit)
    assert entry.resumed(9).resume_chars == -1, "nothing has been delivered yet"
    entry.note(Chunk(0, "Hel", data, lengths=ids_to_bytes([1, 1, 1])))
    entry.note(Chunk(0, "lo", ids_to_bytes(ids("lo"))))
    again = entry.resumed(9)
    assert (bytes_to_ids(again.resume_ids).tolist(), again.resume_chars) == (ids("Hello"), 5)

"""The detokenizer actor: text, stop strings, log-probabilities, resumed and replayed outputs."""

import random
from array import array
from pathlib import Path

import msgspec
import pytest
import vocabulary

from pagewire.config.config import Config, EngineConfig, MachineFacts, ModelFacts
from pagewire.config.resolve import resolve
from pagewire.ipc import messages as m
from pagewire.procs.detokenizer import DetokenizerActor

RID = 7


class Sent:
    """Collects what an actor posts."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, m.Message]] = []

    def __call__(self, receiver: str, message: m.Message) -> None:
        self.posts.append((receiver, message))

    def chunks(self) -> list[m.Chunk]:
        return [c for _, message in self.posts if isinstance(message, m.TextBatch) for c in message.chunks]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    facts = ModelFacts(path=str(vocabulary.add_tokenizer(tmp_path)), name="m", max_position=64, vocab_size=320,
                       eos_token_ids=(2,), checkpoint_dtype="float32")  # fmt: skip
    return resolve(Config(), facts, MachineFacts(num_cores=1))


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def actor(config: EngineConfig, sent: Sent) -> DetokenizerActor:
    actor = DetokenizerActor(config)
    actor.start(sent)
    return actor


def ids_of(text: str) -> bytes:
    """Ids of the byte-level vocabulary: its letters in the alphabet's order after three specials."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return m.ids_to_bytes([3 + letters.index(c) for piece, _ in mapped for c in piece])


def opened(**spec: object) -> m.Opened:
    return m.Opened(RID, 3, 0, ids_of("abc"), m.TextSpec(**spec))  # type: ignore[arg-type]


def batch(*tokens: m.Tokens) -> m.TokenBatch:
    return m.TokenBatch(tokens)


def test_tokens_in_columns_are_handled_before_the_others(actor: DetokenizerActor, sent: Sent) -> None:
    other = msgspec.structs.replace(opened(), rid=RID + 1)
    ids = ids_of("ab")
    columns = m.TokenBatch(
        (m.Tokens(RID, ids[4:], finish="length", usage=m.Usage(1, 2, 0)),),
        array("q", [RID + 1, RID]).tobytes(),
        ids[4:8] + ids[:4],
    )
    actor.handle([opened(), other, columns])
    assert [(c.rid, c.text) for c in sent.chunks()] == [(RID + 1, "b"), (RID, "a"), (RID, "b")]


SPECS: tuple[dict[str, object], ...] = (
    {},
    {"stop": ("b",)},
    {"stop": ("aba", "é🙂"), "include_stop": True, "min_tokens": 5},
    {"prompt": True, "prompt_end": True, "prompt_logprobs": 0},
    {"detokenize": False},
    {"marks": ("</s>",)},
    {"skip_special_tokens": False},
)


def tokens_at_random(rng: random.Random, alphabet: list[bytes]) -> m.Tokens:
    """One step of one request. Entries of `alphabet` are the ids of whole characters; some are cut apart here."""
    ids = b"".join(rng.choices(alphabet, k=rng.choice((1, 1, 1, 2))))
    ids = ids[: 4 * rng.choice((1, 1, 1, 2, 5))]
    num = len(ids) // 4
    scored = m.RowLogprobs(2, ids * 2, array("f", [-1.0] * 2 * num).tobytes())
    match rng.randrange(12):
        case 0:
            return m.Tokens(RID, ids, logprobs=scored)
        case 1:
            return m.Tokens(RID, b"", prompt_logprobs=scored)
        case 2 if rng.random() < 0.3:
            finish: m.FinishReason = rng.choice(("stop", "length"))
            return m.Tokens(RID, ids, finish=finish, stop_token_id=rng.choice((None, 9)), usage=m.Usage(3, num, 0))
    return m.Tokens(RID, ids)


def in_columns(tokens: m.Tokens) -> m.TokenBatch:
    if tokens != m.Tokens(tokens.rid, tokens.ids):
        return batch(tokens)
    return m.TokenBatch((), array("q", [tokens.rid] * (len(tokens.ids) // 4)).tobytes(), tokens.ids)


@pytest.mark.parametrize("seed", range(60))
def test_the_fast_path_and_the_general_path_post_the_same_messages(config: EngineConfig, seed: int) -> None:
    """Tokens in columns may take the fast path, `Tokens` never do. Both get one history, with resets in between."""
    rng = random.Random(seed)
    alphabet = [ids_of(text) for text in ("a", "b", "c", " ", "é", "🙂")] + [
        m.ids_to_bytes([id]) for id in (0, 1, 2, 319)
    ]
    spec = SPECS[seed % len(SPECS)]
    spec = {name: value for name, value in spec.items() if name in m.TextSpec.__struct_fields__}
    fast, general = Sent(), Sent()
    actors = [DetokenizerActor(config), DetokenizerActor(config)]
    for actor, sent in zip(actors, (fast, general), strict=True):
        actor.start(sent)
        actor.handle([opened(**spec)])
    start = 0  # index of the first chunk since the last replay
    for step in range(60):
        if rng.random() < 0.05:
            delivered = general.chunks()[start:]
            chars = len("".join(chunk.text for chunk in delivered))
            is_replay = rng.random() < 0.5
            start += len(delivered) * is_replay
            resumed = msgspec.structs.replace(
                opened(**spec),
                resume_ids=b"".join(chunk.ids for chunk in delivered),
                # The new detokenizer may hold back text that was delivered.
                resume_chars=-1 if is_replay else chars + rng.choice((0, 3)),
            )
            for actor in actors:
                actor.handle([m.Reset(2, 1, ("core",), "It died."), resumed])
        tokens = tokens_at_random(rng, alphabet)
        actors[0].handle([in_columns(tokens)])
        actors[1].handle([batch(tokens)])
        assert fast.posts == general.posts, (seed, step)
        if tokens.finish is not None:
            break
    assert general.posts, seed


def test_several_tokens_of_a_step_are_one_chunk(actor: DetokenizerActor, sent: Sent) -> None:
    rids = array("q", [RID, RID, RID]).tobytes()
    actor.handle([opened(), m.TokenBatch((), rids, ids_of("abc")), m.TokenBatch((), rids, ids_of("def"))])
    assert [c.text for c in sent.chunks()] == ["abc", "def"]


def test_a_split_character_waits_for_its_rest(actor: DetokenizerActor, sent: Sent) -> None:
    ids = ids_of("é")
    actor.handle([opened(), batch(m.Tokens(RID, ids[:4])), batch(m.Tokens(RID, ids[4:]))])
    assert [c.text for c in sent.chunks()] == ["", "é"]


def test_all_tokens_of_one_call_are_posted_as_one_batch(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([opened(), batch(m.Tokens(RID, ids_of("a"))), batch(m.Tokens(RID, ids_of("b")))])
    assert len(sent.posts) == 1 and [c.text for c in sent.chunks()] == ["a", "b"]


def test_a_stop_string_ends_the_output_and_the_core_is_told(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([opened(stop=("cd",)), batch(m.Tokens(RID, ids_of("abc")))])
    actor.handle([batch(m.Tokens(RID, ids_of("d")))])
    actor.handle([batch(m.Tokens(RID, ids_of("e")))])  # was in flight
    actor.handle([batch(m.Tokens(RID, b"", finish="stop", usage=m.Usage(3, 5, 0)))])  # the core's own end
    assert ("core", m.StopHit((RID,))) in sent.posts
    assert "".join(c.text for c in sent.chunks()) == "ab"
    (last,) = [c for c in sent.chunks() if c.finish]
    assert last.stop_reason == "cd" and last.usage == m.Usage(3, 4, 0)
    actor.handle([opened()])  # the rid can be used again, and no output leaked
    assert len(actor._outputs) == 1


def test_the_stop_token_is_among_the_ids_and_not_in_the_text(actor: DetokenizerActor, sent: Sent) -> None:
    final = m.Tokens(RID, ids_of("b"), finish="stop", stop_token_id=9, usage=m.Usage(3, 2, 0))
    actor.handle([opened(), batch(m.Tokens(RID, ids_of("a"))), batch(final)])
    assert [(c.text, c.ids) for c in sent.chunks()] == [("a", ids_of("a")), ("", ids_of("b"))]
    assert sent.chunks()[-1].stop_reason == 9


def test_a_half_character_at_the_end_becomes_a_replacement_character(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([opened(), batch(m.Tokens(RID, ids_of("é")[:4], finish="length", usage=m.Usage(3, 1, 0)))])
    assert sent.chunks()[-1].text == "\ufffd"


def test_the_prompt_is_echoed_once_with_its_logprobs(actor: DetokenizerActor, sent: Sent) -> None:
    scored = m.RowLogprobs(1, ids_of("bc"), b"\0\0\x80\xbf" * 2)
    actor.handle(
        [
            opened(prompt=True),
            batch(m.Tokens(RID, ids_of("x"), prompt_logprobs=scored)),
            batch(m.Tokens(RID, ids_of("y"))),
        ]
    )
    first, second = sent.chunks()
    assert first.prompt is not None and first.prompt.text == "abc" and second.prompt is None
    assert first.prompt.logprobs is not None and first.prompt.logprobs[0] is None
    assert [p.chosen.token for p in first.prompt.logprobs[1:] if p] == ["b", "c"]
    assert first.prompt.logprobs[1] is not None and first.prompt.logprobs[1].chosen.logprob == -1.0


def test_an_output_that_was_never_opened_still_ends(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([batch(m.Tokens(99, b"", finish="abort", usage=m.Usage(3, 0, 0)))])
    actor.handle([m.Failed(98, "internal", "why")])
    assert sent.chunks()[0].finish == "abort" and sent.posts[-1] == ("api", m.Failed(98, "internal", "why"))


def test_a_failure_after_a_stop_string_is_not_posted(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([opened(stop=("b",)), batch(m.Tokens(RID, ids_of("b"))), m.Failed(RID, "internal", "why")])
    assert not any(isinstance(message, m.Failed) for _, message in sent.posts) and not actor._outputs


def test_marks_are_shown_and_other_special_tokens_are_not(actor: DetokenizerActor, sent: Sent) -> None:
    specials = m.ids_to_bytes([1, 2, 1])  # <s></s><s>
    actor.handle([opened(marks=("</s>",), prompt_end=True), batch(m.Tokens(RID, ids_of("a") + specials))])
    actor.handle([batch(m.Tokens(RID, ids_of("b")))])
    assert [(c.text, c.prompt_end) for c in sent.chunks()] == [("a</s>", "abc"), ("b", None)]


def test_prompt_end_includes_special_tokens(actor: DetokenizerActor, sent: Sent) -> None:
    prompt = msgspec.structs.replace(opened(prompt_end=True), prompt_ids=ids_of("x" * 20) + m.ids_to_bytes([2, 1]))
    actor.handle([prompt, batch(m.Tokens(RID, ids_of("a")))])
    assert sent.chunks()[0].prompt_end == "x" * 14 + "</s><s>"


def test_a_lost_output_is_resumed_after_the_text_that_was_delivered(config: EngineConfig) -> None:
    """It may be lost inside a character, inside a partial stop string, or between."""
    ids = ids_of("aé🙂b stoc stop d")
    whole = play(config, [opened(stop=("stop",)), *batches(ids)])
    assert whole[0] == "aé🙂b stoc " and len(whole[1]) < len(ids)
    for at in range(0, len(whole[1]), 4):
        before = play(config, [opened(stop=("stop",)), *batches(ids[:at])])
        resumed = msgspec.structs.replace(opened(stop=("stop",)), resume_ids=before[1], resume_chars=len(before[0]))
        after = play(config, [resumed, *batches(ids[at:])])
        assert (before[0] + after[0], before[1] + after[1], after[2]) == whole, at


def test_the_new_detokenizer_may_hold_back_text_that_was_delivered_before(actor: DetokenizerActor, sent: Sent) -> None:
    resumed = msgspec.structs.replace(opened(stop=("abc",)), resume_ids=ids_of("xab"), resume_chars=3)
    actor.handle([resumed, *batches(ids_of("dy"))])
    assert "".join(chunk.text for chunk in sent.chunks()) == "dy"  # of "abd" two characters were delivered


def test_a_replay_delivers_everything_again(actor: DetokenizerActor, sent: Sent) -> None:
    resumed = msgspec.structs.replace(opened(prompt=True), resume_ids=ids_of("xa"), resume_chars=-1)
    actor.handle([resumed, *batches(ids_of("b"))])
    first, second = sent.chunks()
    assert (first.text, first.ids, second.text) == ("xa", ids_of("xa"), "b")
    assert first.prompt is not None and second.prompt is None


def test_a_reset_forgets_all_outputs(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([opened(), m.Reset(2, 1, ("core",), "It died.")])
    assert not actor._outputs


def batches(ids: bytes) -> list[m.TokenBatch]:
    return [batch(m.Tokens(RID, ids[i : i + 4])) for i in range(0, len(ids), 4)]


def play(config: EngineConfig, messages: list[m.ToDetokenizer]) -> tuple[str, bytes, str | None]:
    """The text, ids and finish reason that a detokenizer makes of `messages`."""
    sent = Sent()
    actor = DetokenizerActor(config)
    actor.start(sent)
    actor.handle(messages)
    chunks = sent.chunks()
    return "".join(c.text for c in chunks), b"".join(c.ids for c in chunks), chunks[-1].finish if chunks else None


def replayed(text: str, **spec: object) -> m.Opened:
    return msgspec.structs.replace(opened(**spec), resume_ids=ids_of(text), resume_chars=-1)


def test_a_replayed_output_is_delivered_from_its_beginning(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([replayed("aé🙂b")])
    (chunk,) = sent.chunks()
    assert (chunk.text, chunk.ids, chunk.finish) == ("aé🙂b", ids_of("aé🙂b"), None)
    assert m.bytes_to_ids(chunk.lengths).tolist() == [1, 0, 1, 0, 0, 0, 1, 1]
    actor.handle([batch(m.Tokens(RID, ids_of("c")))])
    assert [c.text for c in sent.chunks()[1:]] == ["c"] and not sent.chunks()[1].lengths


def test_a_replayed_output_ends_at_the_stop_string_in_it(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([replayed("abcdef", stop=("cd",)), batch(m.Tokens(RID, ids_of("g")))])
    (chunk,) = sent.chunks()
    assert (chunk.text, chunk.ids, chunk.finish, chunk.stop_reason) == ("ab", ids_of("abcd"), "stop", "cd")
    assert chunk.usage == m.Usage(3, 4, 0)
    assert ("core", m.StopHit((RID,))) in sent.posts


def test_a_stop_string_may_begin_in_the_replayed_text(actor: DetokenizerActor, sent: Sent) -> None:
    actor.handle([replayed("abc", stop=("cd",)), batch(m.Tokens(RID, ids_of("d")))])
    delivered, last = sent.chunks()
    assert (delivered.text, last.text, last.stop_reason) == ("ab", "", "cd")

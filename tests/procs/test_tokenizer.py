"""The tokenizer actor: the messages that it sends to the core, and the errors with which it refuses requests."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import vocabulary
from msgspec.structs import replace
from waiting import cpu_deadline

from pagewire.config.config import Config, MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.text.tokenizer import load_tokenizer
from pagewire.ipc import messages as m
from pagewire.procs import tokenizer
from pagewire.procs.tokenizer import TokenizerActor

Posts = list[tuple[str, m.Message]]


@pytest.fixture
def posts() -> Posts:
    return []


@pytest.fixture
def actor(tmp_path: Path, posts: Posts) -> TokenizerActor:
    return _started(tmp_path, posts)


def _started(folder: Path, posts: Posts, *, has_states: bool = False, template: str | None = None) -> TokenizerActor:
    facts = ModelFacts(path=str(vocabulary.add_tokenizer(folder)), name="m", max_position=64, vocab_size=320,
                       eos_token_ids=(2,), checkpoint_dtype="float32", has_states=has_states)  # fmt: skip
    if template is not None:
        (folder / "chat.jinja").write_text(template)
    flags = {} if template is None else {"chat_template": str(folder / "chat.jinja")}
    actor = TokenizerActor(resolve(make_config(**flags), facts, MachineFacts(num_cores=1)))
    actor.start(lambda receiver, message: posts.append((receiver, message)))
    return actor


def submit(prompt: m.TextPrompt | m.ChatPrompt | m.IdsPrompt, n: int = 1, **more: Any) -> m.Submit:
    fields: dict[str, Any] = {"sampling": m.Sampling(seed=5), "limits": m.Limits(4), "text": m.TextSpec(), **more}
    return m.Submit(10, n, prompt, **fields)


def test_the_choices_of_a_prompt_stay_one_message(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([submit(m.TextPrompt("hi"), n=3, salt=b"s", priority=2)])
    ((receiver, enqueue),) = posts
    assert receiver == "core" and isinstance(enqueue, m.Enqueue)
    assert (enqueue.rid, enqueue.n, enqueue.sampling.seed, enqueue.salt, enqueue.priority) == (10, 3, 5, b"s", 2)


def test_a_chat_is_rendered(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([submit(m.ChatPrompt(b'[{"role": "user", "content": "hi"}]'))])
    (_, enqueue), *_ = posts
    assert isinstance(enqueue, m.Enqueue) and m.bytes_to_ids(enqueue.prompt_ids)[0] == 1  # <s>


THINKS = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, THINKS])
def test_a_state_is_worth_keeping_before_the_generation_prompt(
    tmp_path: Path, posts: Posts, template: str | None
) -> None:
    chat = m.ChatPrompt(b'[{"role": "user", "content": "hi"}]')
    actor = _started(tmp_path, posts, has_states=True, template=template)
    bare = replace(chat, add_generation_prompt=False)
    actor.handle([submit(chat), submit(bare), submit(chat, truncate=20), submit(m.TextPrompt("hi"))])
    enqueued = [message for _, message in posts if isinstance(message, m.Enqueue)]
    whole, history, cut = (m.bytes_to_ids(message.prompt_ids) for message in enqueued[:3])
    marks = [message.marks for message in enqueued]
    assert whole[: len(history)] == history and marks[0] == (len(history),)
    assert len(cut) == 20 and marks[2] == (20 - (len(whole) - len(history)),)
    assert marks[1] == marks[3] == (), "no generation prompt"


def test_models_without_states_have_no_marks(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([submit(m.ChatPrompt(b'[{"role": "user", "content": "hi"}]'))])
    ((_, enqueue),) = posts
    assert isinstance(enqueue, m.Enqueue) and enqueue.marks == ()


def test_a_template_that_needs_a_generation_prompt_has_no_marks(tmp_path: Path, posts: Posts) -> None:
    strict = "{% if not add_generation_prompt %}{{ raise_exception('none') }}{% endif %}hello"
    _started(tmp_path, posts, has_states=True, template=strict).handle([submit(m.ChatPrompt(b"[]"))])
    ((_, enqueue),) = posts
    assert isinstance(enqueue, m.Enqueue) and enqueue.marks == ()


@pytest.mark.parametrize(
    ("prompt", "why", "is_counted"),
    [
        (m.TextPrompt("x" * 64), "the prompt has 64 tokens, and at least one is to be generated", True),
        (m.TextPrompt("x" * (2 << 20)), "the prompt has 2097152 bytes, more than the ", False),
        (m.ChatPrompt(b'[{"role": "user", "content": "%b"}]' % (b"x" * 64)), "the prompt has 83 tokens", True),
        (
            m.ChatPrompt(b'[{"role": "user", "content": "%b"}]' % (b"x" * (2 << 20))),
            "the chat has more than the ",
            False,
        ),
    ],
)
def test_every_prompt_that_is_too_long_gets_an_error_with_the_same_first_words(
    actor: TokenizerActor, posts: Posts, prompt: m.TextPrompt | m.ChatPrompt, why: str, is_counted: bool
) -> None:
    """Clients recognize the error by its first words."""
    actor.handle([submit(prompt)])
    ((_, failed),) = posts
    assert isinstance(failed, m.Failed) and failed.kind == "context_length_exceeded"
    assert failed.detail.startswith(f"This model's maximum context length is 64 tokens. However, {why}")
    assert failed.detail.endswith(". Shorten the prompt.") and (failed.num_tokens >= 64) == is_counted


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (submit(m.TextPrompt("")), "invalid_request", "empty"),
        (submit(m.TextPrompt("x" * 64)), "context_length_exceeded", "maximum context length is 64 tokens. However"),
        (submit(m.IdsPrompt(m.ids_to_bytes([5, 320]))), "invalid_request", "between 0 and 319"),
        (submit(m.IdsPrompt(m.ids_to_bytes([-1]))), "invalid_request", "prompt"),
        (submit(m.TextPrompt("x"), limits=m.Limits(4, (400,))), "invalid_request", "stop_token_ids"),
        (submit(m.TextPrompt("x"), sampling=m.Sampling(logit_bias={400: 1.0})), "invalid_request", "logit_bias"),
        (submit(m.TextPrompt("x"), sampling=m.Sampling(allowed_token_ids=(400,))), "invalid_request", "allowed_token"),
        (submit(m.TextPrompt("x"), limits=m.Limits(4, min_tokens=5)), "invalid_request", "min_tokens"),
        (submit(m.TextPrompt("x"), truncate=0), "invalid_request", "truncate_prompt_tokens"),
        (submit(m.ChatPrompt(b'[{"role": "user"}]', template="{% if %}")), "invalid_request", "chat_template"),
        (submit(m.ChatPrompt(b"{}")), "invalid_request", "messages"),
        (submit(m.ChatPrompt(b"[", b"")), "invalid_request", "messages"),
    ],
)
def test_a_refusal_is_sent_to_the_api_for_each_choice(
    actor: TokenizerActor, posts: Posts, bad: m.Submit, kind: str, words: str
) -> None:
    actor.handle([m.Submit(*cast(Any, [getattr(bad, f) if f != "n" else 2 for f in m.Submit.__struct_fields__]))])
    assert [receiver for receiver, _ in posts] == ["api", "api"]
    for i, (_, failed) in enumerate(posts):
        assert isinstance(failed, m.Failed) and failed.rid == 10 + i and failed.kind == kind and words in failed.detail


@pytest.mark.parametrize("text", [" ", "x", "🙂"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(actor: TokenizerActor, posts: Posts, text: str) -> None:
    """Encoding takes microseconds a byte, and all other requests wait meanwhile."""
    max_bytes = actor._tokenizer.most_bytes(64)
    whole = text * ((1 << 24) // len(text.encode()))
    chat = m.ChatPrompt(b'[{"role": "user", "content": "' + whole.encode() + b'"}]')
    prompts: tuple[m.TextPrompt | m.ChatPrompt, ...] = m.TextPrompt(whole), chat
    with cpu_deadline(2):  # encoding would take a minute
        actor.handle([*(submit(prompt) for prompt in prompts), *(m.Tokenize(1, prompt) for prompt in prompts)])
    for _, failed in posts:
        assert isinstance(failed, m.Failed) and failed.kind == "context_length_exceeded"
        assert "context" in failed.detail and str(max_bytes) in failed.detail
    posts.clear()
    actor.handle([m.Tokenize(1, m.TextPrompt("x" * max_bytes)), m.Tokenize(2, m.TextPrompt("x" * (max_bytes + 1)))])
    assert [type(message) for _, message in posts] == [m.Tokenized, m.Failed]


def test_the_limit_of_bytes_holds_for_vocabularies_with_long_tokens(
    actor: TokenizerActor, posts: Posts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_ALWAYS_ENCODED_BYTES", 100)
    monkeypatch.setattr(tokenizer, "_BYTES_A_TOKEN", 2)
    actor.handle([m.Tokenize(1, m.TextPrompt("x" * size)) for size in (2 * 64, 2 * 64 + 1)])
    assert [type(message) for _, message in posts] == [m.Tokenized, m.Failed]


def test_a_long_text_is_cut_before_it_is_encoded(actor: TokenizerActor, posts: Posts) -> None:
    whole = "x" * (1 << 24) + "0123456789"
    pooling = m.Pooling("last", truncate=10)
    with cpu_deadline(2):
        actor.handle([submit(m.TextPrompt(whole), truncate=10), m.Tokenize(1, m.TextPrompt("0123456789"))])
        actor.handle([submit(m.TextPrompt(whole[::-1]), limits=m.Limits(0), pooling=pooling)])
    (_, end), (_, expected), (_, start) = posts
    assert isinstance(end, m.Enqueue) and isinstance(start, m.Enqueue) and isinstance(expected, m.Tokenized)
    assert end.prompt_ids == expected.ids
    assert m.bytes_to_ids(start.prompt_ids).tolist() == m.bytes_to_ids(expected.ids).tolist()[::-1]


def test_a_prompt_of_the_whole_context_may_be_scored(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([submit(m.TextPrompt("x" * 64), limits=m.Limits(0))])
    assert posts[0][0] == "core"


@pytest.mark.parametrize(
    ("truncate", "limits", "left"),
    [
        (3, m.Limits(4), "789"),
        (200, m.Limits(4), "0123456789"),
        (-1, m.Limits(56), "23456789"),
        (-1, m.Limits(None), "0123456789"),
        (-1, m.Limits(1000), "9"),
    ],
)
def test_truncation_cuts_the_beginning_of_a_prompt(
    actor: TokenizerActor, posts: Posts, truncate: int, limits: m.Limits, left: str
) -> None:
    actor.handle(
        [submit(m.TextPrompt("0123456789"), limits=limits, truncate=truncate), m.Tokenize(1, m.TextPrompt(left))]
    )
    (_, enqueue), (_, expected) = posts
    assert isinstance(enqueue, m.Enqueue) and isinstance(expected, m.Tokenized) and enqueue.prompt_ids == expected.ids


def test_truncation_may_keep_the_beginning(actor: TokenizerActor, posts: Posts) -> None:
    wanted = submit(m.TextPrompt("0123456789"), truncate=4, keeps_start=True)
    actor.handle([wanted, m.Tokenize(1, m.TextPrompt("0123"))])
    (_, enqueue), (_, tokenized) = posts
    assert isinstance(enqueue, m.Enqueue) and isinstance(tokenized, m.Tokenized)
    assert enqueue.prompt_ids == tokenized.ids


def test_a_request_may_bring_its_own_chat_template(actor: TokenizerActor, posts: Posts) -> None:
    chat = m.ChatPrompt(b'[{"role": "user", "content": "hi"}]', template="{{ bos_token }}{{ messages[0].content }}!")
    actor.handle([m.Tokenize(1, chat, True), m.Tokenize(2, replace(chat, template=""), True)])
    (_, own), (_, models) = posts
    assert isinstance(own, m.Tokenized) and isinstance(models, m.Tokenized)
    assert "".join(own.pieces) == "<s>hi!" and "assistant" in "".join(models.pieces)


def test_more_biases_and_stop_tokens_than_a_row_has_room_for_are_refused(tmp_path: Path, posts: Posts) -> None:
    """Until `min_tokens` are generated, the stop tokens take entries of the row's biases."""
    facts = ModelFacts(path=str(vocabulary.add_tokenizer(tmp_path)), name="m", max_position=64, vocab_size=5000,
                       eos_token_ids=(2,), checkpoint_dtype="float32")  # fmt: skip
    actor = TokenizerActor(resolve(Config(), facts, MachineFacts(num_cores=1)))
    actor.start(lambda receiver, message: posts.append((receiver, message)))
    sampling = m.Sampling(logit_bias=dict.fromkeys(range(1000, 2000), 1.0))
    for num_ends, receiver in ((23, "core"), (24, "api")):
        limits = m.Limits(4, tuple(range(3, 3 + num_ends)), min_tokens=2)
        actor.handle([submit(m.TextPrompt("x"), sampling=sampling, limits=limits)])
        assert posts.pop()[0] == receiver


def test_ids_beyond_the_vocabulary_of_the_model_are_refused(tmp_path: Path, posts: Posts) -> None:
    """A tokenizer may have more tokens than its model, such as a padding token added later, which has no embedding."""
    size = load_tokenizer(vocabulary.add_tokenizer(tmp_path)).encode("z", False)[0]
    facts = ModelFacts(path=str(tmp_path), name="m", max_position=64, vocab_size=size, eos_token_ids=(2,),
                       checkpoint_dtype="float32")  # fmt: skip
    actor = TokenizerActor(resolve(Config(), facts, MachineFacts(num_cores=1)))
    actor.start(lambda receiver, message: posts.append((receiver, message)))
    chat = m.ChatPrompt(b'[{"role": "user", "content": "z"}]')
    actor.handle([submit(m.TextPrompt("az")), submit(chat), submit(m.TextPrompt("a"))])
    assert [receiver for receiver, _ in posts] == ["api", "api", "core"]
    assert isinstance(posts[0][1], m.Failed) and "prompt must hold token ids" in posts[0][1].detail


def test_describe_gives_the_special_tokens_and_the_chat_template(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([m.Describe(1)])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert posts == [("api", m.Described(1, tokens, vocabulary.CHAT_TEMPLATE, "PreTrainedTokenizerFast"))]


def test_tokenize_and_detokenize_are_answered_without_the_core(actor: TokenizerActor, posts: Posts) -> None:
    chat = m.ChatPrompt(b'[{"role": "user", "content": "hi"}]')
    actor.handle([m.Tokenize(1, m.TextPrompt("hi <s>", False), True), m.Tokenize(2, chat), submit(chat)])
    (_, text), (_, rendered), (_, enqueue) = posts
    assert isinstance(text, m.Tokenized) and isinstance(rendered, m.Tokenized) and isinstance(enqueue, m.Enqueue)
    assert "".join(text.pieces) == "hiĠ<s>" and len(text.pieces) == len(m.bytes_to_ids(text.ids))
    assert rendered.ids == enqueue.prompt_ids and rendered.pieces == ()
    posts.clear()
    actor.handle([m.Detokenize(3, text.ids), m.Detokenize(4, b"")])
    assert posts == [("api", m.Detokenized(3, "hi <s>")), ("api", m.Detokenized(4, ""))]
    actor.handle([m.Detokenize(5, text.ids, skip_special_tokens=True)])
    assert posts[-1] == ("api", m.Detokenized(5, "hi "))


def test_invalid_tokenize_and_detokenize_requests_are_refused(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([m.Tokenize(1, m.ChatPrompt(b"{}")), m.Detokenize(2, m.ids_to_bytes([320])), m.Detokenize(3, b"x")])
    kinds = [(message.rid, message.kind) for _, message in posts if isinstance(message, m.Failed)]
    assert kinds == [(1, "invalid_request"), (2, "invalid_request"), (3, "internal")]


def test_a_cancel_is_forwarded_after_its_request(actor: TokenizerActor, posts: Posts) -> None:
    actor.handle([submit(m.TextPrompt("x")), m.Cancel((10,))])
    assert [type(message) for _, message in posts] == [m.Enqueue, m.Cancel]


def test_the_earlier_turns_of_a_conversation_are_known(actor: TokenizerActor, posts: Posts) -> None:
    turn = {"role": "user", "content": "x" * 100}

    def known(num_turns: int, **more: Any) -> tuple[int, int]:
        posts.clear()
        prompt = m.ChatPrompt(json.dumps([turn] * num_turns).encode())
        actor.handle([submit(prompt, truncate=-1, **more), m.Tokenize(1, prompt)])
        (_, enqueue), (_, tokenized) = posts
        assert isinstance(enqueue, m.Enqueue) and isinstance(tokenized, m.Tokenized)
        assert tokenized.ids.endswith(enqueue.prompt_ids), "a question is encoded without the cache"
        return enqueue.times.num_chars, enqueue.times.num_known_chars

    (first, none), (second, some) = known(3, salt=b"a"), known(4, salt=b"a")
    assert none == 0 and 0.5 * first < some < second
    assert known(4, salt=b"b")[1] == known(4, salt=b"b", cache_salt="c")[1] == 0, "another owner's"
    assert known(5, salt=b"a")[1] > some
    prompt = m.ChatPrompt(json.dumps([turn] * 4).encode())
    actor.handle([submit(prompt, limits=m.Limits(0), pooling=m.Pooling("last", truncate=9))])
    enqueue = cast(m.Enqueue, posts[-1][1])
    assert (len(enqueue.prompt_ids), enqueue.times.num_chars) == (4 * 9, 0)


def test_bad_words_are_spelled_with_and_without_a_space(actor: TokenizerActor, posts: Posts) -> None:
    constraint = m.Constraint("regex", "a*")
    actor.handle([submit(m.TextPrompt("hi"), bad_words=("ab", " ab"), constraint=constraint)])
    actor.handle([submit(m.TextPrompt("hi"), bad_words=("x",)), submit(m.TextPrompt("hi"))])
    enqueued = [enqueue.constraint for _, enqueue in posts if isinstance(enqueue, m.Enqueue)]
    a, b, space, x = (encoded(actor, char) for char in "ab x")
    assert enqueued[0] == m.Constraint("regex", "a*", bad_words=(a + b, space + a + b))
    assert enqueued[1] == m.Constraint(bad_words=(x, space + x)) and enqueued[2] is None


def encoded(actor: TokenizerActor, char: str) -> bytes:
    return m.ids_to_bytes(actor._tokenizer.encode(char, add_special_tokens=False))

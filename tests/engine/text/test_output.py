"""One output: which ids belong to it, which text is held back, and its log-probabilities."""

from array import array

from pagewire.engine.text.output import LOWEST_LOGPROB, OutputText, Piece, render_logprobs

from .tokenizers_for_tests import make


def test_the_pieces_join_to_the_text_of_all_ids() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("Hello 🙂!")
    output = OutputText(tokenizer, ())
    text = "".join(output.push([id]).text for id in ids[:-1]) + output.push(ids[-1:], last=True).text
    assert text == "Hello 🙂!" and output.num_ids == len(ids)


def test_the_id_that_completes_a_stop_string_is_the_last() -> None:
    tokenizer = make("byte_level")
    ids = [id for char in "one.two" for id in tokenizer.encode(char)]
    output = OutputText(tokenizer, (), stop=("e.t",))
    assert output.push(ids) == Piece("on", 5, "e.t")
    assert output.num_ids == 5


def test_a_stop_string_may_span_two_pushes() -> None:
    tokenizer = make("byte_level")
    output = OutputText(tokenizer, (), stop=("ab",), include_stop=True)
    assert output.push(tokenizer.encode("xa")) == Piece("x", len(tokenizer.encode("xa")), None)
    assert output.push(tokenizer.encode("b")) == Piece("ab", 1, "ab")


def test_held_back_text_is_shown_with_the_last_ids() -> None:
    tokenizer = make("byte_level")
    output = OutputText(tokenizer, (), stop=("ab",))
    assert output.push(tokenizer.encode("xa"), last=True).text == "xa"
    output = OutputText(tokenizer, (), stop=("ab",))
    output.push(tokenizer.encode("xa"))
    assert output.push([], last=True) == Piece("a", 0, None)


def test_a_stop_string_is_found_in_the_flushed_text() -> None:
    tokenizer = make("byte_level")
    half = tokenizer.encode("🦊")[:-1]
    output = OutputText(tokenizer, (), stop=("\ufffd",))
    assert output.push(half, last=True) == Piece("", len(half), "\ufffd")


def test_without_detokenization_ids_are_only_counted() -> None:
    output = OutputText(make("byte_level"), (), detokenize=False)
    assert output.push([5, 6, 7], last=True) == Piece("", 3, None) and output.num_ids == 3


def test_logprobs_of_the_chosen_and_the_top_tokens() -> None:
    tokenizer = make("byte_level")
    a, b, half = tokenizer.encode("a")[0], tokenizer.encode("b")[0], tokenizer.encode("🦊")[0]
    ids, values = array("i", [a, a, b, half, b, half]), array("f", [-0.5, -0.5, -2.0, -1.0, -0.25, float("-inf")])
    first, second = render_logprobs(tokenizer, 3, ids.tobytes(), values.tobytes())
    assert first.chosen == (a, "a", b"a", -0.5)
    assert first.top == ((a, "a", b"a", -0.5), (b, "b", b"b", -2.0))
    assert second.chosen.token == "\ufffd" and second.chosen.bytes == "🦊".encode()[: len(second.chosen.bytes)]
    assert second.top[1].logprob == LOWEST_LOGPROB


def test_logprobs_of_the_chosen_only() -> None:
    tokenizer = make("byte_level")
    (position,) = render_logprobs(tokenizer, 1, array("i", [5]).tobytes(), array("f", [-0.5]).tobytes())
    assert position.top == ()

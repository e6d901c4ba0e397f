"""Prompts of one conversation have one key, in every process."""

from pagewire.api.engines.conversation import conversation_of, key_of_beginning
from pagewire.api.engines.prefixes import BLOCK_BYTES

LONG = b"x" * BLOCK_BYTES
SYSTEM = b'{"role":"system","content":"' + LONG + b'"}'
FIRST = b'{"role":"user","content":"one"}'


def test_later_turns_belong_to_the_conversation_of_the_first() -> None:
    first = conversation_of(b"", b"[" + SYSTEM + b"," + FIRST + b"]", b"")
    later = conversation_of(b"", b"[" + SYSTEM + b"," + FIRST + b',{"role":"assistant"},' + FIRST + b"]", b"")
    assert first is not None and later == first and first.root == 1
    other = conversation_of(b"", b"[" + SYSTEM + b',{"role":"user","content":"two"}]', b"")
    assert other is not None and other.key != first.key
    assert conversation_of(b"", b"[" + SYSTEM + b"," + FIRST + b"]", b"other tools") != first


def test_what_says_nothing_belongs_to_none() -> None:
    assert conversation_of(b"", b"[" + SYSTEM + b"]", b"") is None, "no message of the user"
    assert conversation_of(b"", b"[" + FIRST + b"]", b"") is None, "too short to tell conversations apart"
    assert conversation_of(b"", b"", b"") is None
    text = conversation_of(b"", b'"' + LONG + b'"', b"")
    assert text is not None and text.root == 1


def test_a_cache_key_names_it() -> None:
    named = conversation_of(b"", b"[" + FIRST + b"]", b"salt", "mine")
    assert named is not None and named.root == 0
    again = conversation_of(b"", b'[{"role":"user","content":"else"}]', b"salt", "mine")
    assert again is not None and again.key == named.key
    assert conversation_of(b"", b"[" + FIRST + b"]", b"pepper", "mine") != named


def test_the_key_of_a_beginning_is_that_of_its_blocks_and_the_same_in_every_process() -> None:
    one, other = 2 * LONG, LONG + b"?" * BLOCK_BYTES
    assert key_of_beginning(b"", one, 1) == key_of_beginning(b"", other, 1) == 1391802645058184599
    assert key_of_beginning(b"", one, 2) != key_of_beginning(b"", other, 2)
    assert key_of_beginning(b"salt", one, 1) != key_of_beginning(b"", one, 1)

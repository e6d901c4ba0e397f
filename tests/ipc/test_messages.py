"""Messages survive encoding and decoding, and values out of bounds are refused."""

import ast
import math
from array import array
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from pagewire.engine.kv_connector import chain, file_meta, host_meta, p2p_meta, v1_meta
from pagewire.ipc import control_messages, file_messages, reports
from pagewire.ipc import messages as m
from pagewire.ipc.codec import DecodeError, Decoder, encode

EXAMPLES: list[tuple[object, m.Message]] = [
    (m.ToTokenizer, m.Submit(1 << 40, 2, m.ChatPrompt(b"[]"), m.Sampling(seed=3), m.Limits(5), m.TextSpec(("x",)))),
    (m.ToTokenizer, m.Submit(1, 1, m.IdsPrompt(b"\1\0\0\0"), m.Sampling(), m.Limits(), m.TextSpec(), -3, b"salt")),
    (m.ToTokenizer, m.Tokenize(1, m.TextPrompt("x"), True)),
    (m.ToTokenizer, m.Detokenize(1, b"\1\0\0\0")),
    (m.ToApi, m.Tokenized(1, b"\1\0\0\0", ("x",))),
    (m.ToApi, m.Detokenized(1, "x")),
    (m.ToCore, m.Enqueue(1, b"\1\0\0\0", m.Sampling(logit_bias={5: -100.0}), m.Limits(None, (1, 2)), m.TextSpec())),
    (m.ToCore, m.StepResult(1, b"", {0: m.RowLogprobs(1, b"\1\0\0\0", b"\0\0\0\0")}, {}, 1.5)),
    (m.ToCore, m.Enqueue(1, b"", m.Sampling(), m.Limits(), m.TextSpec(), constraint=m.Constraint("regex", "a+"))),
    (m.ToCore, m.Constrained(1, "invalid_request", "why")),
    (m.ToCore, m.Masks(b"\0" * 8, b"\1\0\0\0", failed=((5, "internal", "why"),))),
    (m.ToGrammar, m.Constrain(1, 2, m.Constraint("choice", "[]", ("</think>",), bad_words=(b"\1\0\0\0",)), b"")),
    (m.ToGrammar, m.Sampled(b"\0" * 8, b"\1\0\0\0", b"")),
    (m.ToWorker, m.StepPlan(1, (m.RowOpen(0, b"", 1, 0, b"", m.Sampling()),), b"", b"", b"", b"", b"")),
    (m.ToDetokenizer, m.TokenBatch((m.Tokens(1, b"", finish="stop", usage=m.Usage(1, 2, 0)),))),
    (m.ToApi, m.TextBatch((m.Chunk(1, "é", b"", finish="length", prompt=m.PromptEcho(b"", "p")),))),
    (m.ToApi, m.Failed(1, "internal", "why")),
    (m.ToSupervisor, m.Ready("core", m.SCHEMA_VERSION, m.Facts({"load": 0.5}, ("note",)))),
]


@pytest.mark.parametrize(("mailbox", "message"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_round_trip(mailbox: object, message: m.Message) -> None:
    assert Decoder(mailbox).decode(encode(message)) == message


def test_ids_round_trip() -> None:
    assert list(m.bytes_to_ids(m.ids_to_bytes([0, 1, -1, 2**31 - 1]))) == [0, 1, -1, 2**31 - 1]
    with pytest.raises(ValueError, match="multiple"):
        m.bytes_to_ids(b"123")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"min_p": 2.0},
        {"repetition_penalty": math.inf},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logprobs": 21},
        {"seed": -1},
    ],
)
def test_sampling_out_of_bounds_does_not_decode(fields: dict[str, object]) -> None:
    columns = [fields.get(name, getattr(m.Sampling(), name)) for name in m.Sampling.__struct_fields__]
    with pytest.raises(DecodeError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(columns), type=m.Sampling)


def test_every_message_is_frozen_and_columnar() -> None:
    for name, kind in vars(m).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == m.__name__:
            config = kind.__struct_config__
            assert config.frozen and config.array_like, name


SCHEMA = (21, "009f38c24e1b95ee")
"""`SCHEMA_VERSION`, and `digest_of_messages` with it."""


def digest_of_messages() -> str:
    """Of all structs that processes of an engine exchange: their names, and each field's name, type and default."""
    digest = sha256()
    metadata = (chain, file_meta, host_meta, p2p_meta, v1_meta)  # between the halves of a KV connector
    for module in (m, reports, control_messages, file_messages, *metadata):
        assert module.__file__ is not None
        for node in ast.parse(Path(module.__file__).read_text()).body:
            if isinstance(node, ast.ClassDef):
                fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
                digest.update(repr((node.name, [ast.unparse(one) for one in node.keywords], fields)).encode())
    return digest.hexdigest()[:16]


def test_other_messages_have_another_version() -> None:
    """Two launches with one number drop each other's messages without a word if they are not the same."""
    assert (m.SCHEMA_VERSION, digest_of_messages()) == SCHEMA, (
        f"The messages are not those of SCHEMA_VERSION {SCHEMA[0]}. Raise it in ipc/messages.py, and write here "
        f'SCHEMA = (the new number, "{digest_of_messages()}"). After a merge of two branches that have both raised it, '
        "take one more than the larger number."
    )


def test_columns_give_each_request_its_tokens() -> None:
    rids, ids = array("q", [7, 9, 9, 9, 2**40, 8, 8]), array("i", [1, 2, 3, 4, 5, 6, 7])
    batch = m.TokenBatch((), rids.tobytes(), ids.tobytes())
    found = [(rid, list(m.bytes_to_ids(data))) for rid, data in batch.columns()]
    assert found == [(7, [1]), (9, [2, 3, 4]), (2**40, [5]), (8, [6, 7])]
    assert list(m.TokenBatch(()).columns()) == []


def test_logit_bias_has_at_most_the_entries_that_every_device_has_room_for() -> None:
    assert m.Sampling(logit_bias=dict.fromkeys(range(m.MAX_BIASES), 1.0)).logit_bias
    with pytest.raises(ValueError, match="at most 1024 tokens"):
        m.Sampling(logit_bias=dict.fromkeys(range(m.MAX_BIASES + 1), 1.0))

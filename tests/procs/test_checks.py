"""No index outside of the vocabulary passes any door of the engine, however it is wrapped."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pytest
import torch
import vocabulary
import zmq
from engine_clients import address_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.config.config import Config, EngineConfig, MachineFacts, ModelFacts
from pagewire.config.resolve import resolve
from pagewire.engine.steps.rows import Rows
from pagewire.engine.steps.sampler import Sampler
from pagewire.ipc import messages as m
from pagewire.ipc.client_messages import PROTOCOL, Ack, Generate, Hello, News, ToClient, ToPort
from pagewire.ipc.codec import Decoder, encode
from pagewire.kernels.ops import reference_ops
from pagewire.procs.client_port import CLIENT_RIDS, ClientPort
from pagewire.procs.tokenizer import TokenizerActor

T = TypeVar("T")

VOCAB = 320
EOS = 2
BOUNDED = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def mostly(good: st.SearchStrategy[T], bad: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """So seldom bad that what is wrong with a request is often one thing alone."""
    return st.integers(0, 9).flatmap(lambda i: good if i else bad)


good_ids = st.integers(0, VOCAB - 1)
ids = mostly(good_ids, st.sampled_from([-1, VOCAB, VOCAB + 5, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]))
ids32 = st.lists(ids.filter(lambda id: -(2**31) <= id < 2**31), min_size=1, max_size=4).map(m.ids_to_bytes)
columns = mostly(ids32, st.binary(max_size=9))  # not always whole ids
numbers = mostly(
    st.floats(0.01, 1), st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-300, 1e300])
)
sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": numbers,
        "top_p": numbers,
        "min_p": numbers,
        "repetition_penalty": numbers,
        "frequency_penalty": numbers,
        "top_k": mostly(st.integers(0, 400), st.sampled_from([-1, 2**31])),
        "logit_bias": st.dictionaries(ids, numbers, max_size=4),
        "logprobs": mostly(st.integers(0, 20), st.sampled_from([-1, 21])),
        "allowed_token_ids": st.lists(ids, max_size=4),
    },
)
limits = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": mostly(st.integers(10, 99), st.just(-1)),
        "min_tokens": mostly(st.integers(0, 9), st.just(-1)),
        "stop_token_ids": st.lists(ids, max_size=4),
    },
)
constraint = st.none() | st.fixed_dictionaries({"bad_words": st.lists(columns, max_size=3)})


def wire(kind: type[msgspec.Struct], fields: dict[str, object]) -> list[object]:
    """The struct as an array, without any of its checks."""
    defaults = msgspec.to_builtins(kind())
    return [fields.get(name, default) for name, default in zip(kind.__struct_fields__, defaults, strict=True)]


def indices(message: m.Enqueue) -> Iterator[int]:
    """Whatever of a request is used to index something."""
    for column in (
        message.prompt_ids,
        message.resume_ids,
        *(message.constraint.bad_words if message.constraint else ()),
    ):
        yield from m.bytes_to_ids(column)
    yield from message.sampling.logit_bias or ()
    yield from message.sampling.allowed_token_ids
    yield from message.limits.stop_token_ids


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = vocabulary.add_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    facts = ModelFacts(
        path=str(folder), name="m", max_position=64, vocab_size=VOCAB, eos_token_ids=(EOS,), checkpoint_dtype="float32"
    )
    return resolve(Config(), facts, MachineFacts(num_cores=1))


@pytest.fixture(scope="module")
def tokenizer(config: EngineConfig) -> Callable[[m.Submit], list[m.Message]]:
    """The door of HTTP and of the offline API."""
    posted: list[m.Message] = []
    actor = TokenizerActor(config)
    actor.start(lambda receiver, message: posted.append(message))

    def take(submit: m.Submit) -> list[m.Message]:
        posted.clear()
        actor.handle([submit])
        return posted

    return take


@given(prompt=ids32, sampling=sampling, limits=limits, constraint=constraint)
@BOUNDED
def test_of_the_tokenizer(
    tokenizer: Callable[[m.Submit], list[m.Message]],
    prompt: bytes,
    sampling: dict[str, object],
    limits: dict[str, object],
    constraint: dict[str, object] | None,
) -> None:
    fields = ["Submit", 1, 1, ["ids", prompt], wire(m.Sampling, sampling), wire(m.Limits, limits), []]
    rest: list[object] = [0, b"", "", None, None if constraint is None else wire(m.Constraint, constraint)]
    try:
        submit = Decoder[m.Submit](m.Submit).decode(msgspec.msgpack.encode([*fields, *rest]))
    except msgspec.ValidationError:
        return  # the mailbox drops it
    (told,) = tokenizer(submit)
    if isinstance(told, m.Enqueue):
        assert all(0 <= index < VOCAB for index in indices(told))
    else:
        assert isinstance(told, m.Failed) and told.kind == "invalid_request", told


class _Door:
    """A core's port, and a socket of a stranger's."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        self._port = ClientPort(config, address)
        self._port.open(64, lambda: None)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._hears = Decoder[ToClient](ToClient)
        self.say(encode(Hello(PROTOCOL)))
        while not self._socket.poll(1):
            self._port.drain()

    def say(self, data: bytes) -> None:
        self._socket.send(data)

    def take(self) -> m.Enqueue | None:
        """What becomes of the next message: a request, or None where the stranger is told that it is none."""
        for _ in range(500):
            for asked in self._port.drain():
                assert isinstance(asked, m.Enqueue) and asked.rid >= CLIENT_RIDS
                self._port.reply(m.Failed(asked.rid, "unavailable", ""))  # it ends here
                return asked
            while self._socket.poll(1):
                told = self._hears.decode(self._socket.recv())
                if isinstance(told, News):
                    self.say(encode(Ack(told.seq)))
                    if told.failed[-1].kind == "invalid_request":
                        return None
        raise AssertionError("neither a request nor an answer")

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._port.close("")


@pytest.fixture(scope="module")
def door(config: EngineConfig) -> Iterator[_Door]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        door = _Door(config, address_in(Path(folder)))
        yield door
        door.close()


@given(prompt=columns, resume=mostly(st.just(b""), columns), sampling=sampling, limits=limits, constraint=constraint)
@BOUNDED
def test_of_clients_that_speak_ids(
    door: _Door,
    prompt: bytes,
    resume: bytes,
    sampling: dict[str, object],
    limits: dict[str, object],
    constraint: dict[str, object] | None,
) -> None:
    fields = ["Generate", 1, 1, prompt, wire(m.Sampling, sampling), wire(m.Limits, limits), 0, b"", "", resume]
    door.say(msgspec.msgpack.encode([*fields, None if constraint is None else wire(m.Constraint, constraint)]))
    if (asked := door.take()) is not None:
        assert all(0 <= index < VOCAB for index in indices(asked))


@given(sampling=sampling, ends=st.lists(good_ids, max_size=3), seed=st.integers(0, 99))
@BOUNDED
def test_whatever_passes_draws_a_token(sampling: dict[str, object], ends: list[int], seed: int) -> None:
    """And nothing else: no index error, no -1, no NaN."""
    try:
        checked = msgspec.convert(wire(m.Sampling, sampling), m.Sampling)
    except msgspec.ValidationError:
        return
    allowed = tuple(id for id in checked.allowed_token_ids if 0 <= id < VOCAB)
    bias = {id: value for id, value in (checked.logit_bias or {}).items() if id < VOCAB}
    checked = msgspec.structs.replace(checked, allowed_token_ids=allowed, logit_bias=bias or None)
    rows = Rows(num_rows=1, max_len=64, block_size=16, vocab_size=VOCAB)
    rows.open(m.RowOpen(0, m.ids_to_bytes([5, 6]), 1, 2, b"", checked, 9 if ends else 0, m.ids_to_bytes(ends)))
    rows.mask(m.StepPlan(0, (), b"", b"", m.ids_to_bytes([0]), b"", b""))
    sampler = Sampler(vocab_size=VOCAB, device=torch.device("cpu"), ops=reference_ops())
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 10
    (drawn,) = sampler.sample(logits, rows, np.arange(1), np.array([2]))
    assert 0 <= drawn < VOCAB and (not allowed or drawn in allowed)


def test_the_bounds_of_requests_hold_in_every_decoder() -> None:
    """The second look, for whoever reaches a mailbox past the api."""
    ids = m.ids_to_bytes([1])
    requests: dict[str, Callable[..., object]] = {
        "Submit": lambda **f: m.Submit(1, f.pop("n", 1), m.IdsPrompt(ids), **f),
        "Enqueue": lambda **f: m.Enqueue(1, ids, n=f.pop("n", 1), **f),
        "Generate": lambda **f: Generate(
            1, f.pop("n", 1), ids, f["sampling"], f["limits"], constraint=f.get("constraint")
        ),
    }
    whole: dict[str, Any] = {"sampling": m.Sampling(), "limits": m.Limits(), "text": m.TextSpec()}
    too_much: list[dict[str, object]] = [
        {"n": 129},
        {"sampling": m.Sampling(logprobs=21)},
        {"sampling": m.Sampling(prompt_logprobs=21)},
        {"sampling": m.Sampling(allowed_token_ids=(1,) * 4097)},
        {"sampling": m.Sampling(repetition_penalty=0.0)},
        {"sampling": m.Sampling(seed=-1)},
        {"limits": m.Limits(stop_token_ids=(1,) * 1025)},
        {"limits": m.Limits(max_tokens=-1)},
        {"text": m.TextSpec(("x",) * 17)},
        {"text": m.TextSpec(("x" * 4097,))},
        {"text": m.TextSpec(("",))},
        {"constraint": m.Constraint("regex", "x" * (m.MAX_GRAMMAR_BYTES + 1))},
        {"constraint": m.Constraint(bad_words=(ids,) * 2049)},
        {"constraint": m.Constraint(thinking_budget=-1)},
    ]
    decoders = {
        "Submit": Decoder[object](m.ToTokenizer),
        "Enqueue": Decoder[object](m.ToCore),
        "Generate": Decoder[object](ToPort),
    }
    for kind, make in requests.items():
        assert decoders[kind].decode(encode(make(**whole)))  # type: ignore[arg-type]
        for fields in too_much:
            if kind == "Generate" and "text" in fields:
                continue
            with pytest.raises(msgspec.ValidationError):
                decoders[kind].decode(encode(make(**whole | fields)))  # type: ignore[arg-type]
    for bias in ({5: float("nan")}, {5: float("inf")}, {-1: 1.0}, dict.fromkeys(range(1025), 1.0)):
        with pytest.raises(ValueError, match="logit_bias"):
            m.Sampling(logit_bias=bias)
    for name in ("temperature", "top_p", "min_p", "presence_penalty"):
        with pytest.raises(ValueError, match="finite"):
            m.Sampling(**cast(dict[str, Any], {name: float("nan")}))

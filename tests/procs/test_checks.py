"""No entry point of the engine accepts a token id outside of the vocabulary, in whichever field it stands."""

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
    """Bad one time in ten, so that a bad request often has a single fault."""
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
    """Every token id of a request that is used as an index."""
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
    """The entry point of requests from HTTP and from the offline API."""
    posted: list[m.Message] = []
    actor = TokenizerActor(config)
    actor.start(lambda receiver, message: posted.append(message))

    def enter(submit: m.Submit) -> list[m.Message]:
        posted.clear()
        actor.handle([submit])
        return posted

    return enter


@given(prompt=ids32, sampling=sampling, limits=limits, constraint=constraint)
@BOUNDED
def test_the_tokenizer_passes_only_ids_of_the_vocabulary(
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
    (answer,) = tokenizer(submit)
    if isinstance(answer, m.Enqueue):
        assert all(0 <= index < VOCAB for index in indices(answer))
    else:
        assert isinstance(answer, m.Failed) and answer.kind == "invalid_request", answer


class _Connection:
    """The core's client port, and the socket of a client that sends arbitrary messages."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        self._port = ClientPort(config, address)
        self._port.open(64, lambda: None)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._decoder = Decoder[ToClient](ToClient)
        self.say(encode(Hello(PROTOCOL)))
        while not self._socket.poll(1):
            self._port.drain()

    def say(self, data: bytes) -> None:
        self._socket.send(data)

    def take(self) -> m.Enqueue | None:
        """The request that the next message becomes, or None if the client is told that it is invalid."""
        for _ in range(30_000):
            for request in self._port.drain():
                assert isinstance(request, m.Enqueue) and request.rid >= CLIENT_RIDS
                self._port.reply(m.Failed(request.rid, "unavailable", ""))  # the core's answer, which ends the request
                return request
            while self._socket.poll(1):
                message = self._decoder.decode(self._socket.recv())
                if isinstance(message, News):
                    self.say(encode(Ack(message.seq)))
                    if message.failed[-1].kind == "invalid_request":
                        return None
        raise AssertionError("neither a request nor an answer")

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._port.close("")


@pytest.fixture(scope="module")
def connection(config: EngineConfig) -> Iterator[_Connection]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        connection = _Connection(config, address_in(Path(folder)))
        yield connection
        connection.close()


@given(prompt=columns, resume=mostly(st.just(b""), columns), sampling=sampling, limits=limits, constraint=constraint)
@BOUNDED
def test_the_client_port_passes_only_ids_of_the_vocabulary(
    connection: _Connection,
    prompt: bytes,
    resume: bytes,
    sampling: dict[str, object],
    limits: dict[str, object],
    constraint: dict[str, object] | None,
) -> None:
    fields = ["Generate", 1, 1, prompt, wire(m.Sampling, sampling), wire(m.Limits, limits), 0, b"", "", resume]
    connection.say(msgspec.msgpack.encode([*fields, None if constraint is None else wire(m.Constraint, constraint)]))
    if (request := connection.take()) is not None:
        assert all(0 <= index < VOCAB for index in indices(request))


@given(sampling=sampling, ends=st.lists(good_ids, max_size=3), seed=st.integers(0, 99))
@BOUNDED
def test_every_accepted_sampling_samples_a_token_of_the_vocabulary(
    sampling: dict[str, object], ends: list[int], seed: int
) -> None:
    """Sampling raises no IndexError and never gives -1 or NaN."""
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
    (sampled,) = sampler.sample(logits, rows, np.arange(1), np.array([2]))
    assert 0 <= sampled < VOCAB and (not allowed or sampled in allowed)


def test_every_decoder_checks_the_bounds_of_requests() -> None:
    """A process that writes to a mailbox without the API's checks cannot exceed them either."""
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

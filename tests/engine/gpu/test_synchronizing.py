"""No launch waits for the device: a CPU stands for it, and each call is noted for which a host with a GPU would wait.

Tensors are told apart by their memory: that of the model, its cache and its packet is the device's, and so is what is
computed from it or made with an explicit device; that of `Queue.host_memory` is pinned; all other memory is pageable.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from defaults import COMPILED, machine
from runner_driver import engine_config
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pagewire.engine.device.queue import EagerMark, EagerQueue
from pagewire.engine.device.sleep import storages_of
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import (
    LateMasks,
    Pooling,
    RowOpen,
    Sampling,
    StepPlan,
    StepResult,
    bytes_to_ids,
    ids_to_bytes,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands for the device")

# What reads numbers of a device, or whose result has a size that only the device knows.
READS = {
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "nonzero",
    "is_nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "bincount", "argwhere",
    "repeat_interleave",
}  # fmt: skip
MADE_OF_HOST = {"tensor", "as_tensor", "asarray"}


class Watch(TorchFunctionMode):
    """Notes what waits while it is the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._device: dict[int, torch.UntypedStorage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._is_paused = False

    def add_device(self, *storages: torch.UntypedStorage) -> None:
        self._device |= {storage._cdata: storage for storage in storages}

    def add_pinned(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._device

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The queue's own copies, and kernels, which the interpreter runs by functions of torch."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        with self.paused():
            is_on_device = self._note(name, args, kwargs)
            result = func(*args, **kwargs)
            if is_on_device:
                self.add_device(*(tensor.untyped_storage() for tensor in _tensors(result)))
        return result

    def _note(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether the result is on the device."""
        given = list(_tensors((args, tuple(kwargs.values()))))
        if not any(map(self.is_device, given)):
            to_device = kwargs.get("device") is not None
            if name == "to":
                to_device |= any(isinstance(each, torch.device) for each in args)
            if to_device and (given or name in MADE_OF_HOST):
                self.calls.append(f"{name}: to the device")
            return to_device
        on_host = [tensor for tensor in given if not self.is_device(tensor) and tensor.dim()]
        if name in READS or (name == "to" and "cpu" in (*args, *kwargs.values())):
            self.calls.append(name)
            return False
        if on_host:
            self.calls.append(f"{name}: between device and host")
        elif name in ("__getitem__", "__setitem__") and _is_read(args[1]):
            self.calls.append(f"{name}: {type(args[1])}")
        return True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _is_read(index: Any) -> bool:
    """Whether torch copies the index, or reads how many are chosen."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list | np.ndarray) or (isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8))
        for part in parts
    )


class _Mark(EagerMark):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def wait(self) -> None:
        self._watch.calls.append("wait")


class WatchedQueue(EagerQueue):
    """Its copies wait for nothing, if the host's side of them is pinned."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(torch.device("cpu"))
        self._watch = watch

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        with self._watch.paused():
            memory = super().host_memory(size, dtype)
        self._watch.add_pinned(memory)
        return memory

    def send(self, source: Tensor, target: Tensor) -> None:
        self._check("send", source, target)
        with self._watch.paused():
            super().send(source, target)

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> _Mark:
        for source, target in pairs:
            self._check("fetch", target, source)
        with self._watch.paused():
            super().fetch(pairs)
        return self.mark()

    def mark(self) -> _Mark:
        return _Mark(self._watch)

    def _check(self, name: str, host: Tensor, device: Tensor) -> None:
        if not self._watch.is_pinned(host) or not self._watch.is_device(device):
            self._watch.calls.append(f"{name}: pageable memory")


class Watched:
    """A runner whose launches are watched. Rows are used for one request after another."""

    def __init__(self, folder: Path) -> None:
        self.watch = Watch()
        flags = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "pipeline_depth": 2, "speculative": "ngram,tokens=3"}
        with machine(COMPILED):
            config = engine_config(folder, dtype="float32", **flags)
        self.vocab_size = config.model.vocab_size
        self.runner = Runner.load(config, queue=WatchedQueue(self.watch))
        self.runner.open_cache(12)
        self.steps: Any = self.runner._steps
        cache: Any = self.runner._cache
        cache.storage.zero_()  # a row begins behind positions that no step has computed
        roots = (self.runner._model, self.steps._packet)
        storages = [each for root in roots for each in storages_of(root, torch.device("cpu"), cache.storage)]
        self.watch.add_device(cache.storage.untyped_storage(), *storages)
        self._step = 0
        self.found: list[str] = []  # calls that waited in launches

    def serve(
        self,
        sampling: Sampling,
        *,
        pooling: Pooling | None = None,
        copies: tuple[int, ...] = (),
        masks: bool = False,
        late: bool = False,
        drafts: int = 0,
        min_len: int = 0,
    ) -> list[StepResult]:
        """Two rows: a prompt of 20 tokens in two chunks, beside one that begins behind 5 positions in the cache, and
        then three tokens of each. Two plans are in flight."""
        rows, words = [0, 2], -(-self.vocab_size // 32)
        prompt = [7, 8, 9, 10] * 5
        opens = tuple(
            RowOpen(
                row=row,
                ids=ids_to_bytes(prompt),
                num_prompt=20,
                num_computed=5 if row else 0,
                block_ids=ids_to_bytes([3 + row, 4 + row, 7 + row]),
                sampling=sampling,
                pooling=pooling,
                min_len=min_len,
                ends=ids_to_bytes([5, 6]) if min_len else b"",
            )
            for row in rows
        )
        results = []
        for step in range(2 if pooling is not None else 5):
            samples = b"\0\0" if step == 0 or pooling is not None else b"\1\1"
            is_masked = masks and step > 0
            plan = StepPlan(
                step=self._step,
                open=opens if step == 0 else (),
                grow_rows=b"",
                grow_blocks=b"",
                rows=ids_to_bytes(rows),
                counts=ids_to_bytes([12, 9] if step == 0 else [8, 6] if step == 1 else [1, 1]),
                sample=samples,
                copies=ids_to_bytes(list(copies)) if step == 0 else b"",
                masked_rows=ids_to_bytes(rows) if is_masked else b"",
                late_rows=ids_to_bytes(rows) if late and step > 0 else b"",
                masks=b"\xff" * (8 * words) if is_masked else b"",
                num_speculative=2 if drafts and step > 1 else 0,
                speculate=drafts if step > 1 else 0,
                break_even=0.1,
            )
            self._step += 1
            if drafts:
                self.steps._rows.draft_level[:] = 0
            num_waits = len(self.watch.calls)
            with self.watch:
                self.runner.launch(plan)
                if plan.late_rows:
                    assert self.runner.needs_mail
                    bits = b"\x55" * (4 * words)
                    self.runner.tell(LateMasks(plan.step, plan.late_rows[:4], bits, plan.late_rows[4:]))
            self.found += self.watch.calls[num_waits:]
            if self.runner.num_pending == 2:
                results.append(self.runner.collect())
        while self.runner.num_pending:
            results.append(self.runner.collect())
        return results


GREEDY = Sampling(temperature=0)
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "filtered": {"sampling": Sampling(temperature=0.9, top_k=7, top_p=0.8, min_p=0.02, seed=3)},
    "prefix hit inside a block": {"sampling": GREEDY, "copies": (1, 5, 2, 9)},
    "penalties": {"sampling": Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5)},
    "bias": {"sampling": Sampling(temperature=0, logit_bias={11: 6.5, 12: -100.0})},
    "min_tokens": {"sampling": GREEDY, "min_len": 22},
    "log-probabilities": {"sampling": Sampling(temperature=0, logprobs=3)},
    "prompt log-probabilities": {"sampling": Sampling(temperature=0, prompt_logprobs=2)},
    "masks": {"sampling": GREEDY, "masks": True},
    "late masks": {"sampling": GREEDY, "late": True},
    "allowed tokens": {"sampling": Sampling(temperature=0, allowed_token_ids=(5, 9, 40))},
    "pooling": {"sampling": GREEDY, "pooling": Pooling("mean")},
    "states of all tokens": {"sampling": GREEDY, "pooling": Pooling("all")},
    "draft tokens": {"sampling": Sampling(temperature=0, logit_bias={7: 100.0, 8: 100.0}), "drafts": 3},
}


@pytest.fixture(scope="module")
def watched(checkpoint: Callable[..., Path]) -> Iterator[Watched]:
    from triton.runtime.interpreter import GridExecutor

    made = Watched(checkpoint("llama", num_hidden_layers=1))
    run: Any = GridExecutor.__call__

    def paused(self: Any, *args: Any, **kwargs: Any) -> None:
        with made.watch.paused():
            run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", paused)
        yield made


@pytest.fixture(autouse=True)
def _nothing_found(watched: Watched) -> None:
    watched.found = []


@pytest.mark.parametrize("feature", FEATURES)
def test_no_launch_waits_for_the_device(feature: str, watched: Watched) -> None:
    results = watched.serve(**FEATURES[feature])
    assert watched.found == []
    asked = FEATURES[feature]
    assert len(results) == (2 if "pooling" in asked else 5)
    if "pooling" in asked:
        assert set(results[-1].vectors) == {0, 1} and all(results[-1].vectors.values())
    else:
        assert min(bytes_to_ids(results[-1].ids)) >= 0
    if feature == "prompt log-probabilities":
        assert [set(result.prompt_logprobs) for result in results] == [{0, 1}, {0, 1}, set(), set(), set()]
    if feature == "draft tokens":
        assert sum(result.num_draft_tokens for result in results) > 0


def _history_of_pageable_memory(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    state = watched.steps._state
    host = torch.zeros(state._edits.prompt_bits.shape[1], dtype=torch.int32)
    patch.setattr(state, "edit", lambda edits, num: state._edits.prompt_bits[0].copy_(host))


def _bias_made_on_the_device(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    state = watched.steps._state
    patch.setattr(state, "edit", lambda edits, num: torch.tensor([1, 2], device=edits.device))


def _pairs_of_pageable_memory(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    cache = watched.steps._cache
    pairs = torch.tensor([1, 5])
    patch.setattr(watched.steps._state, "copy", lambda *args, **kwargs: cache.copy(pairs[:1], pairs[1:]))


def _a_length_read_from_the_device(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    steps = watched.steps
    draft = steps._draft
    patch.setattr(steps, "_draft", lambda *args: (int(steps._state.last_positions[0]), draft(*args))[1])


def _draft_tokens_that_wait_for_the_last_step(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    learn = watched.steps._learn
    patch.setattr(watched.steps, "_learn", lambda num_left: learn(0))


def _prompt_scores_that_are_read(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    score = watched.steps._score

    def read(*args: Any) -> tuple[Tensor, Tensor]:
        ids, values = score(*args)
        return torch.from_numpy(ids.cpu().numpy()), values

    patch.setattr(watched.steps, "_score", read)


def _masks_of_pageable_memory(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    queue, masks = watched.steps._queue, watched.steps._state.masks
    patch.setattr(
        watched.steps, "_send_masks", lambda slot: queue.send(torch.zeros(masks.shape[1], dtype=torch.int32), masks[0])
    )


def _late_masks_that_wait_for_the_pass(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    steps = watched.steps
    sample = steps.sample
    patch.setattr(steps, "sample", lambda masks: (steps._pending[-1].passed.wait(), sample(masks)))


MUTANTS: dict[Callable[[Watched, pytest.MonkeyPatch], None], str] = {
    _history_of_pageable_memory: "penalties",
    _bias_made_on_the_device: "bias",
    _pairs_of_pageable_memory: "prefix hit inside a block",
    _a_length_read_from_the_device: "greedy",
    _draft_tokens_that_wait_for_the_last_step: "draft tokens",
    _prompt_scores_that_are_read: "prompt log-probabilities",
    _masks_of_pageable_memory: "masks",
    _late_masks_that_wait_for_the_pass: "late masks",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_launch_that_waits_is_found(
    mutant: Callable[[Watched, pytest.MonkeyPatch], None], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(watched, monkeypatch)
    watched.serve(**FEATURES[MUTANTS[mutant]])
    assert watched.found


@pytest.mark.parametrize(
    "call",
    [
        lambda on_device, host: on_device.sum().item(),
        lambda on_device, host: bool(on_device[0] > 0),
        lambda on_device, host: on_device[on_device > 0],
        lambda on_device, host: on_device[[0, 1]],
        lambda on_device, host: on_device[host],
        lambda on_device, host: on_device.index_fill_(0, host, 0),
        lambda on_device, host: on_device[:3].copy_(host),
        lambda on_device, host: host.copy_(on_device[:3]),
        lambda on_device, host: on_device.to("cpu"),
        lambda on_device, host: host.to(on_device.device),
        lambda on_device, host: (on_device + 1).tolist(),
        lambda on_device, host: torch.arange(3, device=on_device.device).numpy(),
        lambda on_device, host: on_device.nonzero(),
    ],
)
def test_a_call_that_waits_is_noted(call: Callable[[Tensor, Tensor], object]) -> None:
    watch, on_device, host = Watch(), torch.arange(6), torch.arange(3)
    watch.add_device(on_device.untyped_storage())
    with watch:
        torch.add(on_device, 1, out=torch.empty_like(on_device))
        on_device[1:3] = 5
        on_device[torch.arange(2, device=on_device.device)].float()
        host[host > 1].tolist()
        assert not watch.calls
        call(on_device, host)
    assert len(watch.calls) == 1

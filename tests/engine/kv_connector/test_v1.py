"""Connectors written with vLLM's names: what their halves are shown and what comes of it."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from kv_instance import SHAPE, SIZE, Instance, sequence
from torch import Tensor

from pagewire.engine.attention.kv_cache import KvCache, KvShape, Tile
from pagewire.engine.kv_connector.v1 import (
    AttentionMetadata,
    ForwardContext,
    KVCacheBlocks,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    Request,
    SchedulerOutput,
)
from pagewire.engine.kv_connector.v1_meta import decode_metadata, encode_metadata
from pagewire.engine.kv_connector.v1_worker import layer_of


@dataclass
class Inner:
    slots: torch.Tensor
    names: list[bytes]


@dataclass
class Notes(KVConnectorMetadata):
    step: int
    inner: list[Inner] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)


@dataclass
class Opaque(KVConnectorMetadata):
    value: Any


def test_metadata_travel_with_their_tensors() -> None:
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        for shape in ((), (3,), (2, 0), (2, 3)):
            slots = torch.ones(shape, dtype=dtype)
            decoded = decode_metadata(encode_metadata(Notes(3, [Inner(slots, [b"x"])], {"1"})))
            assert isinstance(decoded, Notes) and (decoded.step, decoded.ids) == (3, {"1"})
            got = decoded.inner[0].slots
            assert got.dtype == dtype and got.shape == slots.shape and torch.equal(got, slots)


def test_only_metadata_are_decoded_and_only_data_is_sent() -> None:
    with pytest.raises(TypeError, match="Opaque cannot be sent to the worker: it has a object"):
        encode_metadata(Opaque(object()))
    with pytest.raises(TypeError, match="is not a subclass of KVConnectorMetadata"):
        decode_metadata(encode_metadata(Inner(torch.ones(1), [])))


@pytest.mark.parametrize("head_major", [False, True])
def test_a_layer_is_a_view_of_its_pages(head_major: bool) -> None:
    cache = KvCache(
        shape=SHAPE, num_pages=5, block_size=SIZE, device=torch.device("cpu"), head_major=head_major, num_spares=0
    )
    layer = layer_of(cache, 1)
    assert layer.shape == (5, 2, SIZE, 2, 4)
    blocks, offsets = torch.tensor([3, 1]), torch.tensor([0, 2])
    layer[blocks, :, offsets] = torch.arange(2 * 2 * 2 * 4, dtype=torch.bfloat16).view(2, 2, 2, 4)
    keys, values = cache.heads(1)
    assert keys[3, :, 0].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert values[1, :, 2].tolist() == [[20, 21, 22, 23], [28, 29, 30, 31]]
    for reshaped in (lambda: layer.reshape(5, -1), lambda: layer.flatten()):
        with pytest.raises(RuntimeError):
            reshaped()


def test_keys_and_values_of_different_sizes_are_refused() -> None:

    def cache(value_dim: int) -> KvCache:
        shape = KvShape(layers=(Tile(1, 8, value_dim),), dtype=torch.float32)
        return KvCache(shape=shape, num_pages=2, block_size=SIZE, device=torch.device("cpu"))

    with pytest.raises(ValueError, match="cannot be one tensor"):
        layer_of(cache(4), 0)
    assert layer_of(cache(0), 0).shape == (2, 1, SIZE, 8), "MLA has keys only"


class Recording(KVConnectorBase_V1):
    """Notes its calls and moves nothing."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    num: ClassVar[int] = 0  # tokens that it says it has
    blocks: ClassVar[list[int]] = []  # of the last load, none of which it fills

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.num, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        (blocks_of_request,) = blocks.get_block_ids()
        self.calls.append(("alloc", request.request_id, len(blocks_of_request), num_external_tokens))
        Recording.blocks = blocks_of_request[-(num_external_tokens // SIZE) :]

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, Recording.blocks = Recording.blocks, []
        return set(failed)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Notes:
        new = [
            (one.req_id, len(one.prompt_token_ids), len(one.block_ids[0]), one.num_computed_tokens)
            for one in scheduler_output.scheduled_new_reqs
        ]
        cached = scheduler_output.scheduled_cached_reqs
        old = list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled, finished = scheduler_output.num_scheduled_tokens, sorted(scheduler_output.finished_req_ids)
        self.calls.append(("step", new, old, scheduled, finished))
        return Notes(len(self.calls))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("finished", request.request_id, len(block_ids)))
        return False, {"dropped": 1}

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.calls.append(("output", connector_output.finished_recving, connector_output.invalid_block_ids))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert set(forward_context.attn_metadata) == set(forward_context.no_compile_layers)
        self.calls.append(("start",))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait", layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Notes)
        self.calls.append(("save", layer_name))

    def wait_for_save(self) -> None:
        self.calls.append(("wait for save",))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    monkeypatch.setattr(Recording, "calls", [])
    return Recording


def test_a_request_is_shown_as_steps(recording: type[Recording]) -> None:
    """A whole step of the worker's half is `start` to `wait for save`, with each layer in between."""
    calls = recording.calls
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    on_worker = [
        ("start",), *(("wait", name) for name in layers), *(("save", name) for name in layers), ("wait for save",)
    ]  # fmt: skip
    engine = Instance(f"{__name__}:Recording")
    first = engine.run(sequence(1, (1, 6 * SIZE + 1)))
    assert calls == [], "nothing is loaded, so there is nothing to do"
    engine.end(first)
    shown = ("step", [("1", 6 * SIZE + 1, 6, 0)], [], {"1": 6 * SIZE + 1}, [])
    assert calls == [shown, ("finished", "1", 6)]
    engine.step()
    assert calls[2:] == [("step", [], [], {}, ["1"]), *on_worker, *on_worker]
    calls.clear()
    recording.num = 100  # more than there is
    second = sequence(2, (1, 2 * SIZE), (2, 3 * SIZE))
    try:
        engine.run(second)
    finally:
        recording.num = 0
    assert calls[0] == ("alloc", "2", 4, 2 * SIZE), "the device had two blocks, and a position is left to compute"
    assert calls[1] == ("step", [("2", 5 * SIZE, 4, 4 * SIZE)], [], {"2": 0}, [])
    assert calls[2:] == [*on_worker, ("output", {"2"}, set(second.blocks[2:4]))]
    calls.clear()
    engine.end(second)
    assert calls == [("step", [], [("2", 2 * SIZE)], {"2": 3 * SIZE}, []), ("finished", "2", 5)]
    engine.close()


def test_a_prompt_that_was_not_computed_is_not_shown(recording: type[Recording]) -> None:
    engine = Instance(f"{__name__}:Recording")
    request = sequence(1, (1, 6 * SIZE + 1))
    request.num_computed, request.blocks = 3 * SIZE, [0, 1, 2]
    assert not engine.core.request_finished(request, request.blocks)
    assert recording.calls == [("finished", "1", 3)]
    engine.close()


def test_kv_in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`Instance` compares what is loaded with what belongs there."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "examples"))
    spec = f"v1_folder:FolderConnector,shared_storage_path={tmp_path}/kv"
    engine = Instance(spec)
    assert engine.serve(sequence(1, (1, 6 * SIZE + 1))) == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    engine.fill_device(2)
    assert engine.serve(sequence(3, (1, 6 * SIZE + 1))) == 6
    assert engine.serve(sequence(4, (1, 4 * SIZE + 1))) == 0, "the device has this prompt, which is stored now"
    assert engine.serve(sequence(5, (1, 4 * SIZE), (5, 1))) == 0
    engine.close()
    assert not list(tmp_path.rglob("*.part"))
    engine = Instance(spec)
    assert engine.serve(sequence(6, (1, 2 * SIZE + 1))) == 0
    assert engine.serve(sequence(7, (1, 6 * SIZE + 1))) == 4, "the device has two blocks, which stay as they are"
    engine.close()
    del sys.modules["v1_folder"]

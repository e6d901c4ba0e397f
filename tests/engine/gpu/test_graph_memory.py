"""What the engine accounts for a GPU's memory is what torch's allocator takes: the engine's own steps of models of real
size run on tensors without memory, and a model of the allocator takes and frees what they do."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import caching_allocator
import numpy as np
import pytest
import torch
import transformers
from allocations import Trace, TracingQueue, traced, without_kernels
from caching_allocator import CachingAllocator
from msgspec import structs
from runner_driver import engine_config

from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.device.sleep import storages_of
from pagewire.engine.gpu.device_steps import DeviceModel, DeviceSteps, _kinds, _planned
from pagewire.engine.gpu.rules import parts_of
from pagewire.engine.gpu.shapes import StepShape
from pagewire.engine.models.program import Program
from pagewire.engine.parallel.collectives import Alone, Group
from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.runner import loading
from pagewire.engine.runner.kernel_checks import Checked
from pagewire.engine.runner.served import how_served
from pagewire.engine.steps.logprobs import PromptScores
from pagewire.engine.weights.loader import Sink

META = torch.device("meta")
FEW_LAYERS = {"num_hidden_layers": 4}
_GRAPH_BYTES = 4 << 20  # bytes that each graph is assumed to take beside its tensors
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", FEW_LAYERS),  # Llama-2-7B
    "gemma": ("Gemma2Config", "Gemma2ForCausalLM", FEW_LAYERS),  # activations and sums with factors in torch
    "experts": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", FEW_LAYERS),
    "experts in torch": ("GptOssConfig", "GptOssForCausalLM", FEW_LAYERS),  # the choice and the activation
    "latents": ("DeepseekV2Config", "DeepseekV2ForCausalLM", FEW_LAYERS | {"moe_intermediate_size": 1408}),
    "hybrid": ("Qwen3NextConfig", "Qwen3NextForCausalLM", FEW_LAYERS | {"num_experts": 64}),
}

ALL = [each if each in ("llama", "hybrid") else pytest.param(each, marks=pytest.mark.long) for each in MODELS]


ALONE = Alone()


class Two(Alone):
    """One of two ranks, which exchanges nothing."""

    size = 2

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_empty((2, *x.shape)) if out is None else out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.numel() == 2 * out.numel() and x.is_contiguous() and out.is_contiguous()


@dataclass
class Loaded:
    model: DeviceModel
    steps: DeviceSteps
    queue: TracingQueue
    cache: KvCache
    weights: int


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """name, tokens of a step → the model on tensors without memory, and its steps."""

    def load(name: str, tokens: int, group: Group = ALONE, **flags: object) -> Loaded:
        config_class, architecture, changes = MODELS[name]
        described = getattr(transformers, config_class)(architectures=[architecture], **changes)
        described.save_pretrained(tmp_path)
        config = engine_config(
            tmp_path, load_format="dummy", dtype="bfloat16", max_model_len=2048, max_num_batched_tokens=tokens,
            **{"max_num_seqs": 256, **flags},
        )  # fmt: skip
        config = structs.replace(config, block_size=64, kv_cache_dtype="bfloat16", deterministic=False)
        served = how_served(config, read_spec(tmp_path), META, has_triton=True)
        assert served.executor == "Triton" and served.program is not None, served.why
        queue = TracingQueue(META)
        model = loading._on_device(
            config, Checked(served, config), queue, group, fill_of(served.program), None, RankInfo(), None
        )
        cache = KvCache(shape=model.kv_shape, num_pages=16, block_size=64, device=META, head_major=True)
        steps = model.steps(config, cache)
        return Loaded(model, steps, queue, cache, model.weights)

    with without_kernels(monkeypatch), torch.inference_mode():
        yield load


def fill_of(program: Program) -> Callable[[Sink], None]:
    def fill(sink: Sink) -> None:
        for target in program.targets:
            sink.end(target, sink.begin(target))

    return fill


def in_planned_order(found: Loaded) -> list[object]:
    return _planned(found.model.limits, is_deterministic=False, samples=True)


def as_load_grows(found: Loaded) -> list[object]:
    return sorted(in_planned_order(found), key=size_of)


def in_any_order(found: Loaded) -> list[object]:
    shapes = in_planned_order(found)
    random.Random(3).shuffle(shapes)
    return shapes


def size_of(shape: object) -> int:
    if isinstance(shape, StepShape):
        return shape.tokens
    assert isinstance(shape, tuple)
    return int(shape[1].samples)


def take(allocator: CachingAllocator, trace: Trace) -> None:
    blocks = {}
    for event in trace.events:
        if event.num_bytes:
            blocks[event.number] = allocator.malloc(event.num_bytes)
        else:
            allocator.free(blocks.pop(event.number))
    assert not blocks


def reserve(allocator: CachingAllocator, num_bytes: int) -> None:
    """Reserves memory in one piece, which `CudaQueue` does before the first eager step and in the first recording."""
    if num_bytes:
        allocator.free(allocator.malloc(num_bytes))


def kept_bytes(found: Loaded) -> int:
    """Bytes of the tensors that exist between steps, without weights and KV."""
    storages = storages_of([found.model, found.steps], META, found.cache.storage)
    return sum(storage.nbytes() for storage in storages) - found.weights


def unrecorded(found: Loaded, shapes: list[object]) -> list[Trace]:
    found.steps._send_empty()
    return [traced(shape, found.steps._work(shape), may_keep=True) for shape in shapes]


def recorded(found: Loaded, shapes: list[object]) -> list[Trace]:
    found.queue.traces.clear()
    for shape in shapes:
        found.steps._recordings.record(shape)
    return list(found.queue.traces)


@pytest.mark.parametrize("order", [in_planned_order, as_load_grows, in_any_order])
@pytest.mark.parametrize("name", ALL)
def test_what_is_accounted_is_what_is_taken(loaded, name, order):
    """`DeviceModel.workspace` and `graphs`, within 2 %, whichever shapes are recorded first."""
    found = loaded(name, 2048)
    check_accounted(found, order(found))


DOMAINS = {"kv_domains": 2, "tensor_parallel_size": 2}
DEALT = {**DOMAINS, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", DOMAINS),
        ("experts", DEALT),
        *(pytest.param(each, DOMAINS, marks=pytest.mark.long) for each in ("experts", "experts in torch")),
        *(pytest.param(each, DEALT, marks=pytest.mark.long) for each in ("experts in torch", "latents", "hybrid")),
    ],
)
def test_the_tokens_of_all_domains_are_accounted(loaded, name, flags):
    """No step that is recorded waits for the device: tensors without memory have no numbers to read."""
    found = loaded(name, 2048, group=Two(), **flags)
    check_accounted(found, in_planned_order(found))


def check_accounted(found: Loaded, shapes: list[object]) -> None:
    model = found.model
    assert found.steps.num_recorded == 0
    kinds = _kinds(model.limits, is_deterministic=False, samples=True)
    warm_up, captures = unrecorded(found, kinds), recorded(found, shapes)
    assert found.steps.num_recorded == len(captures) == len(shapes)

    allocator = CachingAllocator()
    reserve(allocator, found.queue.reserved)
    for trace in warm_up:
        take(allocator, trace)
    for number, trace in enumerate(captures):
        allocator.begin_capture("graphs")
        if number == 0:
            reserve(allocator, found.queue.reserved)
        take(allocator, trace)
        allocator.end_capture()
    taken = kept_bytes(found) + allocator.reserved_by(None) + allocator.reserved_by("graphs")
    accounted = model.workspace + model.graphs - _GRAPH_BYTES * len(shapes)
    parts = {
        "kept": (kept_bytes(found), model.decoder.nbytes + model.state.nbytes),
        "unrecorded": (allocator.reserved_by(None), max(trace.peak for trace in warm_up)),
        "graphs": (allocator.reserved_by("graphs"), found.queue.reserved, max(trace.peak for trace in captures)),
    }
    assert taken == pytest.approx(accounted, rel=0.02), f"accounted {accounted:,}, taken {parts}"
    peak = max(trace.peak for trace in captures)
    assert peak <= found.queue.reserved * 1.02 and found.queue.reserved <= max(2 * peak, 10 * MIB * (peak > 0)), parts


def test_a_step_of_llama_allocates_nothing(loaded):
    """All that its launches hand to each other is in the scratch."""
    found = loaded("llama", 8192)
    kinds = _kinds(found.model.limits, is_deterministic=False, samples=True)
    assert {trace.name: trace.peak for trace in unrecorded(found, kinds) if trace.peak} == {}
    assert found.queue.reserved == 0


def test_log_probabilities_of_a_prompt_take_the_scratch(loaded):
    """Only the results are allocated, which are small."""
    found = loaded("llama", 2048, max_num_seqs=8)
    num = 2000
    scores = PromptScores(0, 0, np.zeros(num, np.int32), 20)
    targets = torch.zeros(num, dtype=torch.int32, device=META)
    trace = traced("scores", lambda: found.steps._score(scores, targets), may_keep=True)
    assert 0 < trace.peak < MIB and found.model.limits.scored == 64


# The model of the allocator.


def test_the_constants_are_those_of_the_installed_torch():
    text = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text()
    constants = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    large_segment = re.search(r"large_segment_size_\{(\d+)\}", text)
    model = caching_allocator
    assert int(constants["kMinBlockSize"]) == model.MIN_BLOCK
    assert int(constants["kSmallSize"]) == model.SMALL_SIZE
    assert int(constants["kSmallBuffer"]) == model.SMALL_BUFFER
    assert int(constants["kMinLargeAlloc"]) == model.MIN_LARGE_ALLOC
    assert int(constants["kRoundLarge"]) == model.ROUND_LARGE
    assert large_segment is not None and int(large_segment[1]) == model.LARGE_BUFFER


MIB = 1 << 20


def test_segments_are_split_and_merged():
    allocator = CachingAllocator()
    first, second = allocator.malloc(5 * MIB), allocator.malloc(9 * MIB)
    assert allocator.reserved == 20 * MIB and (first.offset, second.offset) == (0, 5 * MIB)
    allocator.malloc(3 * MIB)
    assert allocator.reserved == 20 * MIB, "beside the others in a segment"
    allocator.free(first)
    third = allocator.malloc(4 * MIB + MIB // 2)
    assert (third.offset, third.size) == (0, 5 * MIB), "what remains is at most 1 MiB and is not split off"
    allocator.free(third)
    allocator.free(second)
    assert allocator.malloc(14 * MIB).offset == 0 and allocator.num_mallocs == 1, "both are one block again"
    assert allocator.malloc(1).size == 512 and allocator.reserved == 22 * MIB, "small tensors have segments of 2 MiB"


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    small, large = allocator.malloc(30 * MIB), allocator.malloc(60 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(20 * MIB).segment == 0
    assert allocator.malloc(40 * MIB).segment == 1


def test_a_graph_pool_keeps_its_segments_while_a_graph_lives():
    allocator = CachingAllocator()
    for num_bytes in (10 * MIB, 20 * MIB, 40 * MIB):  # as load grows
        allocator.begin_capture("pool")
        allocator.free(allocator.malloc(num_bytes))
        allocator.end_capture()
    allocator.empty_cache()
    assert allocator.reserved_by("pool") == 70 * MIB, "no segment fits the next larger step"
    for _ in range(3):
        allocator.release("pool")
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_free_memory_is_given_back_before_memory_runs_out_but_not_in_a_capture():
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    kept = allocator.malloc(50 * MIB)
    assert allocator.reserved == 50 * MIB
    allocator.free(kept)
    allocator.begin_capture("pool")
    with pytest.raises(caching_allocator.OutOfMemory):
        allocator.malloc(30 * MIB)


@pytest.mark.parametrize("name", MODELS)
def test_registers_that_are_in_use_together_have_places_of_their_own(loaded, name):
    walker = loaded(name, 512).model.decoder._walk
    program, kept = walker._program, walker.kept.register
    for parts, walk in ((parts_of(program), walker._many), (parts_of(program, fuses=walker._fuses), walker._few)):
        stored, _ = walker._memory_of(parts)
        uses = [{view.register for op in part.ops for view in (*op.ins, *op.outs)} & stored - {kept} for part in parts]
        for number in range(len(parts)):
            before, after = set().union(*uses[: number + 1]), set().union(*uses[number:])
            places = sorted((walk.places.offsets[each], program.widths[each]) for each in before & after)
            assert all(first + width <= second for (first, width), (second, _) in pairwise(places)), parts[number]
            assert all(first % 128 == 0 and first + width <= walk.places.size for first, width in places)

"""A GPU's weights in the memory of a keeper, which is a real process; the host's memory takes the place of a GPU's."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import families
import msgspec
import pytest
import torch
from defaults import COMPILED, machine
from expert_moves import move_experts
from family_kinds import EXPERTS, make_kind
from keepers import KeptDevice, RunningKeeper, running_keeper
from msgspec import structs
from quantized_checkpoints import quantize_checkpoint
from runner_driver import Driver, Request, engine_config
from torch import Tensor
from waiting import until

from pagewire.config.machine import cache_folder
from pagewire.engine.device import sleep
from pagewire.engine.device.allocations import AllocationError
from pagewire.engine.device.keeper import Keeper
from pagewire.engine.device.kept_memory import KeptMemory
from pagewire.engine.gpu.device_steps import DeviceModel
from pagewire.engine.parallel.collectives import Alone
from pagewire.engine.runner import kept_weights, loading
from pagewire.engine.runner import runner as runner_module
from pagewire.engine.runner.kernel_checks import machine_key
from pagewire.engine.runner.runner import Runner
from pagewire.engine.weights.segment import Index, SegmentWriter, is_open
from pagewire.procs.weight_memory import close_segments, new_segment

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not hasattr(os, "memfd_create"), reason="the host's memory takes the place of a GPU's"
)
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow
SIZES: dict[str, Any] = {"num_hidden_layers": 1}
NUM_BLOCKS = 32
PROMPTS = ([5, 6, 7, 8], [9] * 5)
_HEAD = 4096  # bytes of a segment before its index


class Place(NamedTuple):
    """What a supervisor holds for one rank."""

    keeper: RunningKeeper
    fd: int

    def segment(self) -> Index:
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        return msgspec.msgpack.decode(data[_HEAD:], type=Index)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    fd = new_segment()
    with running_keeper(tmp_path) as keeper:
        yield Place(keeper, fd)
    close_segments([fd])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KeptDevice:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    device = KeptDevice()
    monkeypatch.setattr(runner_module, "choose_device", lambda *_, **__: device)
    return device


def load(folder: Path, place: Place | None, *, half: bool = False, **flags: Any) -> Runner:
    """half: in float16, which `resolve` would refuse for a CPU."""
    with machine(COMPILED):
        config = engine_config(folder, **SMALL, **flags)
    if half:
        config = structs.replace(config, dtype="float16", kv_cache_dtype="float16")
    given = {} if place is None else {"weights_fd": place.fd, "keeper": place.keeper.address}
    return Runner.load(config, is_checked=False, **given)


def tokens_of(runner: Runner) -> list[list[int]]:
    """Greedy ones."""
    runner.open_cache(NUM_BLOCKS)
    requests = [Request(prompt, max_new=4) for prompt in PROMPTS]
    Driver(runner, NUM_BLOCKS).run(requests, budget=32, rows=4)
    return [request.output for request in requests]


def serve(folder: Path, place: Place | None, **flags: Any) -> tuple[Runner, list[list[int]]]:
    runner = load(folder, place, **flags)
    return runner, tokens_of(runner)


def weights_of(runner: Runner) -> list[Tensor]:
    """Copies of all that the walk over the program reads, as bytes, before its first step."""
    assert isinstance(runner._model, DeviceModel)
    walk = runner._model.decoder._walk
    users = [*walk._products.values(), *walk.experts.values()]
    held = [{name: value for name, value in vars(each).items() if name != "_workspace"} for each in users]
    found = sleep._tensors([walk.weights.vectors, walk.weights.matrices, walk._latents, held], set())
    return [tensor.contiguous().view(-1).view(torch.uint8).clone() for tensor in found]


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("qwen3", **SIZES), tmp_path / "model")


@pytest.mark.long
def test_a_worker_that_replaces_another_one_reads_no_tensor(folder: Path, place: Place, device: KeptDevice) -> None:
    alone, expected = serve(folder, None)
    first, tokens = serve(folder, place)
    assert tokens == expected and first.weights_fit and not is_open(place.fd)
    checkpoints.damage(folder)
    second, tokens = serve(folder, place)
    assert tokens == expected and second.weights_fit and second.memory == first.memory
    assert serve(folder, None)[1] != expected, "a runner that reads the checkpoint notices"
    suffixes = ("", "; a keeper process holds the weights for a worker that replaces this one")
    suffixes += ("; the weights are mapped from the keeper",)
    assert [each.notes[0] for each in (alone, first, second)] == [alone.notes[0] + suffix for suffix in suffixes]


KINDS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,  # tied embeddings, norms of heads
    "llama-biased": SIZES,  # gated products with a bias
    "qwen3_moe-sparse": {},
    "mixtral": {},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "DeepseekV3Config": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},  # latent attention, experts with a correction
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_the_walk_reads_is_kept(
    kind: str, place: Place, device: KeptDevice, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if kind.endswith("Config"):
        changes = next(changes for name, changes in EXPERTS if name == kind)
        folder = make_kind(tmp_path / "model", kind, changes | KINDS[kind])
    else:
        folder = shutil.copytree(checkpoint(kind, **KINDS[kind]), tmp_path / "model")
    alone = load(folder, None)
    storages = sleep.storages_of(alone._model, torch.device("cpu"), torch.empty(0))
    assert sum(storage.nbytes() for storage in storages) >= alone.memory.weights, "sleep finds all of it"
    expected, first = weights_of(alone), load(folder, place)
    assert are_equal(weights_of(first), expected) and first.weights_fit and not is_open(place.fd)
    held, kept = place.keeper.held(), place.segment().kept
    assert kept is not None and held == sum(kept.sizes) == first.memory.weights, "what is counted is what is held"
    assert alone.memory.weights <= held <= alone.memory.weights + 4096 + 1024 * len(expected)
    checkpoints.damage(folder)
    second = load(folder, place)
    assert second.weights_fit and second.memory == first.memory and place.keeper.held() == held
    assert are_equal(weights_of(second), expected)
    assert not are_equal(weights_of(load(folder, None)), expected), "a runner that reads the checkpoint notices"


class _FirstOfTwo(Alone):
    size = 2


def test_replicas_of_experts_do_not_spoil_what_is_kept(
    place: Place, device: KeptDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie behind the stacks, in the keeper's memory. Biases of experts move with them."""
    folder = families.make_family(tmp_path / "model", "gpt_oss")
    monkeypatch.setattr(runner_module, "join", lambda *_, **__: _FirstOfTwo())
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_replicas": 1}
    first = load(folder, place, **flags)
    expected = weights_of(first)
    assert move_experts(first, 0, ((0, 1, 3), (2, 3, 0)))
    assert not are_equal(weights_of(first), expected)
    checkpoints.damage(folder)
    second = load(folder, place, **flags)
    assert second.weights_fit and are_equal(weights_of(second), expected), "it begins with what is dealt"


FORMATS = ("awq", "gptq-v2-ordered", "int8", "mxfp4", "nvfp4", "fp8-channel", "fp8-block")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "awq" else pytest.mark.long) for kind in FORMATS]
)
def test_quantized_weights_are_kept(
    kind: str, place: Place, device: KeptDevice, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, _ = quantize_checkpoint(checkpoint("qwen3", **SIZES), tmp_path, kind)
    expected = weights_of(load(folder, None, half=True))
    first = load(folder, place, half=True)
    assert first.weights_fit and not is_open(place.fd) and "widened" not in first.notes[0]
    kinds = {parts.kind for stack in place.segment().matrices.values() for parts in stack}
    assert kinds - {"Tensor"}, "some are as they are stored"
    checkpoints.damage(folder)
    second = load(folder, place, half=True)
    assert second.weights_fit and second.memory == first.memory
    assert are_equal(weights_of(first), expected) and are_equal(weights_of(second), expected)


# ── the memory of a keeper ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def expected(folder: Path, device: KeptDevice) -> list[Tensor]:
    return weights_of(load(folder, None))


def opened(folder: Path, place: Place) -> Runner:
    runner = load(folder, place)
    runner.open_cache(NUM_BLOCKS)
    return runner


def test_weights_lie_in_several_allocations(
    folder: Path, place: Place, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_weights, "_ALLOCATION_BYTES", 1 << 14)
    first = load(folder, place)
    kept = place.segment().kept
    assert kept is not None and len(kept.sizes) > 3 and are_equal(weights_of(first), expected)
    assert place.keeper.held() == sum(kept.sizes) == first.memory.weights
    checkpoints.damage(folder)
    second = load(folder, place)
    assert second.weights_fit and are_equal(weights_of(second), expected)


def test_the_kv_cache_has_the_same_size_after_a_replacement(folder: Path, place: Place, device: KeptDevice) -> None:
    """A device counts what was free when the worker began, so it is told what the keeper held then."""
    load(folder, place).offer()
    load(folder, place).offer()
    assert device.found == [0, place.keeper.held()]


def test_an_engine_that_sleeps_frees_the_memory(folder: Path, place: Place, expected: list[Tensor]) -> None:
    first = opened(folder, place)
    held, index = place.keeper.held(), place.segment()
    assert first.sleep() >= held > 0 and place.keeper.held() == 0
    assert first.wake() and place.keeper.held() == held and place.segment() == index
    assert are_equal(weights_of(first), expected)
    checkpoints.damage(folder)
    second = load(folder, place)
    assert second.weights_fit and are_equal(weights_of(second), expected), "it maps what the first one has moved back"


def test_an_engine_wakes_when_there_is_memory(
    folder: Path, place: Place, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_weights, "_ALLOCATION_BYTES", 1 << 14)
    runner = opened(folder, place)
    runner.sleep()
    with monkeypatch.context() as patch:
        allocated = refuses_after(patch, 2)
        patch.setattr(kept_weights, "memory_of", no_memory)
        assert not runner.wake()
        assert len(allocated) == 2
    assert runner.wake() and are_equal(weights_of(runner), expected)
    assert not load(folder, place).weights_fit, "what was moved back in two parts is not kept"


def refuses_after(patch: pytest.MonkeyPatch, num: int) -> list[int]:
    """The keeper has memory for so many allocations."""
    allocate, made = Keeper.allocate, []

    def counted(self: Keeper, kind: str, num_bytes: int) -> Any:
        if len(made) == num:
            raise AllocationError("out of memory")
        made.append(num_bytes)
        return allocate(self, kind, num_bytes)

    patch.setattr(Keeper, "allocate", counted)
    return made


def no_memory(*_: object) -> Any:
    raise AllocationError("out of memory")


# ── what does not work leaves the weights in the worker ──────────────────────────────────────────────────────────────


def stays(caplog: pytest.LogCaptureFixture, why: str) -> bool:
    """One line says that the weights stay in the worker."""
    said = [record.getMessage() for record in caplog.records if "weights" in record.getMessage()]
    return len(said) == 1 and said[0].startswith("the weights stay in the worker") and why in said[0]


def test_a_keeper_that_was_killed(
    folder: Path, place: Place, expected: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(folder, place)
    place.keeper.kill()
    assert are_equal(weights_of(first), expected), "its worker has the memory mapped"
    first.sleep()
    assert first.wake() and are_equal(weights_of(first), expected), "it allocates the memory itself"
    second = load(folder, place)
    assert are_equal(weights_of(second), expected) and stays(caplog, "the keeper does not answer")
    assert second.memory.weights < first.memory.weights


def test_a_device_without_such_memory(
    folder: Path, place: Place, device: KeptDevice, expected: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    assert device.kept_memory is not None
    device.kept_memory.kind = "cuda:0"  # this machine has no driver
    runner = load(folder, place)
    assert are_equal(weights_of(runner), expected) and stays(caplog, "there is no libcuda.so.1")
    assert runner.weights_fit and is_open(place.fd)


def test_a_mapping_that_shows_other_memory(
    folder: Path,
    place: Place,
    device: KeptDevice,
    expected: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def elsewhere(self: KeptMemory, fd: int, num_bytes: int) -> Any:
        return Elsewhere(num_bytes)

    class Elsewhere:
        def __init__(self, num_bytes: int) -> None:
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

        def close(self) -> None:
            pass

    monkeypatch.setattr(KeptMemory, "map", elsewhere)
    assert are_equal(weights_of(load(folder, place)), expected) and stays(caplog, "hold different bytes")


def test_memory_that_runs_out_while_it_is_filled(
    folder: Path,
    place: Place,
    expected: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kept_weights, "_ALLOCATION_BYTES", 1 << 14)
    with monkeypatch.context() as patch:
        refuses_after(patch, 4)
        assert are_equal(weights_of(load(folder, place)), expected) and stays(caplog, "out of memory")
    assert is_open(place.fd)
    until(lambda: place.keeper.held() == 0, "nothing is kept")
    assert load(folder, place).weights_fit and not is_open(place.fd), "the next worker fills it"


_FILLER = """
import sys
from pagewire.engine.device.keeper import Keeper
keeper = Keeper(sys.argv[1])
keeper.allocate("host", 1 << 20)
keeper.allocate("host", 1 << 20)
print("filling", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_dies_while_it_fills(folder: Path, place: Place, expected: list[Tensor]) -> None:
    command = [sys.executable, "-c", _FILLER, place.keeper.address]
    filler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert filler.stdout is not None and filler.stdout.readline() == b"filling\n"
    assert place.keeper.held() == 2 << 20
    filler.kill()
    filler.communicate()
    until(lambda: place.keeper.held() == 0, "what nobody sealed is freed")
    runner = load(folder, place)
    assert are_equal(weights_of(runner), expected) and runner.weights_fit and not is_open(place.fd)


def test_other_options_and_another_checkpoint_do_not_fit(
    folder: Path, place: Place, expected: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, place)
    held = place.keeper.held()
    checkpoints.damage(folder)
    os.utime(folder / "model.safetensors")
    runner = load(folder, place)
    assert not runner.weights_fit and are_equal(weights_of(runner), weights_of(load(folder, None)))
    assert not are_equal(weights_of(runner), expected)
    assert place.keeper.held() == 0 < held, "the memory is free before the checkpoint is read"
    assert "of another checkpoint or other options" in caplog.text


def test_another_type_does_not_fit(folder: Path, place: Place, device: KeptDevice) -> None:
    load(folder, place)
    assert not load(folder, place, dtype="bfloat16").weights_fit


def damaged_index(place: Place) -> None:
    """In another sealed segment, which takes the place of the first."""
    size = os.fstat(place.fd).st_size
    data = bytearray(os.pread(place.fd, size, 0))
    data[-3] ^= 1
    replace_segment(place, bytes(data))


def replace_segment(place: Place, data: bytes) -> None:
    copy = new_segment()
    os.pwrite(copy, data, 0)
    fcntl.fcntl(copy, 1033, 0x2 | 0x4 | 0x8)
    os.dup2(copy, place.fd, inheritable=False)
    os.close(copy)


def damaged_weights(place: Place) -> None:
    kept = place.segment().kept
    assert kept is not None
    with Keeper(place.keeper.address) as keeper:
        fd, _ = keeper.open(kept.token, 0)
    os.pwrite(fd, b"\1", 4097)
    os.close(fd)


def index_of_other_weights(place: Place) -> None:
    rewrite_kept(place, lambda kept: structs.replace(kept, token=b"another"))


def index_of_other_sizes(place: Place) -> None:
    rewrite_kept(place, lambda kept: structs.replace(kept, sizes=tuple(size + 4096 for size in kept.sizes)))


def rewrite_kept(place: Place, change: Callable[[Any], Any]) -> None:
    """With the right key and digest."""
    index = place.segment()
    key = os.pread(place.fd, 40, 0)[8:]
    copy = new_segment()
    SegmentWriter(copy).finish(key, structs.replace(index, kept=change(index.kept)))
    os.dup2(copy, place.fd, inheritable=False)
    os.close(copy)


@pytest.mark.parametrize("plant", [damaged_index, damaged_weights, index_of_other_weights, index_of_other_sizes])
def test_damage_is_noticed(
    plant: Callable[[Place], None],
    folder: Path,
    place: Place,
    expected: list[Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(folder, place)
    plant(place)
    runner = load(folder, place)
    assert are_equal(weights_of(runner), expected) and not runner.weights_fit and place.keeper.held() == 0
    assert "the weights that the keeper holds cannot be used" in caplog.text


def test_a_process_that_died_in_the_first_use_of_the_memory(
    folder: Path, place: Place, expected: list[Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of them: the next start does without."""
    code = (
        "import os, sys; from pathlib import Path; from pagewire.engine.steps.trial_journal import TrialJournal; "
        "TrialJournal(Path(sys.argv[1]), sys.argv[2] + '-keeper').begin('weight keeper'); os._exit(139)"
    )
    key = machine_key(torch.device("cpu"), 0)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(cache_folder()), key], check=False)
    assert are_equal(weights_of(load(folder, place)), expected) and stays(caplog, "processes ended when they tried it")


def test_what_a_worker_cannot_use_is_freed_first(
    folder: Path, place: Place, device: KeptDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the device would hold the weights twice."""
    load(folder, place)
    assert place.keeper.held() > 0
    held: list[int] = []
    filled = loading._fill

    def fill(*args: Any) -> None:
        held.append(place.keeper.held())
        filled(*args)

    monkeypatch.setattr(loading, "_fill", fill)
    monkeypatch.setattr(kept_weights, "try_memory", no_memory)
    load(folder, place)
    assert held == [0] and stays(caplog, "out of memory")


def test_a_mapping_that_breaks_the_device_is_remembered(
    folder: Path, place: Place, device: KeptDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kept_weights, "try_memory", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load(folder, place)
    (file,) = cache_folder().glob("trial-*-keeper-*")
    assert file.read_text().rstrip().endswith("!"), "one such process is enough"

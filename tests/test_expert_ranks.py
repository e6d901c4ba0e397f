"""Ranks with whole experts (`--enable-expert-parallel`) give the tokens of one rank: every kind of routing, files with
an expert a tensor or all in one, and every format of quantized experts."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import families
import gguf_files
import numpy as np
import pytest
import quantized_checkpoints
import torch
from expert_moves import move_experts
from runner_driver import GREEDY, Request, engine_config
from thread_ranks import tokens_of
from waiting import until

from pagewire.engine.runner import loading
from pagewire.engine.runner.forecast import forecast
from pagewire.engine.runner.runner import Runner
from pagewire.engine.weights.loader import load_targets
from pagewire.errors import CheckpointError, ConfigError
from pagewire.ipc.messages import ExpertsRead, PlaceExperts, ReadExperts, Sampling

pytestmark = pytest.mark.slow

SEEDED = Sampling(temperature=1.0, seed=5)
# Of three ranks, which have 3, 3 and 2 of eight experts.
THREE: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3}
DEALT: dict[str, Any] = {"enable_expert_parallel": True}


def requests() -> list[Request]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in (1, 7, 40, 18)]
    return [Request(prompt, sampling, max_new=10) for prompt in prompts for sampling in (GREEDY, SEEDED)]


def check(folder: Path, size: int, **flags: Any) -> None:
    flags = {"dtype": "float32", **flags}
    expected = tokens_of(folder, requests, **flags)
    assert tokens_of(folder, requests, size=size, **flags, **DEALT) == expected


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.long)])
def test_uneven_parts_of_separate_experts(kernels: str, tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint(tmp_path, "qwen3_moe", **THREE)
    flags: dict[str, Any] = {"dtype": "float32", "cpu_kernels": kernels}
    expected = tokens_of(folder, requests, **flags)
    loads: list[dict[int, bytes]] = []
    weights: list[int] = []

    def take_load(runner: Runner) -> None:
        weights.append(runner.memory.weights)
        loads.append(runner.take_expert_load())
        assert not any(any(load) for load in runner.take_expert_load().values()), "it was taken"

    assert tokens_of(folder, requests, size=3, at_end=take_load, **flags, **DEALT) == expected
    planned = forecast(engine_config(folder, tensor_parallel_size=3, **flags, **DEALT)).memory.weights
    assert planned == pytest.approx(max(weights), rel=0.02), "the plan is that of the ranks with most experts"
    assert min(weights) < 0.9 * planned
    tokens = sum(len(request.prompt) + request.max_new - 1 for request in requests())
    for layer in (0, 2):
        load = np.array([np.frombuffer(each[layer], np.int64) for each in loads])
        assert load.sum() == 3 * tokens, "each token has three experts"
        assert sorted(tuple(np.flatnonzero(own)) for own in load) == [(0, 1, 2), (3, 4, 5), (6, 7)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",  # all experts in one tensor, with biases
        pytest.param("deepseek_v3", marks=pytest.mark.long),  # groups, a correction, shared experts, latent attention
        pytest.param("llama4_text", marks=pytest.mark.long),  # weights of the input
        pytest.param("longcat_flash", marks=pytest.mark.long),  # experts that return their input
        pytest.param("phimoe", marks=pytest.mark.long),
        pytest.param("granitemoeshared", marks=pytest.mark.long),
        pytest.param("jamba", marks=pytest.mark.long),
    ],
)
def test_two_ranks_of_a_family(family: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "torch" and family == "gpt_oss":
        pytest.skip("the other files' tests have torch's kernels")
    folder = families.make_family(tmp_path, family)
    check(folder, 2, cpu_kernels=kernels)


@pytest.mark.parametrize(
    "kind",
    [
        "awq",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("fp8-block", "gptq", "packed-zeros", "mxfp4")),
    ],
)
def test_quantized_experts_whose_columns_no_rank_can_divide(kind: str, tmp_path: Path) -> None:
    """Groups of the downs' columns are as wide as an expert."""
    sizes: dict[str, Any] = {"moe_intermediate_size": quantized_checkpoints.GROUP, "mlp_only_layers": []}
    source = checkpoints.make_checkpoint(tmp_path / "float", "qwen3_moe", hidden_size=128, head_dim=32, **sizes)
    folder, _ = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    with pytest.raises(ConfigError, match=r"mlp\.experts\.0\..* choose another --tensor-parallel-size"):
        tokens_of(folder, requests, size=2, dtype="float32")
    check(folder, 2)


@pytest.mark.long
def test_superblocks_of_a_gguf_file_stay_whole(tmp_path: Path) -> None:
    """Two ranks would divide the downs' columns within one, and round activations otherwise."""
    sizes: dict[str, Any] = {
        **gguf_files.QUANTIZED_SIZES,
        "moe_intermediate_size": 256,
        "num_experts": 5,
        "num_attention_heads": 8,
    }
    sizes["mlp_only_layers"] = []
    folder = checkpoints.make_checkpoint(tmp_path / "folder", "qwen3_moe", **sizes)
    file = gguf_files.write_gguf(folder, tmp_path / "m.gguf", "Q4_K", types={"down_proj.weight": "Q6_K"})
    check(file, 2)


@pytest.mark.parametrize(
    ("kind", "size", "why"),
    [
        ("qwen3", 2, "--enable-expert-parallel is for models with experts, and this one has none"),
        ("qwen3_moe", 1, "--enable-expert-parallel deals experts to the ranks of --tensor-parallel-size"),
        ("jamba", 8, "8 ranks cannot share the 4 experts of a layer"),
    ],
)
def test_what_is_refused(kind: str, size: int, why: str, tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint(tmp_path, kind, num_attention_heads=8, num_key_value_heads=8)
    with pytest.raises(ConfigError, match=why):
        tokens_of(folder, requests, size=size, **DEALT)


# Of three steps of a run of two ranks with four experts: what they have from then on.
MOVES = {
    2: ((0, 1, 3), (2, 3, 0)),
    4: ((0, 1, 2), (2, 3, 0)),  # a slot gets another expert
    6: ((0, 1, -1), (2, 3, 1)),
}


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gpt_oss", "auto"),  # with biases
        *(pytest.param(family, "torch", marks=pytest.mark.long) for family in ("gpt_oss", "longcat_flash")),
        pytest.param("longcat_flash", "auto", marks=pytest.mark.long),  # experts that return their input
    ],
)
def test_replicas_that_move_under_running_requests_change_no_token(family: str, kernels: str, tmp_path: Path) -> None:
    folder = families.make_family(tmp_path, family)
    flags: dict[str, Any] = {"dtype": "float32", "cpu_kernels": kernels}
    expected = tokens_of(folder, requests, **flags)
    computed: list[int] = []

    def move(runner: Runner, step: int) -> None:
        if step in MOVES:
            for layer in runner.take_expert_load():
                assert move_experts(runner, layer, MOVES[step])

    def count(runner: Runner) -> None:
        (load, *_) = runner.take_expert_load().values()
        computed.append(int(np.frombuffer(load, np.int64)[1]))

    found = tokens_of(folder, requests, size=2, between=move, at_end=count, expert_replicas=1, **flags, **DEALT)
    assert found == expected
    assert all(computed), "both ranks have computed expert 1 since the last move"


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Replicas are read once the event is set."""
    may_read = threading.Event()

    def wait_and_load(*args: Any, **more: Any) -> None:
        assert threading.current_thread().name.startswith("experts"), "a step waits for it"
        assert torch.get_num_threads() == 1, "it takes turns with steps"
        own, of_steps = (os.getpriority(os.PRIO_PROCESS, id) for id in (threading.get_native_id(), os.getpid()))
        assert own >= min(19, of_steps + 10), "it takes their processor"
        assert may_read.wait(100)
        load_targets(*args, **more)

    monkeypatch.setattr(loading, "load_targets", wait_and_load)
    return may_read


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_steps_go_on_while_replicas_are_read(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those between are computed by the experts that were there. Ranks switch only if all of them have read the same,
    whatever was read before."""
    folder = families.make_family(tmp_path, "gpt_oss")
    flags: dict[str, Any] = {"dtype": "float32", "cpu_kernels": kernels}
    expected = tokens_of(folder, requests, **flags)
    may_read = hold_reads(monkeypatch)
    others, slots = ((0, 1, 2), (2, 3, 1)), ((0, 1, 3), (2, 3, 0))
    seen: list[tuple[int, ExpertsRead | None]] = []
    counts: list[int] = []

    def replicas(runner: Runner) -> int:
        """Tokens that those of this rank have had since the last call."""
        load = np.frombuffer(runner.take_expert_load()[0], np.int64)
        return int(load[2:].sum() if runner._rank == 0 else load[:2].sum())

    def move(runner: Runner, step: int) -> None:
        match step:
            case 1:
                torch.set_num_threads(2)
                runner.read_experts(ReadExperts(1, 0, others))
                assert torch.get_num_threads() == 2, "steps have as many as before"
                with ThreadPoolExecutor(1) as thread:
                    assert thread.submit(torch.get_num_threads).result() == 2
            case 2:
                runner.read_experts(ReadExperts(2, 0, slots))
            case 4:
                seen.append((runner.num_pending, runner.experts_read))
                assert not runner.place_experts(PlaceExperts(0, slots)), "nobody has read it"
                runner.read_experts(ReadExperts(3, 0, slots))
            case 6:  # both ranks have asserted that it goes on
                torch.set_num_threads(1)
                may_read.set()
                found = until(lambda: runner.experts_read, "it is read", timeout_s=100)
                seen.append((runner.num_pending, found))
                assert not runner.place_experts(PlaceExperts(0, slots if runner._rank else others))
                assert runner.experts_read is None and not replicas(runner)
                assert move_experts(runner, 0, slots) and runner.experts_read is None

    def count(runner: Runner) -> None:
        counts.append(replicas(runner))

    found = tokens_of(folder, requests, size=2, between=move, at_end=count, expert_replicas=1, **flags, **DEALT)
    assert found == expected and all(counts), "both replicas have had tokens since the switch"
    assert sorted(seen, key=str) == sorted([(1, None), (1, ExpertsRead(3))] * 2, key=str), "steps are in flight"
    assert "layer 0 keeps its experts: a rank has not read its replicas" in caplog.text


def test_experts_that_were_read_are_forgotten_with_the_core_and_in_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = families.make_family(tmp_path, "gpt_oss")
    may_read = hold_reads(monkeypatch)
    before = set(threading.enumerate())
    ended: list[int] = []

    def forget(runner: Runner) -> None:
        ends = [(runner.forget, True), (runner.forget, False), (runner.sleep, False), (runner.close, False)]
        for number, (end, is_held) in enumerate(ends):
            may_read.clear() if is_held else may_read.set()
            runner.read_experts(ReadExperts(number, 0, ((0, 1, 3), (2, 3, 0))))
            if not is_held:
                assert until(lambda: runner.experts_read, "it is read", timeout_s=100) == ExpertsRead(number)
            end()
            assert runner.experts_read is None
        ended.append(runner._rank)

    flags: dict[str, Any] = {"dtype": "float32", "expert_replicas": 1}
    tokens_of(folder, requests, size=2, at_end=forget, **flags, **DEALT)
    assert sorted(ended) == [0, 1]
    assert not any(thread.name.startswith("experts") for thread in {*threading.enumerate()} - before)


def test_a_replica_that_a_rank_cannot_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoints.make_checkpoint(tmp_path, "qwen3_moe")
    expected = tokens_of(folder, requests, dtype="float32")
    moved: list[bool] = []

    def broken(reader: Any, targets: Any, *args: Any, **more: Any) -> None:
        if any(weight.only == (7,) for target in targets for weight in target.weights):
            raise CheckpointError("expert 7 cannot be read.")
        load_targets(reader, targets, *args, **more)

    monkeypatch.setattr(loading, "load_targets", broken)
    told: list[ExpertsRead | None] = []

    def move(runner: Runner, step: int) -> None:
        if step in (2, 5):
            more = (7, 0) if step == 2 else (6, 0)
            slots = ((*range(4), more[0]), (*range(4, 8), more[1]))
            runner.read_experts(ReadExperts(step, 0, slots))
            told.append(until(lambda: runner.experts_read, "it is read, or cannot be", timeout_s=100))
            moved.append(runner.place_experts(PlaceExperts(0, slots)))

    found = tokens_of(folder, requests, size=2, between=move, expert_replicas=1, dtype="float32", **DEALT)
    assert found == expected
    assert sorted(moved) == [False, False, True, True] and "layer 0 keeps its experts: expert 7 cannot" in caplog.text
    assert told.count(ExpertsRead(2, "expert 7 cannot be read.")) == 1 and told.count(ExpertsRead(2)) == 1
    assert told.count(ExpertsRead(5)) == 2

"""What a step reads of a model's weights."""

from pathlib import Path

import checkpoints
import torch

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.expert_replicas import HostSlots
from pagewire.engine.executors.weights import Options, Packing, fill_dummy
from pagewire.engine.gpu.weights import Loaded, room_of
from pagewire.engine.models.program import Embed
from pagewire.engine.runner.reads import reads_of
from pagewire.engine.runner.served import program_of
from pagewire.kernels.ops import reference_ops


def test_a_step_reads_no_table_but_the_head_and_experts_apart(tmp_path: Path) -> None:
    for kind, is_tied, share in (("llama", False, 0.0), ("gemma3", True, 0.0), ("qwen3_moe", False, 0.375)):
        folder = tmp_path / kind
        folder.mkdir()
        checkpoints.make_checkpoint(folder, kind)
        program = program_of(read_spec(folder), 0, 1)
        sizes = {m.key: max(1, m.experts) * m.rows * m.columns for m in program.matrices}
        reads = reads_of(program, lambda matrix: sizes[matrix.key], 1000)  # noqa: B023
        table = next(op.args.table for op in program.ops if isinstance(op.args, Embed))
        assert (table.key == program.head.key) == is_tied, kind
        unread = 0 if is_tied else sizes[table.key]
        stacks = sum(sizes[m.key] for m in program.matrices if m.experts)
        assert (reads.experts, reads.expert_share) == (stacks, share), kind
        assert reads.fixed == sum(sizes.values()) - stacks - unread + 1000, kind


def test_slots_of_replicas_are_no_experts_that_a_step_reads(tmp_path: Path) -> None:
    """Neither on a GPU nor on a CPU, whose stacks have room for them."""
    spec = read_spec(checkpoints.make_checkpoint(tmp_path, "qwen3_moe"))
    cpu, dtype = torch.device("cpu"), torch.float32
    options = Options(ops=reference_ops(), dtype=dtype, weight_dtype=dtype, device=cpu, keeps=False)
    found = []
    for num_replicas in (0, 3):
        program = program_of(spec, 0, 2, deals_experts=True, num_replicas=num_replicas)
        loaded = Loaded(dtype=dtype, device=cpu, keeps=False, room=room_of(program))
        fill_dummy(program, loaded)
        packing = Packing(options)
        fill_dummy(program, packing)
        HostSlots(program, packing.weights, options)
        found += [reads_of(program, bytes_of, 1000) for bytes_of in (loaded.bytes_of, packing.weights.bytes_of)]
    assert len(set(found)) == 1 and found[0].experts > 0, found


def test_the_weights_of_an_encoder_are_not_read_in_each_step(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, "t5")
    program = program_of(read_spec(tmp_path), 0, 1)
    assert program.encoder is not None
    sizes = {m.key: m.rows * m.columns for m in program.matrices}
    reads = reads_of(program, lambda matrix: sizes[matrix.key], 0)
    assert (
        reads.fixed == sum(size for key, size in sizes.items() if not key.startswith("encoder.")) < sum(sizes.values())
    )

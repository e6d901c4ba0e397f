"""Which operations the C program has; `executors/test_native_operations.py` and `runner/test_served.py` compare this
with the compiled program."""

from pathlib import Path

import families
from decoders import llama

from pagewire.engine.models.cut import cut
from pagewire.engine.models.families import describe
from pagewire.engine.models.fields import Fields
from pagewire.engine.models.in_c import attends_in_c, lacks, operations_in_torch
from pagewire.engine.models.lower import lower
from pagewire.engine.models.program import Attend


def test_heads_of_other_sizes_attend_in_torch() -> None:
    program = lower(llama(head_dim=24))
    what = "attention with a head size that is no multiple of 16 (24)"
    assert operations_in_torch(program) == (what,) and not attends_in_c(program)
    assert [lacks(op.args) for op in program.ops if isinstance(op.args, Attend)] == [what] * 2
    assert not operations_in_torch(lower(llama())) and attends_in_c(lower(llama()))


def test_a_rank_computes_nothing_more_in_torch() -> None:
    """MiniMax-M2 norms the queries of all heads together, over all ranks."""
    raw = families.tiny_config("minimax_m2")
    decoder = describe("MiniMaxM2ForCausalLM", Fields(raw, Path("config.json")))
    for program in (lower(decoder), lower(cut(decoder, 0, 2), ranks=2)):
        assert not operations_in_torch(program) and attends_in_c(program)


def test_sparse_gates_of_several_ranks_are_computed_in_torch() -> None:
    """The ranks exchange their parts of a gate (Gemma 3n), whose sparsity is that of the whole."""
    decoder = describe("Gemma3nForCausalLM", Fields(families.tiny_config("gemma3n_text"), Path("config.json")))
    assert not operations_in_torch(lower(decoder))
    program = lower(cut(decoder, 0, 2), ranks=2)
    assert operations_in_torch(program) == ("sparse gates over several ranks",) and attends_in_c(program)

"""Which operations share a launch, and which programs the kernels do not take."""

from dataclasses import replace

import pytest
from decoders import decoders, llama, of_checkpoint
from hypothesis import HealthCheck, given, settings

from pagewire.engine.gpu.rules import (
    Target,
    UnknownLayerError,
    body_of,
    in_torch,
    kind_of,
    largest_group,
    parts_of,
    unfused,
)
from pagewire.engine.models.cut import cut
from pagewire.engine.models.description import Alibi, Attention, Decoder, Reach
from pagewire.engine.models.lower import lower
from pagewire.engine.models.program import Attend, AttendLatent, Matrix, Op, Program


def few_tokens(matrix: Matrix) -> bool:
    """Products of few tokens take norms and residuals."""
    return True


def many_tokens(matrix: Matrix) -> bool:
    return False


def of_kind(kind: str) -> Program:
    decoder = of_checkpoint(kind)
    assert decoder is not None
    return lower(decoder)


def launches(program: Program, *, few: bool = False) -> list[str]:
    """Of one layer, and the operations before it."""
    parts = parts_of(program, fuses=few_tokens if few else many_tokens)
    return [part.kind for part in parts if part.ops[-1].layer < 1]


def changed(program: Program, **fields: object) -> Program:
    """With other fields of its attention."""

    def attend(op: Op) -> Op:
        return replace(op, args=replace(op.args, **fields)) if isinstance(op.args, Attend) else op

    return replace(program, ops=tuple(attend(op) for op in program.ops))


def test_a_layer_of_llama_takes_six_launches_for_few_tokens_and_seven_for_many() -> None:
    program = lower(llama(num_hidden_layers=1))
    assert launches(program, few=True) == [
        "torch", "norm product", "attend", "product add", "norm product", "product add",
    ]  # fmt: skip
    assert launches(program) == [
        "torch",
        "norm",
        "product",
        "attend",
        "product",
        "add norm",
        "product",
        "product",
        "add",
    ]
    two = parts_of(lower(llama(num_hidden_layers=2)))
    assert [part.kind for part in two].count("add norm") == 3, "also between layers"
    assert in_torch(program) == ()


def test_head_norms_and_rotation_share_the_launch_that_writes_keys() -> None:
    for kind, num in (("qwen2", 3), ("qwen3", 5), ("gemma3", 5), ("gpt_neox", 3)):
        (attend,) = [part for part in parts_of(of_kind(kind)) if part.kind == "attend" and part.ops[-1].layer == 0]
        assert len(attend.ops) == num, (kind, attend)


def test_a_norm_that_several_operations_read_is_stored() -> None:
    """The router and the experts read it."""
    found = launches(of_kind("mixtral"), few=True)
    assert found == ["torch", "norm product", "attend", "product add", "norm", "product", "experts", "add"]


def test_a_sum_over_ranks_stands_between_a_product_and_its_sum() -> None:
    decoder = llama(num_hidden_layers=1)
    assert launches(lower(cut(decoder, 0, 2), ranks=2), few=True) == [
        "torch", "sum", "norm product", "attend", "product", "sum", "add", "norm product", "product", "sum", "add",
    ]  # fmt: skip


def test_exchanges_of_kv_domains_are_one_launch_each() -> None:
    """And products of the tokens of all domains are not those of few tokens."""
    decoder = llama(num_hidden_layers=1)
    program = lower(cut(decoder, 0, 2, has_domains=True), ranks=2, has_domains=True)
    assert launches(program, few=True) == [
        "torch", "norm product", "attend", "product add", "norm", "gather", "product", "product", "scatter", "add",
    ]  # fmt: skip


def test_without_rules_every_operation_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine.gpu.rules.RULES", ())
    program = of_kind("qwen3")
    parts = parts_of(program, fuses=few_tokens)
    assert [part.ops for part in parts] == [(op,) for op in program.ops[:-1]]
    assert [part.kind for part in parts] == [kind_of(op) for op in program.ops[:-1]]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", set()),
        ("qwen3", set()),
        ("mixtral", set()),
        ("gemma2", set()),
        ("gpt_neox", set()),
        ("granite", set()),
        ("qwen3_moe", set()),
    ],
)
def test_torch_computes_what_the_kernels_lack(kind: str, names: set[str]) -> None:
    assert {type(op.args).__name__ for op in in_torch(of_kind(kind))} == names


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 24, "value_dim": 24},
        {"value_dim": 32},
        {"heads": 34},
        {"alibi": Alibi((1.0,))},
        {"reach": Reach("chunk", 64)},
        {"head_dim": 512, "value_dim": 512},
    ],
    ids=str,
)
def test_attention_of_any_even_size_and_reach_has_kernels(fields: dict[str, object]) -> None:
    assert in_torch(changed(lower(llama()), **fields)) == ()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"head_dim": 25, "value_dim": 25}, "no attention with keys of 25 numbers"),
        ({"value_dim": 514}, "no attention with values of 514 numbers"),
    ],
)
def test_attention_that_the_kernels_lack_excludes_the_program(fields: dict[str, object], why: str) -> None:
    with pytest.raises(UnknownLayerError, match=why):
        in_torch(changed(lower(llama()), **fields))


# Devices, by the table of `kernels/triton/limits.json`


def why(program: Program, architecture: int, dtype: str = "bfloat16", kv_dtype: str = "") -> str:
    """Why torch computes the whole program; empty: the kernels fit."""
    try:
        in_torch(program, Target(architecture, dtype, kv_dtype or dtype))
    except UnknownLayerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_of_16_bits_fit_every_device(architecture: int, dtype: str) -> None:
    wide = changed(lower(llama()), head_dim=256, value_dim=256)
    for program in (lower(llama()), wide, of_kind("mixtral"), with_latents(512, 64)):
        assert why(program, architecture, dtype) == "" == unfused(program, Target(architecture, dtype, dtype))


def test_a_device_without_fp8_has_no_such_keys_and_values() -> None:
    program = lower(llama())
    found = why(program, 80, kv_dtype="fp8")
    assert found.startswith(
        "the kernel of attention with heads of 16 in bfloat16 with fp8 KV does not compile for sm_80"
    )
    assert why(program, 86, kv_dtype="fp8") and not why(program, 89, kv_dtype="fp8")


def test_products_whose_tiles_are_too_large_are_left_to_the_library() -> None:
    """float32 on devices with little shared memory."""
    program = lower(llama())
    found = unfused(program, Target(89, "float32", "float32"))
    assert found.startswith("the kernel for products of few tokens in float32 needs ")
    assert found.endswith("bytes of shared memory, and sm_89 has 101,376")
    assert unfused(program, Target(90, "float32", "float32")) == ""


def test_a_device_older_than_the_kernels_runs_torch() -> None:
    assert "is written for sm_80 and newer, and this device is sm_75" in why(lower(llama()), 75)


def with_latents(rank: int, rope_dim: int) -> Program:
    """Llama with latent attention of 20 heads."""
    program = lower(llama())
    matrix = program.matrices[0]
    args = AttendLatent(
        layer=0, tile=0, heads=20, nope_dim=12, rope_dim=rope_dim, value_dim=10, rank=rank, scale=1.0, keys=matrix,
        values=matrix,
    )  # fmt: skip
    ops = tuple(replace(op, args=args) if isinstance(op.args, Attend) else op for op in program.ops)
    return replace(program, ops=ops)


@pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (32, 16)])
def test_latents_are_attended_as_one_group_of_all_heads(rank: int, rope_dim: int) -> None:
    program = with_latents(rank, rope_dim)
    assert in_torch(program) == ()
    assert "latent" in {part.kind for part in parts_of(program)}
    assert largest_group(program) == 20


@pytest.mark.parametrize(("rank", "rope_dim"), [(48, 16), (32, 8)])
def test_latents_of_other_sizes_are_left_to_torch(rank: int, rope_dim: int) -> None:
    with pytest.raises(UnknownLayerError, match=f"rank {rank} with rotated keys of {rope_dim}"):
        in_torch(with_latents(rank, rope_dim))


def test_the_tiles_are_cut_for_the_largest_group() -> None:
    decoder = llama()
    (sublayer, *rest), other = decoder.blocks[0].sublayers, decoder.blocks[1]
    (branch,) = sublayer.branches
    assert isinstance(branch.body, Attention) and largest_group(lower(decoder)) == 2
    wide = replace(branch, body=replace(branch.body, heads=8))
    block = replace(decoder.blocks[0], sublayers=(replace(sublayer, branches=(wide,)), *rest))
    assert largest_group(lower(replace(decoder, blocks=(block, other)))) == 4


@given(decoders())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
def test_the_parts_of_random_programs_are_their_operations_in_order(decoder: Decoder) -> None:
    program = lower(decoder)
    body, last = body_of(program)
    assert (*body, *([] if last is None else [last])) == program.ops
    for fuses in (few_tokens, many_tokens):
        assert tuple(op for part in parts_of(program, fuses=fuses) for op in part.ops) == body

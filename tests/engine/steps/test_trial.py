"""What a trial counts as an error, and which layers of a program it takes."""

import torch
from checkpoints import VOCAB_SIZE

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.models.lower import lower
from pagewire.engine.models.program import Embed, Program
from pagewire.engine.steps import trial
from pagewire.engine.steps.trial import Report
from pagewire.kernels.reference import TorchMatrix


def program_of(folder) -> Program:
    decoder = read_spec(folder).decoder
    assert decoder is not None
    return lower(decoder)


def test_layers_of_a_kind_are_tried_once(checkpoint):
    whole = program_of(checkpoint("qwen3", num_hidden_layers=5))
    small = trial.trial_program(whole)
    assert {op.layer for op in small.ops} == {0, 5}
    assert not any(isinstance(op.args, Embed) for op in small.ops)
    assert small.head.rows < VOCAB_SIZE and small.ops[-1] == whole.ops[-1]


def test_every_kind_of_layer_is_tried(checkpoint):
    small = trial.trial_program(program_of(checkpoint("qwen2-sliding", num_hidden_layers=4)))
    assert {op.layer for op in small.ops} >= {0, 1}
    assert not {op.layer for op in small.ops} & {2, 3}


def verdict(found, expected, **options) -> str:
    report = Report(0.03)
    report.compare("a", found, expected, **options)
    return report.failed.get("a", "")


def test_errors_of_a_whole_token_and_of_one_number():
    expected = torch.randn((20, 4096), generator=torch.Generator().manual_seed(0))
    assert not verdict(expected, expected)
    assert not verdict(expected * 1.02, expected)
    assert not verdict(expected.bfloat16(), expected)
    for place in ((3,), (3, 77)):
        off = expected.clone()
        off[place] = off[place] * 1.1 if len(place) == 1 else off[place] + 1
        assert "differs from torch" in verdict(off, expected), place
    not_finite = expected.clone()
    not_finite[5, 5] = torch.nan
    assert verdict(not_finite, expected)
    assert not verdict(expected, not_finite), "what torch cannot compute is not compared"
    assert not verdict(expected * 0, expected * 0) and verdict(expected, expected * 0)


def test_most_tokens_of_a_routed_operation_must_agree():
    expected = torch.randn((20, 64), generator=torch.Generator().manual_seed(0))
    few, many = expected.clone(), expected.clone()
    few[:3] *= 2
    many[:9] *= 2
    assert verdict(few, expected) and not verdict(few, expected, is_routed=True)
    assert verdict(many, expected, is_routed=True)


def test_a_report_keeps_the_first_problem_and_the_greatest_error():
    report = Report(0.03)
    report.add("a", error=0.1, ms=2)
    report.add("a", problem="first", error=0.2, ms=3)
    report.add("a", problem="second", error=0.0)
    report.add("b")
    assert report.checks["a"] == trial.Check("a", "first", 0.2, 5)
    assert report.failed == {"a": "first"}


def test_an_error_is_told_in_one_line():
    try:
        raise KeyError("x")
    except KeyError as error:
        assert trial.module_of(error, "triton") is None
    assert trial.summary_of(RuntimeError("one\ntwo")) == "RuntimeError: one"
    assert trial.summary_of(ValueError()) == "ValueError"


def test_two_sinks_get_the_same_random_weights(checkpoint):
    program = trial.trial_program(program_of(checkpoint("qwen3", num_hidden_layers=1)))
    cpu = torch.device("cpu")
    wide, narrow = trial.packing_for(torch.float32, cpu), trial.packing_for(torch.bfloat16, cpu)
    trial.fill_random(program, (narrow, wide))
    for key, (matrix,) in narrow.weights.matrices.items():
        (other,) = wide.weights.matrices[key]
        assert isinstance(matrix, TorchMatrix) and isinstance(other, TorchMatrix)
        assert torch.equal(matrix.weight.float(), other.weight) and matrix.weight.float().std() > 0

"""A small run of `hostile_models`: every mutant is refused in one sentence, or served."""

from pathlib import Path

import checkpoints
import pytest
import vocabulary

from pagewire.engine.checkpoint.source import DEMO_MODEL
from pagewire.tests.stress import hostile_models

SEED, NUM = 11, 45


@pytest.mark.long
def test_mutants_are_refused_or_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIMIT_S", "_START_LIMIT_S"):  # of the program, which has the machine for itself
        monkeypatch.setattr(hostile_models, name, 300.0)
    moe = checkpoints.make_checkpoint(tmp_path / "moe", "qwen3_moe")
    vocabulary.add_tokenizer(moe)
    bases = [DEMO_MODEL, hostile_models.write_shards(DEMO_MODEL, tmp_path / "shards"), moe]
    kinds = []
    for number, change, _, verdict in hostile_models.verdicts(bases, tmp_path, SEED, range(NUM)):
        assert not verdict.is_fault, f"seed {SEED}, mutant {number}: {change}: {verdict}"
        kinds.append(verdict.kind)
    assert 3 < kinds.count("served") < NUM - 20  # both verdicts occur


def test_a_mutant_depends_only_on_seed_and_number(tmp_path: Path) -> None:
    changes = [hostile_models.make_mutant([DEMO_MODEL], tmp_path / name, 3, 17) for name in ("a", "b")]
    files = [sorted((path.name, path.read_bytes()) for path in (tmp_path / name).iterdir()) for name in ("a", "b")]
    assert changes[0] == changes[1] and files[0] == files[1]


def test_a_hang_or_a_refusal_of_several_lines_is_a_fault() -> None:
    assert hostile_models.Verdict("hangs").is_fault and hostile_models.Verdict("refused", "a\nb").is_fault
    assert not hostile_models.Verdict("refused", "One sentence.").is_fault


def test_the_real_command_prints_one_line_and_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": -1}')
    verdict = hostile_models.serve(tmp_path)
    assert (
        verdict.kind == "refused" and not verdict.is_fault and "config.json has no num_attention_heads" in verdict.text
    )

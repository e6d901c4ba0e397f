"""docs/models.md is what the pages say."""

import json
from pathlib import Path

import pytest

from pagewire.engine.checkpoint.quantization import FORMATS
from pagewire.engine.models.families import pages
from pagewire.tools import models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page() -> str:
    return models.page()


def test_the_page_of_models_is_up_to_date(page: str) -> None:
    assert all(f"| `{architecture}` |" in page for architecture in pages())
    assert page == models.PAGE.read_text(), "run python -m pagewire.tools.models"


@pytest.mark.parametrize(
    ("architecture", "formats"),
    [
        ("LlamaForCausalLM", f"{', '.join(FORMATS)}, GGUF"),
        ("Qwen3MoeForCausalLM", f"{', '.join(FORMATS)}, GGUF"),
        ("GptOssForCausalLM", ", ".join(FORMATS)),  # its files have the experts of a layer in one tensor, or in MXFP4
        ("Llama4ForCausalLM", f"{', '.join(FORMATS)}, but not the experts"),
        ("GPT2LMHeadModel", "–"),  # its matrices have their columns first
    ],
)
def test_the_formats_of_quantized_checkpoints(page: str, architecture: str, formats: str) -> None:
    (row,) = [line for line in page.splitlines() if f"| `{architecture}` |" in line]
    assert row.strip("| ").split(" | ")[6] == formats


def test_measured_speeds_have_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": "LlamaForCausalLM", "figures": {"beside_llama": [0.9, 1.04, 1.2]}}]
    (tmp_path / "families.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(models, "SPEEDS", tmp_path / "families.json")
    two = {name: pages()[name] for name in ("LlamaForCausalLM", "OPTForCausalLM")}
    monkeypatch.setattr(models, "pages", lambda: two)
    lines = models.page().splitlines()
    assert any(line.startswith("- **Speed**") for line in lines)
    head, _, *rest = [line for line in lines if line.startswith("|")]
    assert head.endswith("| speed |")
    assert {line.split("`")[1]: line.rpartition("| ")[2] for line in rest} == {
        "LlamaForCausalLM": "1.04 × |",
        "OPTForCausalLM": "– |",
    }
    monkeypatch.setattr(models, "SPEEDS", tmp_path / "nothing.json")
    assert "speed |" not in models.page() and "**Speed**" not in models.page()

"""`serve`, `doctor` and `serve --explain` refuse the same models with the same sentence.

`families.py` lists the families. The greedy tokens of served families equal those of transformers.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire import LLM, SamplingParams
from pagewire.cli import main
from pagewire.commands import doctor
from pagewire.config.flags import make_config
from pagewire.config.machine import machine_facts
from pagewire.engine.checkpoint import spec as specs
from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.transformers_fallback import load_fallback, outline
from pagewire.engine.models.families import pages
from pagewire.engine.models.fields import Fields, NotDescribedError
from pagewire.engine.runner.runner import Runner
from pagewire.errors import PagewireError, UnsupportedModel
from pagewire.procs.prepare import prepare

_ROOT = Path(__file__).parents[1]
_EVERY_TIME: tuple[str, ...] = (
    "llama",
    "gpt2",
    "opt",
    "jetmoe",
    "mixtral",
    "diffllama",
    "roberta",
    "gpt_oss",
    "deepseek_v3",
    "bart",
)
_EVERY_TIME += ("qwen3_5_text", "gptj", "paligemma", "gemma4_text", "t5")  # the others are for `make test-long`


def with_marks(kinds: list[str]) -> list[object]:
    return [kind if kind in _EVERY_TIME else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def serve(folder: Path, **flags: object) -> str | None:
    """The sentence with which `serve` refuses the model, in the launcher or in the worker, or None."""
    try:
        with torch.inference_mode():
            Runner.load(prepare(make_config(model=str(folder), **flags)))
    except PagewireError as error:
        return str(error)
    return None


def diagnose(folder: Path) -> str | None:
    """The sentence with which `doctor` refuses the model, or None."""
    bad = [finding.found for finding in doctor.check_model(str(folder), machine_facts()) if finding.level == "bad"]
    assert len(bad) <= 1
    return bad[0] if bad else None


def explain(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str | None:
    """The sentence with which `serve --explain` refuses the model, or None. Checks that it prints no settings then."""
    capsys.readouterr()
    code = main(["serve", str(folder), "--explain", *flags])
    printed = capsys.readouterr()
    if code == 0:
        assert "memory" in printed.out
        return None
    assert code == 2 and not printed.out
    return printed.err.removeprefix("pagewire: ").removesuffix("\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", with_marks([*families.FAMILIES, *families.BY_CONFIG]))
def test_serve_doctor_and_explain_agree(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = families.make_family(tmp_path, kind)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    pattern = (families.FAMILIES.get(kind) or families.BY_CONFIG[kind])[1]
    sentence = serve(folder)
    if pattern == families.SERVED:
        assert sentence is None
    else:
        assert sentence is not None and sentence.startswith(f"{architecture} cannot be served: it")
        assert re.search(pattern, sentence) and sentence.endswith(".") and "\n" not in sentence
    if kind in families.ONLY_WEIGHTS_TELL:
        sentence = None
    assert diagnose(folder) == sentence
    assert explain(folder, capsys) == sentence


def check_tokens(folder: Path) -> None:
    """Raises PagewireError if the model is refused."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, checkpoints.VOCAB_SIZE, (num,), generator=generator).tolist() for num in (5, 37, 150)]
    llm = LLM(str(folder), dtype="float32", max_model_len=256, threads=1, max_num_batched_tokens=64)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    expected = checkpoints.reference_greedy(folder, prompts, 16)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", with_marks([kind for kind, (_, why) in families.FAMILIES.items() if not why]))
def test_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    check_tokens(families.make_family(tmp_path, kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    with_marks([kind for kind in families.FAMILIES if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) in pages()]),
)
def test_the_fallback_gives_the_same_tokens_or_says_why_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of families that have a page: transformers runs the variants that it does not cover."""

    def hidden(architecture: str, fields: Fields) -> None:
        raise NotDescribedError("a page that this test hides")

    monkeypatch.setattr(specs, "describe", hidden)
    folder = families.make_family(tmp_path, kind)
    if kind not in families.ONLY_DESCRIBED:
        check_tokens(folder)
        return
    with pytest.raises(UnsupportedModel, match=r"^\w+ cannot be served: it.*\.$"):
        check_tokens(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    with_marks(
        [kind for kind, (_, why) in families.FAMILIES.items() if not why and kind not in families.ONLY_DESCRIBED]
    ),
)
def test_the_fallback_check_tolerates_rounding_to_16_bits(kind: str, tmp_path: Path) -> None:
    folder = families.make_family(tmp_path, kind)
    with torch.inference_mode():
        spec, cpu = read_spec(folder), torch.device("cpu")
        shape = outline(spec, folder, num_numbers=100_000_000, max_len=256, dtype=torch.bfloat16)
        load_fallback(spec, folder, max_len=256, dtype=torch.bfloat16, device=cpu, is_certain=shape is not None)


@pytest.mark.parametrize("kind", ["llama", "persimmon"])
def test_flags_and_files_that_serve_refuses(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A native model and one of the fallback. All three commands check the same things."""
    folder = families.make_family(tmp_path, kind)
    for flags, options in (
        (["--tensor-parallel-size", "3"], {"tensor_parallel_size": 3}),
        (["--max-model-len", "9999"], {"max_model_len": 9999}),
    ):
        sentence = serve(folder, **options)
        assert sentence is not None and explain(folder, capsys, *flags) == sentence
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())

    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 300}))
    sentence = serve(folder)
    assert sentence is not None and diagnose(folder) == explain(folder, capsys) == sentence

    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    sentence = serve(folder)
    assert sentence is not None and "bitsandbytes, which pagewire does not read" in sentence
    assert diagnose(folder) == explain(folder, capsys) == sentence

    if kind == "llama":
        (folder / "config.json").write_text(json.dumps(config))
        fewer = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
        save_file(fewer, file, metadata={"format": "pt"})
        sentence = serve(folder)
        assert sentence is not None and "model.norm.weight" in sentence
        assert diagnose(folder) == explain(folder, capsys) == sentence


@pytest.mark.parametrize("kind", ["persimmon"])
def test_features_of_native_families_only(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = families.make_family(tmp_path, kind)
    for flags, options in (
        (["--tensor-parallel-size", "2"], {"tensor_parallel_size": 2}),
        (["--quantization", "int8"], {"quantization": "int8"}),
        (["--load-format", "dummy"], {"load_format": "dummy"}),
    ):
        sentence = serve(folder, **options)
        assert sentence is not None and re.match(
            rf"{flags[0]}( dummy)? needs a model that pagewire describes; transformers runs PersimmonForCausalLM",
            sentence,
        )
        assert explain(folder, capsys, *flags) == sentence
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    sentence = serve(folder)
    assert sentence is not None and sentence.startswith("A quantized checkpoint needs a model that")
    assert diagnose(folder) == explain(folder, capsys) == sentence


def test_a_folder_of_gguf_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    sentence = serve(tmp_path)
    assert sentence is not None and "GGUF files and no config.json; name the file to serve" in sentence
    assert diagnose(tmp_path) == sentence
    sentence = serve(tmp_path / "model.gguf")
    assert sentence is not None and sentence.endswith("model.gguf is not a GGUF file: it does not begin as one.")
    assert diagnose(tmp_path / "model.gguf") == sentence


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["diffllama", "paligemma"])
def test_a_real_server_ends_with_the_same_sentence(kind: str, tmp_path: Path) -> None:
    """diffllama is refused by the worker, and paligemma before any process starts."""
    folder = families.make_family(tmp_path, kind)
    environment = os.environ | {"PYTHONPATH": str(_ROOT / ".typing")}
    command = [sys.executable, "-m", "pagewire", "serve", str(folder), "--port", "0"]
    served = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    sentence = diagnose(folder)
    assert served.returncode == 2 and sentence is not None and sentence in served.stderr

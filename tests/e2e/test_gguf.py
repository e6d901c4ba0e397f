"""GGUF files served by real processes: chat by the file's own template, ranks, and files that end the start."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import gguf_files
import openai
import pytest
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Say it: </s><s>system — 你好"}]


def make(folder: Path, **changes: Any) -> Path:
    return vocabulary.add_tokenizer(checkpoints.make_checkpoint(folder, "llama", **changes))


def ask(server: Server, model: str, **more: Any) -> Any:
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body = {"return_token_ids": True, "ignore_eos": True, **more}
    return client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0, extra_body=body)


def test_chat_with_a_split_file(tmp_path: Path, start: Callable[..., Server]) -> None:
    """The template, the special tokens, grammars and the model come from the file; there is no other file."""
    folder = make(tmp_path / "folder")
    (tmp_path / "alone").mkdir()
    first = gguf_files.write_gguf(folder, tmp_path / "alone" / "tiny-F32.gguf", split=12)
    assert len([*first.parent.iterdir()]) == 3
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (expected,) = LLM(str(folder), dtype="float32", threads=1).chat(MESSAGES, params, use_tqdm=False)
    server = start(str(first), "--dtype", "float32").wait_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    (served,) = client.models.list().data
    assert served.id == "tiny-F32"
    answer = ask(server, "tiny-F32")
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    forced = ask(server, "tiny-F32", response_format=shape, ignore_eos=False)
    assert json.loads(forced.choices[0].message.content or "") in ("yes", "no")


def test_a_quantized_file_of_a_cached_repository_on_two_ranks(tmp_path: Path, start: Callable[..., Server]) -> None:
    """huggingface_hub's cache: the name in it is a link to a blob without a suffix."""
    # Half of the columns of each matrix are whole superblocks: within one, ranks would round activations otherwise.
    halves = {"intermediate_size": 512, "head_dim": 128}
    folder = make(tmp_path / "folder", **{**gguf_files.QUANTIZED_SIZES, **halves})
    repo = tmp_path / "hub" / "models--someone--tiny-GGUF"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    written = gguf_files.write_gguf(folder, tmp_path / "model.gguf", "Q4_K", types={"v_proj.weight": "Q6_K"})
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (expected,) = LLM(str(written), dtype="float32", threads=1).chat(MESSAGES, params, use_tqdm=False)
    written.rename(repo / "blobs" / "0")
    (snapshot / "Tiny-Q4_K_M.gguf").symlink_to(repo / "blobs" / "0")
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    name = "someone/tiny-GGUF:Q4_K_M"
    server = Server(
        tmp_path / "run", name, "--dtype", "float32", "--tensor-parallel-size", "2", environment=environment
    )
    try:
        server.wait_ready()
        assert ask(server, name).choices[0].message.content == expected.outputs[0].text
        assert "a GGUF file (Q4_K, Q6_K)\n" in server.announced()
    finally:
        server.close()


def said_by(command: list[str], code: int) -> str:
    """What the program prints, and ends with this exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "pagewire", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / ".typing")},
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_files_that_cannot_be_served(tmp_path: Path) -> None:
    """serve, doctor and --explain say the same sentence, before any process is started."""
    file = gguf_files.write_gguf(make(tmp_path / "folder"), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    for command in (["serve", str(file), "--port", "0"], ["serve", str(file), "--explain"], ["doctor", str(file)]):
        said = said_by(command, 1 if command[0] == "doctor" else 2)
        assert "is damaged or cut short: " in said and "Traceback" not in said


def test_doctor_and_explain(tmp_path: Path) -> None:
    file = gguf_files.write_gguf(make(tmp_path / "folder"), tmp_path / "model.gguf", "Q8_0")
    said = {command[0]: said_by(command, 0) for command in (["serve", str(file), "--explain"], ["doctor", str(file)])}
    assert "ok    weights: 1 GGUF file, " in said["doctor"] and "ok    model: model: " in said["doctor"]
    assert "with a working chat template" in said["doctor"]
    assert str(file) in said["serve"]

"""Dynamo's requests in the engine's words and back, and with the package its own classes before a real engine."""

import asyncio
import inspect
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pagewire.client.dynamo import Relay, asked_of, check_block_size, chunk_of, engine_class, main, parser
from pagewire.client.engine_client import EngineClient
from pagewire.errors import ConfigError, RequestError
from pagewire.ipc.client_messages import Welcome
from pagewire.ipc.messages import Constraint, RowLogprobs, Tokens, Usage, ids_to_bytes
from pagewire.procs import interpreter

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo_model"
IN_THE_ROOT = (sys.executable, "-m", "pagewire.dynamo")
"""With the working folder as ROOT `import dynamo` would find our module of that name first."""


def test_a_request_becomes_sampling_and_limits() -> None:
    asked = asked_of(
        {
            "token_ids": [5, 6],
            "sampling_options": {"temperature": 0.5, "top_k": -1, "top_p": None, "seed": 3, "n": 1,
                                 "guided_decoding": {"json": {"type": "object"}, "regex": None}},
            "stop_conditions": {"max_tokens": 9, "stop_token_ids_hidden": [7], "min_tokens": 2, "ignore_eos": True},
            "output_options": {"logprobs": 2},
        }
    )  # fmt: skip
    assert asked.prompt_ids == [5, 6] and asked.constraint == Constraint("json_schema", '{"type": "object"}')
    sampling, limits = asked.sampling, asked.limits
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.logprobs) == (0.5, 0, 1, 3, 2)
    assert (limits.max_tokens, limits.stop_token_ids, limits.min_tokens, limits.ignore_eos) == (9, (7,), 2, True)


@pytest.mark.parametrize(
    "more", [{"sampling_options": {"n": 2}}, {"multi_modal_data": {"image_url": []}}, {"prefill_result": {"a": 1}}]
)
def test_what_the_engine_does_not_do_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        asked_of({"token_ids": [1], **more})


def test_tokens_become_a_chunk() -> None:
    logprobs = RowLogprobs(3, ids_to_bytes([8, 8, 9]), b"".join(map(_float, (-1.0, -1.0, -2.0))))
    assert chunk_of(Tokens(0, ids_to_bytes([8]), logprobs), 1) == {
        "token_ids": [8],
        "index": 0,
        "log_probs": [-1.0],
        "top_logprobs": [[{"rank": 1, "token_id": 8, "token": "", "logprob": -1.0}]],
    }
    last = chunk_of(Tokens(0, ids_to_bytes([2]), finish="stop", usage=Usage(4, 1, 3)), None)
    assert last["finish_reason"] == "stop" and last["completion_usage"]["total_tokens"] == 5
    assert chunk_of(Tokens(0, b"", finish="abort"), None)["finish_reason"] == "cancelled"


def _float(value: float) -> bytes:
    return struct.pack("<f", value)


def test_another_block_size_than_the_engines_is_refused() -> None:
    facts = Welcome(1, "m", b"", 320, 512, (2,), 256)
    check_block_size(facts, None)
    check_block_size(facts, 256)
    with pytest.raises(ConfigError, match=r"--block-size 64 is not the engine's, whose KV blocks have 256 tokens"):
        check_block_size(facts, 64)


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    assert main(["--engine", "ipc:///x", "--model", "m"]) == 2
    assert "pip install ai-dynamo" in capsys.readouterr().err


def test_started_in_the_root_of_a_checkout_it_finds_the_package_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "dynamo" / "common").mkdir(parents=True)  # as in Dynamo's package, without __init__.py
    (tmp_path / "dynamo" / "common" / "__init__.py").write_text("raise ImportError('found here')")
    environment = interpreter.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path), environment["PYTHONPATH"]])
    ran = subprocess.run(
        [*IN_THE_ROOT, "--engine", "ipc:///x", "--model", "m"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr == "pagewire: Dynamo is not installed (found here); run pip install ai-dynamo.\n"


class Context:
    """What `generate` uses of Dynamo's context."""

    def __init__(self, name: str) -> None:
        self._name = name

    def id(self) -> str:
        return self._name


@pytest.mark.dynamo
@pytest.mark.e2e
def test_dynamos_own_engine_class_before_a_real_engine() -> None:
    backend = pytest.importorskip("dynamo.common.backend.engine", reason="ai-dynamo is not installed: make test-dynamo")
    kind = engine_class()
    assert issubclass(kind, backend.LLMEngine) and not inspect.isabstract(kind)
    for name, ours in inspect.getmembers(Relay, inspect.isfunction):
        theirs = getattr(backend.LLMEngine, name, None)
        if not name.startswith("_") and theirs is not None:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
            assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs), name
            assert inspect.isasyncgenfunction(ours) == inspect.isasyncgenfunction(theirs), name

    async def work(folder: str) -> None:
        address = f"ipc://{folder}/engine"
        async with await EngineClient.start(str(DEMO), client_address=address, threads=1) as client:
            prompt = [20, 30, 40, 50]
            (expected,) = await client.generate(prompt, *asked_of(_request(prompt))[1:3]).ids()
            engine, config = await kind.from_args(
                ["--engine", address, "--model", str(DEMO), "--kv-events", "tcp://127.0.0.1:1"]
            )
            assert config.model_name == str(DEMO) and config.endpoint == "generate"
            registered = await engine.start(1)
            assert registered.llm.context_length == client.facts.max_model_len and registered.llm.total_kv_blocks > 0
            assert registered.llm.kv_cache_block_size == client.facts.block_size == 16
            assert [source.endpoint for source in await engine.kv_event_sources()] == ["tcp://127.0.0.1:1"]
            chunks = [chunk async for chunk in engine.generate(_request(prompt), Context("a"))]
            assert [token for chunk in chunks for token in chunk["token_ids"]] == expected
            assert chunks[-1]["finish_reason"] == "length" and chunks[-1]["completion_usage"]["completion_tokens"] == 12
            refused = [chunk async for chunk in engine.generate({"token_ids": [10**6]}, Context("b"))]
            assert len(refused) == 1 and refused[0]["finish_reason"].startswith("error: ")
            reasons = []
            async for chunk in engine.generate(_request(prompt, max_tokens=400), Context("c")):
                await engine.abort(Context("c"))
                reasons.append(chunk.get("finish_reason"))
            assert reasons[-1] == "cancelled"
            await engine.cleanup()
            await engine.cleanup()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(work(folder))


CLIENT = """
import asyncio, json, sys
from dynamo.runtime import DistributedRuntime

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("dynamo.backend.generate").client()
    await asyncio.wait_for(client.wait_for_instances(), 120)
    ids = []
    async for item in await client.round_robin(json.loads(sys.argv[1])):
        ids += item.data()["token_ids"]
    print("ids:", json.dumps(ids), flush=True)

asyncio.run(main())
"""


@pytest.mark.dynamo
@pytest.mark.e2e
def test_dynamos_runtime_finds_the_worker_and_gets_the_tokens_of_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("dynamo.runtime", reason="ai-dynamo is not installed: make test-dynamo")
    prompt, address = [20, 30, 40, 50], f"ipc://{tmp_path}/engine"
    environment = interpreter.environment() | {"DYN_FILE_KV": str(tmp_path)}
    more = {"output_options": {}, "eos_token_ids": [], "annotations": [], "model": "m"}

    async def work() -> None:
        async with await EngineClient.start(str(DEMO), client_address=address, threads=1) as client:
            (expected,) = await client.generate(prompt, *asked_of(_request(prompt))[1:3]).ids()
            worker = await asyncio.create_subprocess_exec(
                *interpreter.COMMAND, "pagewire.dynamo", "--engine", address, "--model", str(DEMO),
                "--discovery-backend", "file", "--event-plane", "zmq",
                env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            try:
                asking = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-c", CLIENT, json.dumps(_request(prompt) | more),
                    env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                )  # fmt: skip
                output, _ = await asking.communicate()
                assert f"ids: {json.dumps(expected)}" in output.decode(), output
            finally:
                worker.kill()
                await worker.wait()

    asyncio.run(work())


@pytest.mark.dynamo
@pytest.mark.e2e
def test_the_worker_ends_with_a_sentence_if_the_engine_is_not_as_it_was_told(tmp_path: Path) -> None:
    pytest.importorskip("dynamo.runtime", reason="ai-dynamo is not installed: make test-dynamo")
    address = f"ipc://{tmp_path}/engine"

    async def work() -> tuple[bytes, int | None]:
        async with await EngineClient.start(str(DEMO), client_address=address, threads=1):
            worker = await asyncio.create_subprocess_exec(
                *IN_THE_ROOT, "--engine", address, "--model", str(DEMO),
                "--discovery-backend", "file", "--event-plane", "zmq", "--block-size", "64", cwd=ROOT,
                env=interpreter.environment() | {"DYN_FILE_KV": str(tmp_path)}, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await worker.communicate()
            return said, worker.returncode

    said, code = asyncio.run(work())
    assert code == 2 and b"Traceback" not in said
    assert b"pagewire: --block-size 64 is not the engine's, whose KV blocks have 16 tokens; leave it out." in said


def _request(prompt: list[int], max_tokens: int = 12) -> dict[str, Any]:
    stops = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": prompt, "sampling_options": {"temperature": 0.0}, "stop_conditions": stops}


def test_its_flags_name_the_engine() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([])

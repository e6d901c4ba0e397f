"""`EngineClient` and the Node client against real processes: an engine of their own, and the engine of a server."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from defaults import COMPILED, TORCH
from waiting import until

from pagewire import LLM, EngineClient, SamplingParams
from pagewire.client.engine_client import Generation
from pagewire.engine.text.tokenizer import load_tokenizer
from pagewire.errors import RequestError, StartError
from pagewire.ipc.messages import Constraint, Limits, Sampling
from pagewire.tools.servers import ROOT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NODE_CLIENT = ROOT / "examples" / "node_client"
PROMPTS = [[60, 70, 80, 90], [5, 6, 7], list(range(100, 140))]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The 24 greedy tokens of each prompt."""
    llm = LLM(threads=1, kv_cache_memory="64M")
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The client address of a server's engine."""
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        address = f"ipc://{folder}/engine"
        with Server(Path(folder) / "server", "--client-address", address, "--kv-cache-memory", "64M"):
            yield address
        assert not Path(folder, "engine").exists()


def test_a_client_generates_with_the_engine_of_a_server(address: str, expected: list[list[int]]) -> None:
    async def scenario() -> None:
        async with await EngineClient.connect(address) as client:
            generations = [client.generate(prompt, GREEDY, Limits(max_tokens=24)) for prompt in PROMPTS]
            assert [(await g.ids())[0] for g in generations] == expected

    asyncio.run(scenario())


def test_a_constraint_applies_only_to_its_own_request(address: str, expected: list[list[int]]) -> None:
    async def scenario() -> None:
        async with await EngineClient.connect(address) as client:
            free = [client.generate(prompt, GREEDY, Limits(max_tokens=24)) for prompt in PROMPTS]
            hot = Sampling(temperature=1.0, seed=5)
            bound = client.generate(
                PROMPTS[0], hot, Limits(max_tokens=24), n=3, constraint=Constraint("regex", "[a-z]{9}")
            )
            impossible = client.generate(PROMPTS[0], constraint=Constraint("regex", "("))
            assert [(await g.ids())[0] for g in free] == expected
            texts = {tokenizer.decode(ids, skip_special_tokens=True) for ids in await bound.ids()}
            assert len(texts) > 1 and all(len(text) == 9 and text.isalpha() for text in texts), texts
            with pytest.raises(RequestError) as refused:
                await impossible.ids()
            assert refused.value.kind == "invalid_request"

    tokenizer = load_tokenizer(ROOT / "demo_model")
    asyncio.run(scenario())


def test_a_client_starts_its_own_engine_and_reports_its_death(expected: list[list[int]]) -> None:
    async def scenario() -> None:
        async with await EngineClient.start(threads=1, kv_cache_memory="64M") as client:
            names = {" ".join(p.cmdline()).strip() for p in psutil.Process(client._process.pid).children()}  # type: ignore[union-attr]
            assert names == {"pagewire: core", "pagewire: grammar", "pagewire: template"}  # which forks the worker
            generations = [client.generate(prompt, GREEDY, Limits(max_tokens=24)) for prompt in PROMPTS]
            assert [(await g.ids())[0] for g in generations] == expected
            last = client.generate([1], limits=Limits(ignore_eos=True))
            engine = psutil.Process(client._process.pid)  # type: ignore[union-attr]
            engine.kill()
            with pytest.raises(RequestError, match="process ended with exit code"):
                await last.ids()
            folder = client._folder
        assert folder is not None and not folder.exists()
        assert not psutil.pid_exists(engine.pid)

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("default", [COMPILED, TORCH], indirect=True)
def test_generations_continue_unchanged_after_the_death_of_core_and_worker(on_default: str) -> None:
    """The core is killed, later the worker. Open generations end with the tokens of an undisturbed run, each once."""

    def ask(client: EngineClient) -> list[Generation]:
        limits = Limits(max_tokens=800, ignore_eos=True)
        generations = [client.generate(PROMPTS[i % 3], Sampling(temperature=i % 2, seed=i), limits) for i in range(6)]
        generations.append(client.generate(PROMPTS[0], Sampling(temperature=1.0, seed=9), limits, n=2))
        bound = Constraint("regex", "[a-z ]{600}")
        return [*generations, client.generate(PROMPTS[1], Sampling(seed=3), Limits(max_tokens=200), constraint=bound)]

    async def scenario() -> None:
        async with await EngineClient.start(threads=1, kv_cache_memory="64M") as client:
            undisturbed = [await generation.ids() for generation in ask(client)]
            engine = psutil.Process(client._process.pid)  # type: ignore[union-attr]
            for victim in ("core", "worker"):
                generations = ask(client)
                (process,) = [p for p in engine.children(recursive=True) if victim in " ".join(p.cmdline())]
                first_outputs = [await anext(generation) for generation in generations[:-1]]  # the last is bound
                process.kill()
                assert all(tokens.finish is None for _, tokens in first_outputs)
                while any(generation._unread for generation in generations):  # output from before the death
                    for generation in generations:
                        generation._unread.clear()
                await asyncio.wait_for(anext(generations[0]), 30.0)
                assert [await generation.ids() for generation in generations] == undisturbed, victim
                assert not process.is_running()

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_raises_start_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        with pytest.raises(StartError, match="exit code 2"):
            await EngineClient.start("/no/such/model")

    asyncio.run(scenario())
    assert "/no/such/model" in capfd.readouterr().err


def test_a_client_connects_to_an_engine_that_was_launched_by_hand(tmp_path: Path, expected: list[list[int]]) -> None:
    async def scenario(address: str) -> None:
        async with await EngineClient.connect(address, timeout_s=60) as client:
            assert await client.generate(PROMPTS[0], GREEDY, Limits(max_tokens=24)).ids() == expected[:1]

    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        address = f"ipc://{folder}/engine"
        launch = (sys.executable, "-m", "pagewire.procs.launch", "--threads", "1")
        flags = ("--actors", "core,grammar,worker", "--client-address", address, "--kv-cache-memory", "64M")
        server = Server(tmp_path, *flags, command=launch)
        try:
            asyncio.run(scenario(address))
        finally:
            assert server.stop() == 0, server.log.read_text()


def test_the_engine_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    program = """
        import asyncio, os, signal
        from pagewire import EngineClient
        async def main():
            client = await EngineClient.start(threads=1, kv_cache_memory="64M")
            print(client._process.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".typing"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        try:
            engine = psutil.Process(int(starter.stdout.readline()))
            processes = [engine, *engine.children(recursive=True)]
            assert len(processes) == 5, "the engine, its core, its grammar process, its template and its worker"
        finally:
            starter.kill()
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in processes), "all processes end", 15)


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the Node example with its npm packages installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no Node.js here")
    folder = tmp_path_factory.mktemp("node") / "node_client"
    shutil.copytree(NODE_CLIENT, folder, ignore=shutil.ignore_patterns("node_modules"))
    install = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if install.returncode:
        pytest.skip(f"npm could not fetch zeromq and @msgpack/msgpack: {install.stderr[-300:]}")
    return folder


def test_the_node_client_speaks_the_protocol(address: str, expected: list[list[int]], node_client: Path) -> None:
    script = Path(__file__).with_name("node_client.mjs")
    command = ["node", str(script), str(node_client), address, json.dumps(PROMPTS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["facts"]["maxModelLen"] > 0
    assert found["outputs"] == expected
    assert found["resumed"] == expected[0][5:]
    assert found["errors"] == ["invalid_request"] * 3
    assert found["cancelled"]["finish"] == "abort" and found["cancelled"]["num"] > 20
    assert found["snapshot"]["step"] > 0
    shown = subprocess.run(
        ["node", str(node_client / "generate.mjs"), address, json.dumps(PROMPTS[0]), "24"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [token for line in shown.stdout.splitlines() for token in json.loads(line)] == expected[0]

"""Several models behind one port, in real processes: loading, unloading for memory, deaths, and what clients see."""

import asyncio
import concurrent.futures
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import vocabulary
from checkpoints import make_checkpoint
from waiting import until

from pagewire.procs.models import PROCESSES_BYTES
from pagewire.tools.servers import Server, is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
Start = Callable[..., Server]
COUNT = [{"role": "user", "content": "Count from 1 to 5"}]


def listing(server: Server) -> dict[str, dict[str, Any]]:
    """The models by name, as administrators see them."""
    return {model["name"]: model for model in json.loads(server.get("/admin/models"))["data"]}


def states(server: Server) -> dict[str, str]:
    return {name: model["state"] for name, model in listing(server).items()}


def sample(server: Server, name: str, labels: str) -> float:
    """A metric with these labels."""
    lines = server.get("/metrics").splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"pagewire:{name}{{{labels}}} "))


def ask(server: Server, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": COUNT, "temperature": 0, "max_tokens": 16, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def answered(server: Server, model: str, **fields: Any) -> str:
    answer = ask(server, model, **fields)
    assert answer.status_code == 200, answer.text + server.log.read_text()[-3000:]
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def written(folder: Path) -> str:
    vocabulary.add_tokenizer(make_checkpoint(folder / "tiny", "qwen3"))
    file = folder / "models.toml"
    file.write_text(
        '[[models]]\nmodel = "demo"\nserved_model_name = ["one", "alias"]\nkv_cache_memory = "32M"\n'
        '[[models]]\nmodel = "demo-hybrid"\nserved_model_name = "two"\nkv_cache_memory = "32M"\n'
        '[[models]]\nmodel = "tiny"\nserved_model_name = "three"\nkv_cache_memory = "32M"\nmax_model_len = 256\n'
    )
    return str(file)


@pytest.mark.long
def test_models_are_loaded_when_they_are_asked_for_and_heal_alone(start: Start, tmp_path: Path) -> None:
    budget = 2 * PROCESSES_BYTES + (300 << 20)  # two of the three
    server = start("--models", written(tmp_path), "--models-memory", str(budget)).wait_ready("/health")
    assert states(server) == {"one": "unloaded", "two": "unloaded", "three": "unloaded"}
    assert not [name for name in server.children() if name.startswith("worker")], (
        "nothing runs for a model that is not loaded"
    )

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = pool.submit(answered, server, "one"), pool.submit(answered, server, "two")
        until(lambda: "loading" in states(server).values(), "one of them is being loaded")
        assert first.result() == second.result() == "1, 2, 3, 4, 5"
    assert states(server) == {"one": "loaded", "two": "loaded", "three": "unloaded"}
    workers = [process for name, process in server.children().items() if name.startswith("worker")]
    assert len(workers) == 2 and len({worker.ppid() for worker in workers}) == 1, "one template has imported torch"
    assert sample(server, "model_state", 'model_name="three",state="unloaded"') == 1

    async def one_dies_while_the_other_answers() -> tuple[list[str], list[str]]:
        """The texts of streams of both models, one of whose workers is killed after some events."""
        num_events = {"one": 0, "two": 0}

        async def read(client: httpx.AsyncClient, model: str) -> str:
            text = ""
            body = {"model": model, "prompt": "Count from 1 to 9", "temperature": 0, "max_tokens": 400}
            body |= {"stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        num_events[model] += 1
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            return text

        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            undisturbed = [await read(client, model) for model in ("one", "two")]
            num_events.update(one=0, two=0)
            reading = [asyncio.ensure_future(read(client, model)) for model in ("one", "two")]
            while num_events["one"] < 5 or num_events["two"] < 5:
                await asyncio.sleep(0)
            server.children()["worker of one"].kill()
            return undisturbed, await asyncio.gather(*reading)

    before = server.children()["worker of two"].pid
    undisturbed, disturbed = asyncio.run(one_dies_while_the_other_answers())
    assert undisturbed == disturbed, "no stream loses or repeats a token"
    assert server.children()["worker of two"].pid == before
    assert sample(server, "requests_resumed_total", 'model_name="one"') == 1
    assert sample(server, "requests_resumed_total", 'model_name="two"') == 0

    body = {"model": "three", "prompt": "Count", "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert sorted(states(server).values()) == ["loaded", "loaded", "unloaded"], "the other idle one has made room"
    assert listing(server)["three"]["load_s"] > 0

    ollama = httpx.post(f"{server.url}/api/generate", json={"model": "three", "keep_alive": 0}, timeout=60)
    assert ollama.status_code == 200
    until(lambda: states(server)["three"] == "unloaded", "it need not stay", 60)
    processes = server.supervisor.children(recursive=True)
    assert server.stop() == 0, server.log.read_text()
    until(lambda: not any(is_alive(process) for process in processes), "no process is left")


@pytest.mark.long
def test_models_are_pinned_and_a_broken_one_is_said(start: Start, tmp_path: Path) -> None:
    file = Path(written(tmp_path))
    file.write_text(file.read_text() + "pinned = true\n")
    budget = 2 * PROCESSES_BYTES + (300 << 20)
    flags = ("--admin-api-key", "of-the-administrator", "--api-processes", "2", "--drain-timeout", "5")
    server = start("--models", str(file), "--models-memory", str(budget), *flags).wait_ready("/health")
    admin = httpx.Client(base_url=server.url, headers={"authorization": "Bearer of-the-administrator"}, timeout=60)

    def state(name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(one for one in admin.get("/admin/models").json()["data"] if one["name"] == name)
        return found

    assert state("three")["state"] == "loaded" and state("three")["pinned"]
    assert admin.post("/admin/models", json={"model": "three", "loaded": False}).status_code == 409
    for name in ("one", "two"):
        assert answered(server, name) == "1, 2, 3, 4, 5"
        assert state("three")["state"] == "loaded", "it stays"

    for path in (tmp_path / "tiny").glob("*.safetensors"):
        path.write_bytes(b"broken")
    assert admin.post("/admin/models", json={"model": "three", "pinned": False}).status_code == 202
    assert admin.post("/admin/models", json={"model": "three", "loaded": False}).status_code == 202
    until(lambda: state("three")["state"] == "unloaded", "it is unloaded", 60)
    answer = ask(server, "three")
    assert answer.status_code == 503 and "three could not be served" in answer.text and answer.headers["retry-after"]
    assert state("three")["problem"] and answered(server, "two") == "1, 2, 3, 4, 5"

    worker = server.children()["worker of two"].pid
    server.children()["api"].kill()
    until(lambda: server.answers("/health") and ask(server, "two").status_code == 200, "the api is replaced", 60)
    assert server.children()["worker of two"].pid == worker
    admin.close()
    assert server.stop() == 0, server.log.read_text()

"""Several models behind one port, in real processes: loading, unloading for memory, deaths, and what clients see."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import vocabulary
from checkpoints import make_checkpoint
from open_requests import open_stream
from waiting import until

from pagewire.config.machine import OVERRIDES
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
        until(
            lambda: "loading" in states(server).values() or (first.done() and second.done()),
            "one of them is being loaded, or was",
            120,
        )
        assert first.result() == second.result() == "1, 2, 3, 4, 5"
    assert all(listing(server)[name]["load_s"] > 0 for name in ("one", "two"))
    assert states(server) == {"one": "loaded", "two": "loaded", "three": "unloaded"}
    workers = [process for name, process in server.children().items() if name.startswith("worker")]
    assert len(workers) == 2 and len({worker.ppid() for worker in workers}) == 1, "one template has imported torch"
    assert sample(server, "model_state", 'model_name="three",state="unloaded"') == 1

    async def one_dies_while_the_other_answers() -> tuple[list[str], list[str]]:
        """The texts of streams of both models, one of whose workers is killed after some events."""
        num_events = {"one": 0, "two": 0}

        async def read(client: httpx.AsyncClient, model: str) -> str:
            text = ""
            body = {"model": model, "prompt": "Count from 1 to 9", "temperature": 0, "max_tokens": 1000}
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
            victim = server.children()["worker of one"]
            reading = [asyncio.ensure_future(read(client, model)) for model in ("one", "two")]
            while num_events["one"] < 5 or num_events["two"] < 5:
                await asyncio.sleep(0)
            victim.kill()
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
    until(lambda: not any(is_alive(process) for process in processes), "no process is left", 30)


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
    until(lambda: state("three")["problem"], "the other api process is told, too", 60)
    assert answered(server, "two") == "1, 2, 3, 4, 5"

    worker = server.children()["worker of two"].pid
    api = server.children()["api"]
    api.kill()
    until(lambda: not is_alive(api), "the api takes no connection any more", 30)
    until(lambda: server.answers("/health") and ask(server, "two").status_code == 200, "the api is replaced", 60)
    assert server.children()["worker of two"].pid == worker
    admin.close()
    assert server.stop() == 0, server.log.read_text()


def two_tiny(folder: Path, *settings: str) -> str:
    """A file with two tiny models with other weights, "first" and "second", each with these settings."""
    tables = []
    for name, width in (("first", 64), ("second", 96)):
        made = make_checkpoint(folder / name, "qwen3", num_hidden_layers=1, intermediate_size=width)
        vocabulary.add_tokenizer(made)
        tables.append("\n".join(["[[models]]", f'model = "{name}"', *settings]))
    (folder / "two.toml").write_text("\n".join(tables))
    return str(folder / "two.toml")


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None or not hasattr(os, "memfd_create"), reason="no triton or memfd")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory takes the place of a GPU's")
def test_models_on_a_gpu_take_turns_and_each_has_a_keeper(start: Start, tmp_path: Path) -> None:
    """On the path of a GPU, as in `test_kept_weights.py`: the kernels run in Triton's interpreter. The GPU has room for
    one of two models."""
    tests = Path(__file__).resolve().parents[1]
    gpu = {"name": "GPU-of-tests", "total_bytes": 2 << 30, "free_bytes": 2 << 30}
    facts = json.loads(os.environ.get(OVERRIDES, "{}")) | {"has_gpu": True, "gpu_capability": 90, "gpus": [gpu]}
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tests / "kept_site"), str(tests), *sys.path]),
        OVERRIDES: json.dumps(facts),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    small = ("--max-num-batched-tokens", "32", "--max-num-seqs", "2", "--max-model-len", "64", "--dtype", "float32")
    server = start(
        "--models", two_tiny(tmp_path), *small, "--kv-cache-memory", "1M", "--models-memory", "16G",
        environment=environment,
    ).wait_ready("/health")  # fmt: skip

    def answer(model: str) -> str:
        body = {"model": model, "prompt": "one", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert found.status_code == 200, found.text + server.log.read_text()[-3000:]
        text: str = found.json()["choices"][0]["text"]
        return text

    def of_model(name: str) -> psutil.Process:
        """Its worker, which is the only one."""
        workers = {shown: process for shown, process in server.children().items() if shown.startswith("worker")}
        assert set(workers) == {f"worker of {name}"}
        return workers[f"worker of {name}"]

    first = answer("first")
    worker, (keeper,) = of_model("first"), server.of_kind("weight keeper")
    assert worker.ppid() == server.supervisor.pid, "a process that has imported torch is not forked for a GPU"
    assert 1 << 30 < listing(server)["first"]["need_bytes"] < 2 << 30, "of the GPU's memory"
    second = answer("second")
    assert second != first and states(server) == {"first": "unloaded", "second": "loaded"}
    assert not is_alive(worker) and not is_alive(keeper), "both have given back the GPU's memory"
    (other,) = server.of_kind("weight keeper")
    assert of_model("second").ppid() == server.supervisor.pid and is_alive(other)
    processes = server.supervisor.children(recursive=True)
    assert server.stop() == 0, server.log.read_text()
    until(lambda: not any(is_alive(process) for process in processes), "no process is left", 30)


@pytest.mark.long
def test_a_model_with_two_engines_and_tiers_of_its_own(start: Start, tmp_path: Path) -> None:
    """One model has two engines, which load and go together. The other keeps KV on a disk, over its own unloading."""
    kv = tmp_path / "kv"
    file = tmp_path / "models.toml"
    file.write_text(
        '[[models]]\nmodel = "demo"\nserved_model_name = "pair"\nkv_cache_memory = "32M"\ndata_parallel_size = 2\n'
        '[[models]]\nmodel = "demo"\nserved_model_name = "alone"\nkv_cache_memory = "32M"\n'
        f'kv_connector = ["disk,path={kv},size=64M"]\n'
    )
    budget = 2 * PROCESSES_BYTES + (400 << 20)  # one of them
    server = start("--models", str(file), "--models-memory", str(budget), "--api-processes", "2").wait_ready("/health")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: answered(server, "pair"), range(16))) == {"1, 2, 3, 4, 5"}
    names = [name for name in server.children() if name.startswith("worker")]
    assert sorted(names) == ["worker of pair, engine 0", "worker of pair, engine 1"]
    until(lambda: states(server)["pair"] == "loaded", "both engines are there", 120)
    for engine in ("0", "1"):
        assert sample(server, "engine_ready", f'model_name="pair",engine="{engine}"') == 1

    async def one_engine_loses_its_worker() -> list[str]:
        """The texts of streams on both engines."""
        num_events = 0

        async def read(client: httpx.AsyncClient) -> str:
            nonlocal num_events
            text = ""
            body = {"model": "pair", "prompt": "Count from 1 to 9", "temperature": 0, "max_tokens": 300}
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as it:
                async for line in it.aiter_lines():
                    if line.startswith("data: {"):
                        num_events += 1
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            return text

        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            victim = server.children()["worker of pair, engine 1"]
            reading = [asyncio.ensure_future(read(client)) for _ in range(4)]
            while num_events < 20:
                await asyncio.sleep(0)
            victim.kill()
            return await asyncio.gather(*reading)

    assert len(set(asyncio.run(one_engine_loses_its_worker()))) == 1, "no stream loses or repeats a token"

    prompt = "Count from 1 to 9. " * 8
    body = {"model": "alone", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()]
    assert states(server) == {"pair": "unloaded", "alone": "loaded"}
    num_blocks = answers[0]["usage"]["prompt_tokens"] // 16
    until(
        lambda: len(list((kv / "alone").glob("*/*/[!.]*.*"))) >= num_blocks > 0, "its KV is in a folder of its own", 120
    )
    assert answered(server, "pair") == "1, 2, 3, 4, 5" and states(server)["alone"] == "unloaded"
    answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json())
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0, "the next load of the model finds it"
    assert server.stop() == 0, server.log.read_text()


@contextlib.contextmanager
def asking(server: Server, body: dict[str, Any]) -> Iterator[list[list[str]]]:
    """Three clients ask this again and again until the block ends. Yields the texts that each of them has got."""
    is_over = threading.Event()
    texts: list[list[str]] = [[] for _ in range(3)]

    def keep_asking(own: list[str]) -> None:
        while not is_over.is_set():
            found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
            own.append(found.json()["choices"][0]["text"] if found.status_code == 200 else found.text)

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        clients = [pool.submit(keep_asking, own) for own in texts]
        try:
            yield texts
        finally:
            is_over.set()
        for client in clients:
            client.result()


def until_each_has(texts: list[list[str]], num: int, what: str) -> None:
    """Waits until each client has that many more answers."""
    wanted = [len(own) + num for own in texts]
    until(lambda: all(len(own) >= n for own, n in zip(texts, wanted, strict=True)), what, 120)


@pytest.mark.long
def test_a_model_is_replaced_by_another_version(start: Start, tmp_path: Path) -> None:
    """Its open requests end with the old one, what comes meanwhile gets the new one, and the other model goes on."""
    for name in ("tiny", "broken"):
        vocabulary.add_tokenizer(make_checkpoint(tmp_path / name, "qwen3"))
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")  # which only its processes find
    file = tmp_path / "models.toml"
    file.write_text(
        '[[models]]\nmodel = "demo"\nserved_model_name = ["one", "alias"]\nkv_cache_memory = "32M"\n'
        '[[models]]\nmodel = "demo-hybrid"\nserved_model_name = "two"\nkv_cache_memory = "32M"\npinned = true\n'
    )
    budget = 2 * PROCESSES_BYTES + (300 << 20)
    waits = ("--drain-timeout", "120", "--outage-wait", "300")
    flags = ("--admin-api-key", "of-the-administrator", "--enable-model-swap", *waits)
    server = start("--models", str(file), "--models-memory", str(budget), *flags).wait_ready("/health")
    admin = httpx.Client(base_url=server.url, headers={"authorization": "Bearer of-the-administrator"}, timeout=120)

    def status(name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(one for one in admin.get("/admin/models").json()["data"] if one["name"] == name)
        return found

    def change(**replacement: Any) -> httpx.Response:
        return admin.post("/admin/models", json={"model": "alias", "replace": replacement})

    assert change(model=str(tmp_path / "nothing")).status_code == 400
    assert change(served_model_name=["other"]).status_code == 400, "clients know it by its names"
    assert change(version=7).status_code == 400
    assert answered(server, "one") == "1, 2, 3, 4, 5" and status("one")["version"] == 1
    other = server.children()["worker of two"].pid

    body = {"model": "one", "prompt": "Count from 1 to 9", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    with asking(server, body) as texts:
        until_each_has(texts, 1, "each has an answer of the old version")
        held = open_stream(server, "/v1/completions", model="one", max_tokens=2000)  # it stays for this one
        assert change(model=str(tmp_path / "tiny"), max_model_len=256).status_code == 202
        assert status("one")["state"] in ("leaving", "loading") and change(version=1).status_code == 409
        assert held.events()[-1] == "[DONE]"
        until(lambda: status("one")["state"] == "loaded", "the new version is loaded", 120)
        newest = answered(server, "one")
        until_each_has(texts, 2, "each has an answer of the new version")
    assert newest != "1, 2, 3, 4, 5" and not {own[-1] for own in texts} & {own[0] for own in texts}
    assert {text for own in texts for text in own} == {texts[0][0], texts[0][-1]}, "no answer is of both versions"
    assert (status("one")["version"], status("one")["root"]) == (2, str(tmp_path / "tiny"))
    cards = {card["id"]: card["max_model_len"] for card in json.loads(server.get("/v1/models"))["data"]}
    assert cards["one"] == cards["alias"] == 256 != cards["two"]

    assert change(model=str(tmp_path / "broken")).status_code == 202
    until(lambda: "going back to the version before" in server.log.read_text(), "it does not load", 120)
    assert answered(server, "one") == newest and status("one")["version"] == 2

    assert change(version=1).status_code == 202
    until(lambda: status("one")["state"] == "loaded" and status("one")["version"] == 3, "the first one is back", 120)
    assert answered(server, "one") == "1, 2, 3, 4, 5"
    assert server.children()["worker of two"].pid == other and answered(server, "two") == "1, 2, 3, 4, 5"
    admin.close()
    assert server.stop() == 0, server.log.read_text()

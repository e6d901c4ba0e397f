"""The engine for Ray Serve LLM: its shape against the protocol of the installed Ray, and what it answers."""

import ast
import inspect
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_nodes import RayNodes, answer_in, has_ray

from pagewire.errors import ConfigError
from pagewire.ray.serve_llm import Engine

PROTOCOL = "ray/llm/_internal/serve/core/engine/protocol.py"


def config(**engine_kwargs: object) -> Any:
    loading = SimpleNamespace(model_source=None)
    return SimpleNamespace(model_id="m", model_loading_config=loading, engine_kwargs=engine_kwargs)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="engine_kwargs: enforce_eager is no setting of pagewire serve"):
        Engine(config(enforce_eager=True))


@pytest.mark.skipif(not has_ray(), reason="make test-ray installs it")
def test_it_has_every_method_of_the_protocol_with_its_parameters() -> None:
    tree = ast.parse(Path(str(distribution("ray").locate_file(PROTOCOL))).read_text())
    protocol = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LLMEngine")
    methods = [node for node in protocol.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert len(methods) > 15
    for method in methods:
        ours = getattr(Engine, method.name)
        parameters = inspect.signature(ours).parameters
        wanted = [one.arg for one in (*method.args.args, *method.args.kwonlyargs, method.args.kwarg) if one is not None]
        assert list(parameters) == wanted, method.name
        is_generator = method.name in ("chat", "completions", "embeddings", "transcriptions", "tokenize", "detokenize")
        assert inspect.isasyncgenfunction(ours) == is_generator, method.name
        if not is_generator:
            assert inspect.iscoroutinefunction(ours) == isinstance(method, ast.AsyncFunctionDef), method.name


SCRIPT = """
import asyncio, json, sys
from types import SimpleNamespace
import ray
from pagewire.ray.serve_llm import Engine

ray.init("auto", _node_ip_address="127.0.0.2", logging_level="ERROR", log_to_driver=False)


class Request:
    def __init__(self, **body):
        self.body = body

    def model_dump(self, mode, exclude_unset):
        assert mode == "json" and exclude_unset
        return self.body


async def all_of(generator):
    return [one async for one in generator]


async def main():
    loading = SimpleNamespace(model_source="demo")
    kwargs = {"threads": 1, "drain_timeout": 0}
    engine = Engine(SimpleNamespace(model_id="m", model_loading_config=loading, engine_kwargs=kwargs))
    await engine.start()
    await engine.check_health()
    said = [{"role": "user", "content": "hello"}]
    body = {"messages": said, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    (whole,) = await all_of(engine.chat(Request(**body)))
    events = await all_of(engine.chat(Request(**body, stream=True)))
    (refused,) = await all_of(engine.completions(Request(prompt="a", max_tokens=-1)))
    (tokens,) = await all_of(engine.tokenize(Request(prompt="hello")))
    await engine.sleep(level=1)
    slept = await engine.is_sleeping()
    await engine.wakeup()
    awake = not await engine.is_sleeping()
    (again,) = await all_of(engine.chat(Request(**body)))
    await engine.shutdown()
    parts = [json.loads(event[6:])["choices"] for event in events[:-1]]
    text = "".join(part[0]["delta"].get("content") or "" for part in parts if part)
    answer = whole.choices[0]["message"]["content"]
    found = [answer, text, again.choices[0]["message"]["content"], events[-1], refused.error["code"],
             tokens.count, slept, awake, whole.model]
    print("\\nanswer:", json.dumps(found))


asyncio.run(main())
"""


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.skipif(not has_ray(), reason="make test-ray installs it")
def test_it_answers_streams_refuses_and_sleeps() -> None:
    nodes = RayNodes()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT],
            capture_output=True, text=True, env=nodes.environment, cwd="/", check=False,
        )  # fmt: skip
    finally:
        nodes.close()
    assert done.returncode == 0, done.stderr[-3000:]
    answer, text, again, end, code, count, slept, awake, model = answer_in(done.stdout)
    assert answer and answer == text == again and end == "data: [DONE]\n\n"
    assert code == 400 and count > 0 and slept and awake and model == "m"

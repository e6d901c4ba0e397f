"""Ollama's client, and frameworks on top of it, against a real server: answers, streams, tools, formats, models."""

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagewire.tools.servers import Server

REASON = "make test-clients installs it"
ollama: Any = pytest.importorskip("ollama", reason=REASON)
langchain: Any = pytest.importorskip("langchain_ollama", reason=REASON)
llama_index: Any = pytest.importorskip("llama_index.llms.ollama", reason=REASON)

# They leave connections to the garbage collector, and their warnings do not concern us.
pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
MODEL = "pagewire-demo"
QUESTION = "Count from 1 to 5"
ANSWER = "1, 2, 3, 4, 5"
WEATHER = "What is the weather in Paris?"
GREEDY = {"temperature": 0}


def get_weather(city: str) -> str:
    """Get the weather of a city

    Args:
        city: the city's name
    """
    return "sunny"


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def client(server: Server) -> Any:
    return ollama.Client(host=server.url)


def test_chat_plain_and_streamed(client: Any) -> None:
    answer = client.chat(MODEL, asked(QUESTION), options=GREEDY)
    assert answer.message.content == ANSWER and answer.done and answer.done_reason == "stop"
    assert answer.eval_count > 10 and answer.total_duration > answer.eval_duration > 0
    for _ in range(20):  # on a busy machine many tokens may come in one part
        parts = list(client.chat(MODEL, asked(QUESTION), options=GREEDY, stream=True))
        assert "".join(part.message.content for part in parts) == ANSWER
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        if len(parts) > 5:
            break
    assert len(parts) > 5


def test_generate_and_raw(client: Any) -> None:
    assert client.generate(MODEL, QUESTION, options=GREEDY).response == ANSWER
    parts = client.generate(MODEL, QUESTION, options=GREEDY | {"num_predict": 3}, stream=True)
    assert [*parts][-1].done_reason == "length"
    raw = client.generate(MODEL, "One, two, three,", raw=True, options=GREEDY | {"num_predict": 8})
    assert raw.response and raw.eval_count <= 8
    assert client.generate(MODEL).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="no tokens for infilling"):
        client.generate(MODEL, "a", suffix="b")


def test_a_tool_loop(client: Any) -> None:
    for streamed in (False, True):
        messages: list[Any] = asked(WEATHER)
        answer = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY, stream=streamed)
        parts = list(answer) if streamed else [answer]
        (call,) = [call for part in parts for call in part.message.tool_calls or ()]
        assert call.function.name == "get_weather" and call.function.arguments == {"city": "Paris"}
        content = "".join(part.message.content or "" for part in parts)
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
        ]
        assert "sunny" in client.chat(MODEL, messages, tools=[get_weather], options=GREEDY).message.content


def test_formats(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
    }
    for stream in (False, True):
        answer = client.chat(MODEL, asked(WEATHER), format=schema, options=GREEDY, stream=stream)
        text = "".join(part.message.content for part in answer) if stream else answer.message.content
        assert json.loads(text).keys() == {"city", "warm"}


def test_models(client: Any) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    shown = client.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities) and shown.template
    assert client.ps().models[0].context_length == shown.modelinfo["pagewire.context_length"]
    assert [state.status for state in client.pull(MODEL, stream=True)][-1] == "success"
    for arguments in (("pull", "llama3"), ("chat", "llama3", asked("hi"))):
        with pytest.raises(ollama.ResponseError) as refused:
            getattr(client, arguments[0])(*arguments[1:])
        assert refused.value.status_code == 404 and "llama3" in refused.value.error


def test_vectors(client: Any) -> None:
    both = client.embed(MODEL, ["a cat", "a dog"]).embeddings
    assert len(both) == 2 and abs(sum(x * x for x in both[0]) - 1) < 1e-3
    assert len(client.embeddings(MODEL, "a cat").embedding) == len(both[0])


async def _streamed(url: str) -> str:
    client = ollama.AsyncClient(host=url)
    stream = await client.chat(MODEL, asked(QUESTION), options=GREEDY, stream=True)
    return "".join([part.message.content async for part in stream])


def test_the_asynchronous_client(server: Server) -> None:
    assert asyncio.run(_streamed(server.url)) == ANSWER


def test_langchain(server: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain.ChatOllama(model=MODEL, base_url=server.url, temperature=0, validate_model_on_init=True)
    assert model.invoke(QUESTION).content == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER
    bound = model.bind_tools([get_weather])
    call = bound.invoke(WEATHER)
    assert [(one["name"], one["args"]) for one in call.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])
    assert "sunny" in bound.invoke([HumanMessage(WEATHER), call, result]).content
    vectors = langchain.OllamaEmbeddings(model=MODEL, base_url=server.url).embed_documents(["a", "b"])
    assert len(vectors) == 2
    assert langchain.OllamaLLM(model=MODEL, base_url=server.url, temperature=0).invoke(QUESTION) == ANSWER


def test_llama_index(server: Server) -> None:
    core: Any = pytest.importorskip("llama_index.core.llms")
    tools: Any = pytest.importorskip("llama_index.core.tools")
    model = llama_index.Ollama(model=MODEL, base_url=server.url, temperature=0, context_window=512)
    question = core.ChatMessage(role="user", content=QUESTION)
    assert model.chat([question]).message.content == ANSWER
    assert [*model.stream_chat([question])][-1].message.content == ANSWER
    assert model.complete(QUESTION).text == ANSWER
    answer = model.chat_with_tools([tools.FunctionTool.from_defaults(get_weather)], user_msg=WEATHER)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather" and call.tool_kwargs == {"city": "Paris"}


def test_the_requests_of_open_webui(server: Server) -> None:
    """In the order and the shape in which its backend sends them: it lists, asks for the version, and streams."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.head("/").status_code == 200
        (model,) = http.get("/api/tags").json()["models"]
        assert model["model"] == model["name"] == MODEL and model["details"].keys() >= {"family", "parameter_size"}
        assert [int(part) for part in http.get("/api/version").json()["version"].split(".")] > [0, 1, 20]
        assert http.get("/api/ps").json()["models"][0]["expires_at"]
        payload = {
            "model": model["model"],
            "messages": asked(QUESTION),
            "options": {"temperature": 0, "num_ctx": 2048, "stop": []},
            "stream": True,
            "keep_alive": "5m",
            "metadata": {"chat_id": "1"},
        }
        with http.stream("POST", "/api/chat", content=json.dumps(payload)) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            parts = [json.loads(line) for line in answer.iter_lines()]
        assert "".join(part["message"]["content"] for part in parts) == ANSWER and parts[-1]["eval_count"] > 10
        title = {"model": MODEL, "messages": asked("Hello"), "stream": False, "options": {"num_predict": 4}}
        assert http.post("/api/chat", json=title).json()["done"] is True
        assert http.post("/api/embed", json={"model": MODEL, "input": ["a"], "truncate": True}).json()["embeddings"]


def test_llama_servers_requests(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        question = {"prompt": "One, two, three,", "n_predict": 8, "temperature": 0}
        whole = http.post("/completion", json=question).json()
        assert whole["stop"] is True and whole["tokens_predicted"] <= 8
        with http.stream("POST", "/completion", json=question | {"stream": True}) as answer:
            events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
        assert "".join(event["content"] for event in events) == whole["content"] and events[-1]["stop"] is True
        props = http.get("/props").json()
        assert props["chat_template"] and len(http.get("/slots").json()) == props["total_slots"]
        assert http.get("/health").json() == {"status": "ok"}

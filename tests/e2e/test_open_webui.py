"""Open WebUI against real servers, configured as docs/clients.md says. It is asked as its page asks it.

What it sends to a model holds its own tools, so a script answers; the demo model makes the vectors of its documents."""

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

from pagewire.tools.servers import ROOT, Server

OPEN_WEBUI = Path(__file__).parent / "agents" / ".venv-webui" / "bin" / "open-webui"
DOC = (ROOT / "docs" / "clients.md").read_text()
OFFLINE = {"OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False", "WEBUI_SECRET_KEY": "s"}
CALL = json.dumps({"name": "get_weather", "arguments": {"city": "Paris"}})
SCRIPT = [
    {"when": "</chat_history>", "say": '{"title": "Weather in Paris"}'},
    {"when": "sunny", "say": "It is sunny in Paris."},
    {"when": "weather in Paris", "say": f"<tool_call>\n{CALL}\n</tool_call>"},
    {"say": "I do not know."},
]
TOOL = '''
class Tools:
    def get_weather(self, city: str) -> str:
        """
        Get the weather of a city
        :param city: its name
        """
        return "sunny"
'''
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.clients,
    pytest.mark.skipif(not OPEN_WEBUI.exists(), reason="make test-webui installs it"),
]


def settings(name: str, servers: dict[str, Server]) -> dict[str, str]:
    """The variables of the documented line that begins with `name`; `servers`: by the beginnings of variables."""
    (line,) = re.findall(rf"^({name}=.*?)(?: open-webui serve)?$", DOC, re.MULTILINE)
    found = dict(pair.split("=", 1) for pair in line.split())
    for variable, value in found.items():
        for begin, server in servers.items():
            if variable.startswith(begin):
                found[variable] = value.replace("http://127.0.0.1:8000", server.url)
    return found


def open_webui(folder: Path, environment: dict[str, str]) -> Iterator[httpx.Client]:
    """A client that has signed up."""
    command = (str(OPEN_WEBUI), "serve", "--host", "127.0.0.1")
    program = Server(folder, command=command, environment={**OFFLINE, "DATA_DIR": str(folder), **environment})
    try:
        program.wait_ready("/health", timeout_s=400)
        with httpx.Client(base_url=program.url, timeout=120) as client:
            account = {"name": "A", "email": "a@example.com", "password": "passw0rd!X", "profile_image_url": ""}
            token = client.post("/api/v1/auths/signup", json=account).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
    finally:
        program.close()


@pytest.fixture(scope="module")
def webui(scripted_server: Server, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    servers = {"OPENAI_": scripted_server, "RAG_": server}
    environment = settings("OPENAI_API_BASE_URL", servers) | settings("RAG_EMBEDDING_ENGINE", servers)
    yield from open_webui(tmp_path_factory.mktemp("webui"), environment)


@pytest.fixture(scope="module")
def webui_by_ollama(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    environment = settings("OLLAMA_BASE_URL", {"OLLAMA_": server})
    yield from open_webui(tmp_path_factory.mktemp("ollama"), {**environment, "RAG_EMBEDDING_ENGINE": "ollama"})


def ask(client: httpx.Client, question: str, **more: object) -> dict[str, Any]:
    """Sends a question as the page does: to a chat that is stored, into which the answer is written. The chat."""
    asked, answer = str(uuid.uuid4()), str(uuid.uuid4())
    messages = {
        asked: {"id": asked, "parentId": None, "childrenIds": [answer], "role": "user", "content": question},
        answer: {"id": answer, "parentId": asked, "childrenIds": [], "role": "assistant", "content": "", "done": False},
    }
    history = {"messages": messages, "currentId": answer}
    chat = {"title": "New Chat", "models": ["pagewire-demo"], "history": history, "messages": list(messages.values())}
    number = client.post("/api/v1/chats/new", json={"chat": chat}).json()["id"]
    body = {
        "model": "pagewire-demo", "stream": True, "messages": [{"role": "user", "content": question}],
        "chat_id": number, "id": answer, "session_id": "s", "background_tasks": {"title_generation": True}, **more,
    }  # fmt: skip
    assert client.post("/api/chat/completions", json=body).status_code == 200
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(client.get(f"/api/v1/chats/{number}").json())
        is_done = found["chat"]["history"]["messages"][answer].get("done")
        return bool(is_done) and found["title"] != "New Chat"

    until(has_ended, lambda: f"the answer and the title: {found}", 120)
    return {"title": found["title"], **found["chat"]["history"]["messages"][answer]}


def test_a_question_runs_a_tool_and_the_chat_gets_a_title(webui: httpx.Client, scripted_server: Server) -> None:
    models = webui.get("/api/models").json()["data"]
    assert [model["id"] for model in models] == ["pagewire-demo"]
    tool = {"id": "weather", "name": "weather", "content": TOOL, "meta": {"description": "Weather", "manifest": {}}}
    assert webui.post("/api/v1/tools/create", json=tool).status_code == 200
    answer = ask(webui, "What is the weather in Paris?", tool_ids=["weather"])
    assert answer["content"].endswith("It is sunny in Paris."), answer
    assert answer["title"] == "Weather in Paris"
    assert not re.findall(r"(?:POST|GET) \S+ [45]\d\d ", scripted_server.log.read_text())


def test_documents_are_found_by_the_servers_vectors(webui: httpx.Client) -> None:
    text = "Paris is the capital of France."
    file = webui.post("/api/v1/files/", files={"file": ("a.txt", text, "text/plain")}).json()["id"]
    question = {"collection_name": f"file-{file}", "query": "capital"}
    until(
        lambda: webui.get(f"/api/v1/files/{file}/process/status").json()["status"] == "completed",
        "the document is read", 120,
    )  # fmt: skip
    assert webui.post("/api/v1/retrieval/query/doc", json=question).json()["documents"] == [[text]]


def test_it_uses_ollamas_api(webui_by_ollama: httpx.Client) -> None:
    assert [model["owned_by"] for model in webui_by_ollama.get("/api/models").json()["data"]] == ["ollama"]
    question = [{"role": "user", "content": "Count from 1 to 5"}]
    body = {"model": "pagewire-demo", "messages": question, "stream": False, "temperature": 0}
    answer = webui_by_ollama.post("/api/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"
    with webui_by_ollama.stream("POST", "/api/chat/completions", json=body | {"stream": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "1, 2, 3, 4, 5"
    pulled = webui_by_ollama.post("/ollama/api/pull/0", json={"model": "pagewire-demo"}).text
    assert json.loads(pulled.splitlines()[-1]) == {"status": "success"}
    vectors = webui_by_ollama.post("/ollama/api/embed", json={"model": "pagewire-demo", "input": ["a"]}).json()
    assert len(vectors["embeddings"]) == 1


def test_a_small_context_is_enough_without_its_own_tools(server: Server, tmp_path: Path) -> None:
    (line,) = re.findall(r"^DEFAULT_MODEL_PARAMS='(.*)'$", DOC, re.MULTILINE)
    environment = settings("OPENAI_API_BASE_URL", {"OPENAI_": server}) | {"DEFAULT_MODEL_PARAMS": line}
    for client in open_webui(tmp_path, {**environment, "RAG_EMBEDDING_ENGINE": "openai"}):
        assert ask(client, "Count from 1 to 5")["content"] == "1, 2, 3, 4, 5"

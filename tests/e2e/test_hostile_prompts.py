"""Chat templates that never finish, and texts that are too long: each fails its own request, and no other."""

import asyncio
import shutil
import sys
from collections.abc import Iterator

import httpx
import pytest

from pagewire.tools.servers import ROOT, SERVE, Server

TEMPLATE = """{%- set text = messages[-1].content -%}{%- set n = messages | length -%}
{%- if text == 'loop' -%}{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif text == 'stuck' -%}{%- set one = [[['x'] * 9999] * 9999] * 9999 -%}
{%- set other = [[['x'] * 9999] * 9999] * 9999 -%}{{ one == other }}
{%- elif text == 'memory' -%}{{ ('x' * (n * 10 ** 10)) | length }}
{%- elif text == 'long' -%}{%- for i in range(99999) -%}{{ 'x' * 1000 }}{%- endfor -%}
{%- endif -%}<|im_start|>user
{{ text }}<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(ROOT / "demo_model", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("torch.py", "jinja2.py", "llguidance.py", "sitecustomize.py"):  # the server may run in such a folder
        (folder / name).write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    command = (sys.executable, "-P", *SERVE[1:])  # as the installed command runs
    with Server(folder, str(folder / "model"), "--trust-request-chat-template", command=command) as server:
        yield server
    assert not (folder / "ran").exists(), "code of the working folder was run"


async def _chat(client: httpx.AsyncClient, text: str, **more: object) -> tuple[int, str]:
    """(status, text of the answer or error message)"""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **more}
    response = await client.post("/v1/chat/completions", json=body)
    answer = response.json()
    message = answer["error"]["message"] if response.is_error else answer["choices"][0]["message"]["content"]
    return response.status_code, message


@pytest.mark.long
def test_a_template_that_exceeds_its_limits_fails_only_its_own_request(server: Server) -> None:
    before = {name: process.pid for name, process in server.children().items()}
    usual = "Count from 1 to 5"

    async def beside(client: httpx.AsyncClient, *hostile: str) -> tuple[list[tuple[int, str]], int]:
        """The answers to the hostile requests, and the number of usual requests that were answered meanwhile."""
        expected = await _chat(client, usual)
        tasks = [asyncio.create_task(_chat(client, text)) for text in hostile]
        num_others = 0
        while not all(task.done() for task in tasks):
            assert await _chat(client, usual) == expected and expected[0] == 200
            num_others += 1
        return [await task for task in tasks], num_others

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            # Native code blocks the process, which is killed. Its replacement renders this prompt in the sandbox.
            ((status, message),), _ = await beside(client, "stuck")
            assert (status, message) == (400, "The chat template takes more than 2 s for this prompt: shorten it.")
            # From now on every prompt is rendered there, so that no request waits for a hostile one.
            num_others = 0
            for _ in range(5):  # this process may not run while the loop does, for 2 s of CPU
                (loop, memory), num = await beside(client, "loop", "memory")
                assert loop == (status, message)
                assert memory[0] == 400 and "takes more memory than it may" in memory[1]
                num_others = max(num, num_others)
                if num_others > 2:
                    break
            assert num_others > 2
            status, message = await _chat(client, "long")
            assert status == 400 and "characters" in message

    asyncio.run(scenario())
    after = {name: process.pid for name, process in server.children().items()}
    assert {name for name in before if before[name] != after[name]} == {"tokenizer"}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ 'x' * 10 ** 10 }}", "more memory"),
        ("{" * 4, "not valid jinja"),
    ],
)
def test_a_hostile_template_in_a_request_is_refused(server: Server, template: str, words: str) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            status, message = await _chat(client, "hi", chat_template=template)
            assert status == 400 and words in message

    asyncio.run(scenario())


def test_a_text_with_more_bytes_than_the_context_can_hold_is_refused(server: Server) -> None:
    body = {"prompt": "x " * 4_000_000, "max_tokens": 1}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    words = "This model's maximum context length is 8192 tokens. However, the prompt has 8000000 bytes, more than the "
    assert error["message"].startswith(words)

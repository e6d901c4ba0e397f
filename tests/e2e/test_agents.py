"""Coding agents against a real server, configured as docs/clients.md says.

Their prompts are longer than the demo model's context. So the server's chat template shows the model only the last line
of the last question: the model's answer can be checked, and the server still reads whole requests of the agents."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.tools.servers import ROOT, Server

AGENTS = Path(__file__).parent / "agents" / "node_modules"
CLAUDE = AGENTS / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"  # works without npm's install scripts
CODEX = AGENTS / "@openai" / "codex" / "bin" / "codex.js"
DOC = (ROOT / "docs" / "clients.md").read_text()
TEMPLATE = """
{%- set last = namespace(text='') -%}
{%- for message in messages if message.role == 'user' -%}
{%- set content = message.content if message.content is string else message.content[-1].text -%}
{%- set last.text = content.strip().split('\\n')[-1] -%}
{%- endfor -%}
{{- '<|im_start|>user\\n' ~ last.text ~ '<|im_end|>\\n<|im_start|>assistant\\n' -}}
"""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.clients,
    pytest.mark.skipif(not AGENTS.exists(), reason="make test-agents installs them"),
]


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "last.jinja").write_text(TEMPLATE)
    with Server(folder, "--chat-template", str(folder / "last.jinja")) as server:
        yield server


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs an agent with `folder` as its home, where agents keep settings and sessions."""
    return subprocess.run(
        ["node", *command],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def claude(server: Server, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (line,) = re.findall(r"^(ANTHROPIC_\S+=.*) claude$", DOC, re.MULTILINE)
    environment = dict(pair.split("=", 1) for pair in line.replace("http://127.0.0.1:8000", server.url).split())
    return run(folder, str(CLAUDE), *arguments, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", **environment)


def codex(server: Server, folder: Path, question: str) -> subprocess.CompletedProcess[str]:
    (config,) = re.findall(r"^```toml\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    (folder / ".codex").mkdir(exist_ok=True)
    (folder / ".codex" / "config.toml").write_text(config.replace("http://127.0.0.1:8000", server.url))
    return run(folder, str(CODEX), "exec", "--skip-git-repo-check", "--sandbox", "read-only", question)


def refusals(server: Server) -> list[str]:
    """The refused requests in the server's log."""
    return re.findall(r"(?:POST|GET) \S+ [45]\d\d ", server.log.read_text())


def test_claude_code_answers_and_continues_a_conversation(agents_server: Server, tmp_path: Path) -> None:
    answer = claude(agents_server, tmp_path, "-p", "Count from 1 to 5")
    assert answer.stdout.strip() == "1, 2, 3, 4, 5", answer.stdout + answer.stderr
    continued = claude(agents_server, tmp_path, "-c", "-p", "Count from 2 to 4")
    assert continued.stdout.strip() == "2, 3, 4", continued.stdout + continued.stderr
    assert "POST /v1/messages 200" in agents_server.log.read_text() and not refusals(agents_server)


def test_codex_answers(agents_server: Server, tmp_path: Path) -> None:
    answer = codex(agents_server, tmp_path, "Count from 1 to 5")
    assert answer.stdout.strip() == "1, 2, 3, 4, 5", answer.stdout + answer.stderr
    assert "POST /v1/responses 200" in agents_server.log.read_text() and not refusals(agents_server)


def test_agents_report_a_prompt_that_is_longer_than_the_context(server: Server, tmp_path: Path) -> None:
    """With the demo model's own template the agents' prompts do not fit."""
    answer = claude(server, tmp_path, "-p", "Count from 1 to 5")
    assert re.search(r"Prompt is too long.*~\d{5} tokens \(limit 8192\)", answer.stdout), answer.stdout + answer.stderr
    answer = codex(server, tmp_path, "Count from 1 to 5")
    assert "ran out of room in the model's context window" in answer.stderr, answer.stdout + answer.stderr

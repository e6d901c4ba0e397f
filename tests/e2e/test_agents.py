"""Coding agents against a real server, configured as docs/clients.md says.

Their prompts are longer than the demo model's context. So the server's chat template shows the model only the last line
of the last question: the model's answer can be checked, and the server still reads whole requests of the agents."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.tools.servers import ROOT, Server

AGENTS = Path(__file__).parent / "agents" / "node_modules"
CLAUDE = AGENTS / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"  # works without npm's install scripts
OPENCODE = AGENTS / "opencode-linux-x64-baseline" / "bin" / "opencode"
CONTINUE = AGENTS / "@continuedev" / "cli" / "dist" / "cn.js"
QWEN = AGENTS / ".bin" / "qwen"
AIDER = Path(__file__).parent / "agents" / ".venv-aider" / "bin" / "aider"
FRAMEWORKS = Path(__file__).parent / "agents" / ".venv" / "bin" / "python"
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


def call(name: str, **arguments: object) -> str:
    """A tool call in the demo model's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


COUNT = "wc -l notes.txt"
EDIT = "notes.txt\n```\n<<<<<<< SEARCH\nc\n=======\nc\nd\n>>>>>>> REPLACE\n```\n"
SCRIPT = [
    {"when": "Claude, how many lines", "say": call("Bash", command=COUNT, description="Count lines")},
    {"when": "Codex, how many lines", "say": call("exec_command", cmd=COUNT)},
    {"when": "Continue, how many lines", "say": call("Bash", command=COUNT)},
    {"when": "Qwen, how many lines", "say": call("run_shell_command", command=COUNT, is_background=False)},
    {"when": "opencode, how many lines", "say": call("bash", command=COUNT, description="Count lines")},
    {"when": "(?<!smol)Agent, how many lines", "say": call("num_lines", path="notes.txt")},
    {"when": "smolAgent, how many lines", "say": call("num_lines", path="notes.txt")},
    {"when": "smolAgent.*3 notes\\.txt", "say": call("final_answer", answer="It has 3 lines.")},
    {"when": "3 notes\\.txt", "say": "It has 3 lines."},
    {"when": "Aider, add a line", "say": EDIT},
    {"say": "I do not know."},
]
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("a\nb\nc\n")
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs an agent with `folder` as its home, where agents keep settings and sessions."""
    return subprocess.run(
        command,
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
    return run(folder, "node", str(CLAUDE), *arguments, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", **environment)


def codex(server: Server, folder: Path, question: str) -> subprocess.CompletedProcess[str]:
    (config,) = re.findall(r"^```toml\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    (folder / ".codex").mkdir(exist_ok=True)
    (folder / ".codex" / "config.toml").write_text(config.replace("http://127.0.0.1:8000", server.url))
    return run(folder, "node", str(CODEX), "exec", "--skip-git-repo-check", "--sandbox", "read-only", question)


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


def environment_of(server: Server, program: str) -> dict[str, str]:
    """The variables with which docs/clients.md starts the program."""
    (line,) = re.findall(rf"^(OPENAI_\S+=.*) {program}\b", DOC, re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.replace("http://127.0.0.1:8000", server.url).split())


def test_claude_code_uses_a_tool_and_goes_on_with_the_conversation(scripted_server: Server, project: Path) -> None:
    question = "Claude, how many lines has notes.txt?"
    answer = claude(scripted_server, project, "-p", "--allowedTools", "Bash", "--", question)
    assert answer.stdout.strip() == "It has 3 lines.", answer.stdout + answer.stderr
    resumed = claude(scripted_server, project, "-c", "-p", "Why?")
    assert resumed.stdout.strip() == "It has 3 lines.", resumed.stdout + resumed.stderr  # the history is in the prompt


def test_codex_uses_a_tool(scripted_server: Server, project: Path) -> None:
    answer = codex(scripted_server, project, "Codex, how many lines has notes.txt?")
    assert answer.stdout.strip() == "It has 3 lines.", answer.stdout + answer.stderr


def test_opencode_uses_a_tool(scripted_server: Server, project: Path) -> None:
    (config,) = re.findall(r"^```json\n(\{\n  \"\$schema\".*?)^```", DOC, re.MULTILINE | re.DOTALL)
    (project / "opencode.json").write_text(config.replace("http://127.0.0.1:8000", scripted_server.url))
    answer = run(project, str(OPENCODE), "run", "opencode, how many lines has notes.txt?")
    assert "It has 3 lines." in answer.stdout, answer.stdout + answer.stderr


def test_qwen_code_uses_a_tool(scripted_server: Server, project: Path) -> None:
    question = "Qwen, how many lines has notes.txt?"
    answer = run(project, "node", str(QWEN), "--yolo", "-p", question, **environment_of(scripted_server, "qwen"))
    assert answer.stdout.strip() == "It has 3 lines.", answer.stdout + answer.stderr


def test_continue_uses_a_tool(scripted_server: Server, project: Path) -> None:
    (config,) = re.findall(r"^```yaml\n(name: pagewire\n.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    (project / ".continue").mkdir()
    (project / ".continue" / "config.yaml").write_text(config.replace("http://127.0.0.1:8000", scripted_server.url))
    answer = run(project, "node", str(CONTINUE), "--allow", "Bash", "-p", "Continue, how many lines has notes.txt?")
    assert answer.stdout.strip() == "It has 3 lines.", answer.stdout + answer.stderr
    assert not refusals(scripted_server)


@pytest.mark.skipif(not AIDER.exists(), reason="make test-agents installs it")
def test_aider_edits_a_file(scripted_server: Server, project: Path) -> None:
    quiet = ("--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-git", "--edit-format", "diff")
    answer = run(
        project, str(AIDER), "--model", "openai/pagewire-demo", *quiet, "--message", "Aider, add a line", "notes.txt",
        **environment_of(scripted_server, "aider"),
    )  # fmt: skip
    assert (project / "notes.txt").read_text() == "a\nb\nc\nd\n", answer.stdout + answer.stderr


@pytest.mark.skipif(not FRAMEWORKS.exists(), reason="make test-agents installs them")
@pytest.mark.parametrize(("name", "times"), [("openai-agents", 2), ("langgraph", 1), ("smolagents", 1)])
def test_a_framework_uses_a_tool(name: str, times: int, scripted_server: Server, project: Path) -> None:
    script = Path(__file__).parent / "agents" / "frameworks.py"
    answer = run(project, str(FRAMEWORKS), str(script), scripted_server.url, name)
    assert answer.stdout.split("\n")[-1 - times : -1] == ["It has 3 lines."] * times, answer.stdout + answer.stderr

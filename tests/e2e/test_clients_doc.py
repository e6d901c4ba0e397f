"""Runs the snippets of docs/clients.md and compares their output with the block below each."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from pagewire.tools.servers import ROOT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.clients]
NODE = ROOT / "tests" / "e2e" / "node"
SNIPPET = re.compile(r"^## (.+?)\n.*?^```(python|js)\n(.*?)^```\n\n^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = SNIPPET.findall((ROOT / "docs" / "clients.md").read_text())


def test_every_section_has_a_snippet() -> None:
    """Chat interfaces and agents have settings instead; `test_agents.py` uses those of agents."""
    libraries = (ROOT / "docs" / "clients.md").read_text().partition("\n# Chat interfaces\n")[0]
    assert len(SNIPPETS) == libraries.count("\n## ") > 5


@pytest.mark.parametrize(("client", "language", "code", "printed"), SNIPPETS, ids=[snippet[0] for snippet in SNIPPETS])
def test_a_snippet_prints_its_documented_output(
    server: Server, client: str, language: str, code: str, printed: str
) -> None:
    if language == "python":
        packages = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        command = [sys.executable, "-c"]
    else:
        missing = [] if shutil.which("node") and (NODE / "node_modules").exists() else ["Node.js or its packages"]
        command = ["node", "--input-type=module", "--eval"]
    if missing:
        pytest.skip(f"{missing[0]} is missing: make test-clients")
    result = subprocess.run(
        [*command, code.replace("http://127.0.0.1:8000", server.url)],
        cwd=NODE,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == printed, result.stderr

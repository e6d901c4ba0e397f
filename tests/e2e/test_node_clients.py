"""The npm packages `openai`, `ai` and `ollama` against a real server; node/ contains the tests."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pagewire.tools.servers import Server

FOLDER = Path(__file__).parent / "node"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js"),
    pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="make test-clients installs the npm packages"),
]


@pytest.mark.parametrize("file", ["clients.test.mjs", "structured.test.mjs", "ollama.test.mjs"])
def test_the_tests_in_node_pass(server: Server, file: str) -> None:
    result = subprocess.run(
        ["node", "--test", "--test-reporter=spec", file],
        cwd=FOLDER,
        env=os.environ | {"URL": server.url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

"""The image of deploy/Dockerfile, where a docker daemon answers: it is built, it serves, and it is within its budget.

pip must know where torch's CPU builds are (PIP_EXTRA_INDEX_URL, as in docs/operations.md).
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from pagewire.tools.image_size import BUDGET_MB

ROOT = Path(__file__).parents[2]
KEY = "of-the-image"

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def docker(*args: str, timeout_s: float = 60) -> str:
    ran = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not ran.returncode, ran.stderr[-2000:]
    return ran.stdout.strip()


@pytest.fixture
def image() -> Iterator[str]:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no docker daemon answers")
    if not (address := os.environ.get("PIP_EXTRA_INDEX_URL")):
        pytest.skip("PIP_EXTRA_INDEX_URL does not say where torch's CPU builds are")
    name = f"pagewire-test-{uuid.uuid4().hex[:12]}"
    flags = ("--build-arg", f"PIP_FLAGS=--extra-index-url {address}")
    docker("build", "-f", str(ROOT / "deploy/Dockerfile"), *flags, "-t", name, str(ROOT), timeout_s=3600)
    yield name
    docker("image", "rm", name)


def test_the_image_serves_and_is_within_its_budget(image: str) -> None:
    assert int(docker("image", "inspect", "--format", "{{.Size}}", image)) < BUDGET_MB * 1e6
    publish = ("--publish", "127.0.0.1::8000", "--env", f"PAGEWIRE_API_KEY={KEY}")
    container = docker("run", "--detach", *publish, image, "serve", "demo", "--host", "0.0.0.0")
    try:
        base = f"http://{docker('port', container, '8000/tcp').splitlines()[0]}"

        def is_ready() -> bool:
            try:
                return bool(urllib.request.urlopen(f"{base}/ready", timeout=5).status == 200)
            except (urllib.error.URLError, OSError):
                return False

        until(is_ready, lambda: docker("logs", "--tail", "20", container), timeout_s=300)
        body = json.dumps({"model": "pagewire-demo", "prompt": "Hello", "max_tokens": 4}).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base}/v1/completions", body, headers), timeout=60) as got:
            answer = json.load(got)
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        docker("rm", "--force", container)

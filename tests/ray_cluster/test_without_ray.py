"""What the extra is needed for says so in one sentence, and nothing else needs it."""

import os
import subprocess
import sys

import pytest
from ray_nodes import has_ray

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(has_ray(), reason="Ray is installed")]


def test_the_extra_is_named() -> None:
    command = [sys.executable, "-m", "pagewire", "serve", "--backend", "ray", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "pagewire: Ray is not installed here. Run pip install 'pagewire[ray]', on all nodes.\n",
    )

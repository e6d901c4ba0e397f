"""A GPU kernel breaks the device of the first worker: the server still comes up, with a second worker that leaves the
kernel out.

The workers run the Triton kernels in Triton's interpreter. The fault is planted into their processes by a
`sitecustomize` module.
"""

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagewire.tools.servers import SERVE, Server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the fault is planted into the interpreter"),
]

PLANT = """
import os, sys

if "pagewire.procs.template" in sys.orig_argv:
    from pagewire.procs.worker import Worker

    start = Worker.start

    def planted_start(self, post):
        from pagewire.tools.triton_interpreter import interpret

        interpret()
        import torch
        from pagewire.engine.device.queue import EagerQueue
        from pagewire.engine.gpu import walk
        from pagewire.engine.runner.runner import Runner

        class BrokenQueue(EagerQueue):
            is_broken = False

            def mark(self):
                if self.is_broken:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return super().mark()

        queue, load = BrokenQueue(torch.device("cpu")), Runner.load

        def planted_load(config, **given):
            return load(config, queue=queue, is_checked=True, **given)

        def breaking(*args, **options):
            queue.is_broken = True

        walk.rms_norm = breaking
        Runner.load = planted_load
        start(self, post)

    Worker.start = planted_start
"""


def test_a_kernel_that_breaks_the_device_is_left_out_at_the_first_start(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plant").mkdir()
    (tmp_path / "plant" / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "plant"), os.environ.get("PYTHONPATH", "")]))
    # The journal of the trial cannot be written, so the second worker knows the kernel from the supervisor only.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    small = ("--cpu-kernels", "torch", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    server = start(*small, "--max-model-len", "64", command=SERVE).wait_ready(timeout_s=400)
    log = server.log.read_text()
    assert "The check of the GPU kernel rms_norm broke the device for this process (RuntimeError: CUDA error" in log
    assert "Replacing worker." in log and "The GPU kernel rms_norm failed its check: it broke the device" in log
    assert 'kernel="rms_norm"} 1' in server.get("/metrics")
    body = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 2

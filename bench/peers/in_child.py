"""A peer without a server: runs its Python API in a child process, in the environment where it is installed."""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .base import RUN_TIMEOUT_S, START_TIMEOUT_S, Load, PeerError, Request, Stream

# Makes this folder a package in an interpreter without pagewire, and calls one module's `child`.
_BOOT = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("bench_peers", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
sys.modules["bench_peers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["bench_peers"])
importlib.import_module("bench_peers." + sys.argv[2]).child(sys.argv[3:])
"""


def has_modules(python: str, *modules: str) -> bool:
    """Whether the interpreter finds all modules; imports none."""
    code = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(name) for name in sys.argv[1:]))"
    try:
        command = [python, "-P", "-c", code, *modules]
        return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class InChild:
    """A started child that runs `child` of a module of this folder."""

    def __init__(self, python: str, module: str, load: Load) -> None:
        from .process_tree import ProcessTree  # the child imports this file, and has neither psutil nor pagewire

        settings = [str(load.converted), str(load.num_streams), str(load.max_len), str(load.kv_bytes)]
        command = [python, "-P", "-c", _BOOT, str(Path(__file__).parent.resolve()), module, *settings]
        self._rest = b""
        self._log = load.log
        load.log.parent.mkdir(parents=True, exist_ok=True)
        with load.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self.meter = ProcessTree(self._process)

    def wait_ready(self) -> None:
        self._receive(START_TIMEOUT_S)

    def run(self, requests: Sequence[Request]) -> list[Stream]:
        line = json.dumps([[request.prompt, request.num_tokens] for request in requests])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error("it closed its input") from None
        answer = self._receive(RUN_TIMEOUT_S)
        streams = [Stream(0.0, times, len(times)) for times in answer["times"]]
        for stream, request in zip(streams, requests, strict=True):
            if stream.num_tokens != request.num_tokens:
                raise PeerError(f"a stream had {stream.num_tokens} tokens instead of {request.num_tokens}")
        return streams

    def stop(self) -> None:
        from ...tools.servers import end

        self.meter.close()
        with contextlib.suppress(BrokenPipeError), self._process:  # which closes the pipes
            end(self._process, self.meter.seen)

    def _error(self, what: str) -> PeerError:
        from ...tools.servers import log_tail

        return PeerError(f"{what}; {log_tail(self._log)}")

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises PeerError."""
        deadline = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._error(f"it did not answer within {timeout_s:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 20)
                if not data:
                    raise self._error("it ended")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._error(answer["error"])
        return answer

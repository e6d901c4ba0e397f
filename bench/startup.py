"""The time from the command to the first answer of /v1/models, compared with `python -c "import torch"`.

`python -m pagewire.bench.startup` runs both in turn and prints medians and the ratio. The limit is 1.5 times two
imports.
"""

import argparse
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from .report import Row, machine, print_table, repeat, write_json

BAR = 1.5 * 2  # imports of torch
_TIMEOUT_S = 120.0


def import_torch_s() -> float:
    """Seconds of a process that imports torch and ends."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def first_answer_s(model: str = "") -> float:
    """Seconds from starting `pagewire serve` to the first answer of /v1/models. The server is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pagewire", "serve", *([model] if model else []), "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - started < _TIMEOUT_S:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                    return time.perf_counter() - started
            except OSError:
                if process.poll() is not None:
                    break
                time.sleep(0.01)
        raise RuntimeError("the server did not answer")
    finally:
        process.terminate()
        process.wait()


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or Hub name; empty: the demo model")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/startup.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    torch_row, serve_row = Row('python -c "import torch"'), Row("pagewire serve → /v1/models")
    import_torch_s()  # warm the disk cache
    repeat(
        arguments.repeat,
        lambda: torch_row.add(seconds=import_torch_s()),
        lambda: serve_row.add(seconds=first_answer_s(arguments.model)),
    )
    print_table([torch_row, serve_row])
    ratio = serve_row.median("seconds") / torch_row.median("seconds")
    print(f"{ratio:.2f} imports of torch; the bar is {BAR:g}")
    write_json(arguments.json, "start-up", [torch_row, serve_row], facts, {"repeat": arguments.repeat})


if __name__ == "__main__":
    main()

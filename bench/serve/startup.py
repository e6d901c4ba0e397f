"""The time from the command to the first answer of /v1/models, compared with `python -c "import torch"`.

`python -m pagewire.bench.serve.startup` runs both in turn and prints medians and the ratio. The limit is 1.5 times two
imports.
"""

import argparse
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from ...tools.servers import PAGEWIRE, Server
from ..report import Row, machine, print_table, repeat, write_json

BAR = 1.5 * 2  # imports of torch


def import_torch_s() -> float:
    """Seconds of a process that only imports torch."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def first_answer_s(model: str = "") -> float:
    """Seconds from starting `pagewire serve` to the first answer of /v1/models. Ends the server."""
    command = (*PAGEWIRE, "serve", *([model] if model else []))
    started = time.perf_counter()
    with closing(Server(command=command)) as server:
        server.wait_ready("/v1/models")
        return time.perf_counter() - started


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or Hub name; empty: the demo model")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/startup.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    torch_row, serve_row = Row('python -c "import torch"'), Row("pagewire serve → /v1/models")
    import_torch_s()  # fills the disk cache
    repeat(
        arguments.repeat,
        lambda: torch_row.add(seconds=import_torch_s()),
        lambda: serve_row.add(seconds=first_answer_s(arguments.model)),
    )
    print_table([torch_row, serve_row])
    ratio = serve_row.median("seconds") / torch_row.median("seconds")
    print(f"{ratio:.2f} imports of torch; the limit is {BAR:g}")
    write_json(arguments.json, "start-up", [torch_row, serve_row], facts, {"repeat": arguments.repeat})


if __name__ == "__main__":
    main()

"""Benchmarks of two checkouts, in turns in one run, so that a noisy moment meets both.

`python -m pagewire.bench.compare ../before . bench.serve.frontend --repeat 1` runs the benchmark in the first checkout,
then in the second, and so on, and prints the medians of all figures and the ratios of the second checkout to the first.
Each checkout runs its own modules and benchmark, with this interpreter. A benchmark that has another name in the
first checkout takes --first-module.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .report import Row, machine, print_table, write_json


def run(checkout: Path, module: str, arguments: list[str]) -> list[Row]:
    """The rows that one run of the benchmark writes. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "rows.json")
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / ".typing")}
        command = [sys.executable, "-m", f"pagewire.{module}", *arguments, "--json", str(output)]
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [Row(row["name"], row["figures"]) for row in json.loads(output.read_text())["rows"]]


def main(argv: list[str] | None = None) -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="a checkout")
    parser.add_argument("second", type=Path, help="another checkout")
    parser.add_argument("module", help="the benchmark, such as bench.serve.frontend")
    parser.add_argument("--first-module", default="", help="its name in the first checkout")
    parser.add_argument("--rounds", type=int, default=5, help="runs in each checkout")
    parser.add_argument("--json", type=Path, default=Path("bench/results/compare.json"), help="where to write")
    arguments, rest = parser.parse_known_args(argv)
    facts = machine()
    turns = (
        ("first", arguments.first, arguments.first_module or arguments.module),
        ("second", arguments.second, arguments.module),
    )
    found: dict[tuple[str, str], Row] = {}
    for number in range(arguments.rounds):
        for name, checkout, module in turns if number % 2 == 0 else reversed(turns):
            for row in run(checkout, module, rest):
                whole = found.setdefault((row.name, name), Row(f"{row.name}, {name}"))
                for column, values in row.figures.items():
                    whole.figures.setdefault(column, []).extend(values)
    rows = list(found.values())
    for title in dict.fromkeys(title for title, _ in found):
        first, second = (found.get((title, name)) for name, _, _ in turns)
        if first is not None and second is not None:
            ratio = Row(f"{title}, second / first")
            for column in first.figures.keys() & second.figures.keys():
                if first.median(column):
                    ratio.add(**{column: second.median(column) / first.median(column)})
            rows.append(ratio)
    print_table(sorted(rows, key=lambda row: row.name))
    write_json(arguments.json, f"comparison of {arguments.module}", rows, facts, {"arguments": rest})


if __name__ == "__main__":
    main()

"""The subcommands of `pagewire bench`."""

import argparse
from collections.abc import Mapping

from ...config.foreign_flags import Flag
from . import engine, serve

# Flags that vLLM's benchmarks have besides those of an engine.
_OWN = frozenset(
    {"--model", "--tokenizer", "--seed", "--predict", "--n-predict", "--temp", "--top-k", "--top-p", "--min-p"}
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    for name, add, text in (
        ("serve", serve.add_flags, "a running server under load"),
        ("throughput", engine.add_throughput_flags, "many requests, without HTTP"),
        ("latency", engine.add_latency_flags, "one batch of requests, without HTTP"),
        ("startup", engine.add_startup_flags, "the time until a server answers"),
    ):
        add(kinds.add_parser(name, help=text, description=f"Measures {text}."))


def without_own(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Other engines' flags that are not the benchmarks' own."""
    return {name: flag for name, flag in flags.items() if name not in _OWN}


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code. Raises PagewireError."""
    match arguments.bench:
        case "serve":
            return serve.main(arguments)
        case "throughput":
            return engine.throughput(arguments)
        case "latency":
            return engine.latency(arguments)
        case _:
            return engine.startup(arguments)

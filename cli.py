"""The `pagewire` command: serve, chat, complete, replay."""

import argparse
import sys

from . import __version__
from .errors import ConfigError, PagewireError
from .flags import add_flags, read_flags


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit code: 0, 1 for our faults, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="pagewire", description="An LLM serving engine made of small processes.")
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI-compatible)",
        description="Serves a model over HTTP. Without MODEL: the small demo model that ships with pagewire.",
    )
    add_flags(serve)

    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talks to a running server, or starts one for MODEL and ends it again. Ctrl-D ends the talk.",
    )
    complete = commands.add_parser(
        "complete",
        help="complete one text",
        description="Streams the completion of PROMPT (or of standard input) from a running server, or starts one.",
    )
    complete.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to go on from; default: standard input")
    for command in (chat, complete):
        command.add_argument("--url", help="server to talk to (default: http://127.0.0.1:8000 if one answers there)")
        command.add_argument("--api-key", default=None, help="key of that server (also PAGEWIRE_API_KEY)")
        command.add_argument("--max-tokens", type=int, default=None, help="longest answer in tokens")
        command.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (default)")
    chat.add_argument("--system", default=None, help="system message that opens the conversation")
    chat.add_argument(
        "model", metavar="MODEL", nargs="?", default=None, help="a folder or Hub name to start a server for"
    )
    complete.add_argument("--model", default=None, help="a folder or Hub name to start a server for")

    replay = commands.add_parser(
        "replay",
        help="run a step trace again",
        description="Runs the scheduler again on what `serve --record-trace FILE` wrote; every plan must be the same.",
    )
    replay.add_argument("trace", metavar="FILE", help="the trace")

    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "serve":
            from .prepare import prepare
            from .procs.launch import run
            from .procs.supervisor import Supervisor

            return run(Supervisor(prepare(read_flags(arguments))))
        if arguments.command == "replay":
            return _replay(arguments.trace)
        from . import terminal

        return terminal.main(arguments)
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        from .procs.child import exit_code

        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def _replay(path: str) -> int:
    from .engine.core import trace

    try:
        with open(path, "rb") as file:
            num_plans, difference = trace.replay(trace.read(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be replayed: {error}.") from error
    print(difference or f"{num_plans} plans, all reproduced")
    return 0 if difference is None else 1

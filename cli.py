"""The `pagewire` command. What a subcommand needs is imported when it runs."""

import argparse
import logging
import sys
from collections.abc import Sequence

from .commands import batch, completion, doctor, launch, talk, tokenize, top
from .commands.bench import command as bench
from .config.flags import add_flags, read_settings
from .errors import ConfigError, PagewireError
from .route.config import add_route_flags
from .version import __version__


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagewire", description="An LLM serving engine made of small processes.")
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI-compatible)",
        description="Serves a model over HTTP. Without MODEL: the small demo model that ships with pagewire. "
        "With several: each is loaded when it is asked for.",
    )
    add_flags(serve)
    serve.add_argument(
        "--explain", action="store_true", help="print every resolved setting, why, and the memory plan; serve nothing"
    )
    route = commands.add_parser(
        "route",
        help="one address in front of several servers",
        description="Distributes requests among servers of the same model, and continues them elsewhere when one ends.",
    )
    add_route_flags(route)
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
    talk.add_flags(chat, complete)
    for name, module, summary in (
        ("tokenize", tokenize, "show the ids of a text, or the text of ids"),
        ("run-batch", batch, "answer a file of requests"),
        ("top", top, "watch a running server"),
        ("launch", launch, "work for an engine that another machine serves"),
        ("doctor", doctor, "check this machine, and say what to do"),
        ("completion", completion, "print what makes a shell complete this command"),
    ):
        description, _, more = (module.__doc__ or "").strip().partition("\n\n")
        module.add_flags(commands.add_parser(name, help=summary, description=description, epilog=more))
    bench.add_flags(
        commands.add_parser(
            "bench",
            help="measure a server or an engine",
            description="Measures a running server (serve), or an engine without HTTP, with vLLM's flags and figures.",
        )
    )
    replay = commands.add_parser(
        "replay",
        help="run a step trace again",
        description="Runs the scheduler again on what `serve --record-trace FILE` wrote; every plan must be the same.",
    )
    replay.add_argument("trace", metavar="FILE", help="the trace")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit code: 0, 1 for our faults, 2 for what the user can correct."""
    parser = build_parser()
    try:
        arguments = parser.parse_args(_in_our_words(sys.argv[1:] if argv is None else argv))
        match arguments.command:
            case "serve":
                return _explain(arguments) if arguments.explain else _serve(arguments)
            case "launch":
                return launch.main(arguments)
            case "route":
                return _route(arguments)
            case "chat":
                return talk.chat(arguments)
            case "complete":
                return talk.complete(arguments)
            case "tokenize":
                return tokenize.main(arguments)
            case "run-batch":
                return batch.main(arguments)
            case "top":
                return top.main(arguments)
            case "doctor":
                return doctor.main(arguments)
            case "bench":
                return bench.main(arguments)
            case "replay":
                return _replay(arguments.trace)
            case _:
                return completion.main(parser, arguments.shell)
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        from .procs.child import exit_code

        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stdout = None  # else Python flushes it at exit and fails again
        return 1


def _in_our_words(argv: Sequence[str]) -> Sequence[str]:
    """The command line of `serve` and `bench` with vLLM's flags and those of others replaced; says what has no effect.
    Raises ConfigError."""
    num = 2 if argv[:1] == ["bench"] and argv[1:2] != ["serve"] else 1
    if not argv or (argv[0] != "serve" and num == 1):
        return argv
    from .config.foreign_flags import translate
    from .config.peer_flags import BY_NAME
    from .config.vllm_flags import ALIASES

    found = translate(argv[num:], bench.without_own(BY_NAME) if num == 2 else BY_NAME, ALIASES)
    for note in found.notes:
        print(f"pagewire: {note}", file=sys.stderr)
    return [*argv[:num], *found.arguments]


def _serve(arguments: argparse.Namespace) -> int:
    import uvloop

    from .procs.prepare import prepare_server

    config = read_settings(arguments)[0]
    if config.source.models:
        from .procs.models import Models, prepare_models

        return uvloop.run(Models(*prepare_models(config, prepare_server), prepare=prepare_server).run())
    if config.service.backend == "ray":
        from .ray.lead import serve

        return uvloop.run(serve(prepare_server(config)))
    if config.service.nnodes > 1:
        from .procs.launch import run
        from .procs.lead import make_lead

        return run(make_lead(prepare_server(config)))
    if config.service.join_address is not None:
        raise ConfigError("--join-address is for engines on several machines: say how many with --nnodes.")
    from .procs.generations import Generations

    return uvloop.run(Generations(config, prepare_server, lambda: read_settings(arguments)[0]).run())


def _route(arguments: argparse.Namespace) -> int:
    import uvloop

    from .route.config import read_route
    from .route.serve import run

    _log_as("route")
    return uvloop.run(run(read_route(arguments)))


def _log_as(name: str) -> None:
    logging.basicConfig(format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)


def _explain(arguments: argparse.Namespace) -> int:
    from .commands.explain import explain
    from .config.config import ServerConfig
    from .config.resolve import resolve
    from .procs.prepare import examine, prepare_http

    config, said = read_settings(arguments)
    model, machine = examine(config)
    engine = resolve(config, model, machine)
    server = ServerConfig(engine=engine, http=prepare_http(config))
    from .engine.runner.forecast import forecast

    found = forecast(engine)  # raises the errors that `serve` would raise
    print(explain(config, server, machine, said))
    print("\nmodel")
    for line in found.served.lines(engine):
        print(f"  {line}")
    ranks = f", of each of {engine.tensor_parallel_size} ranks" if engine.tensor_parallel_size > 1 else ""
    ranks += f", of the first of {engine.pipeline_parallel_size} stages" * (engine.pipeline_parallel_size > 1)
    print(f"\nmemory{ranks}, calculated from the model's shapes")
    for line in found.memory.lines(found.num_pages):
        print(f"  {line}")
    return 0


def _replay(path: str) -> int:
    from .engine.core import trace

    try:
        with open(path, "rb") as file:
            num_plans, difference = trace.replay(trace.read(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be replayed: {error}.") from error
    print(difference or f"{num_plans} plans, all reproduced")
    return 0 if difference is None else 1

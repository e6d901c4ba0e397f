"""Starts a subset of the actors on given addresses, so that one engine can run on several machines.

Give every launch the same model and engine flags, and an address for each mailbox that another machine must reach. The
actor's own machine listens there, the others connect. Launches may be started in any order.

The engine ends as a whole. When an actor of another launch has ended, or has not answered for --hang-timeout-s, open
requests fail, and this launch names the actor and ends with exit code 1. SIGTERM to any launch drains all.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from msgspec.structs import replace

from ..config.flags import add_flags, read_flags
from ..config.resolve import check_several_machines, note_on_folders
from ..errors import ConfigError, PagewireError
from ..ipc.zmq_channel import check_address, read_keys
from .child import exit_code
from .prepare import prepare_server
from .supervisor import Supervisor
from .topology import ACTORS, RENDEZVOUS, names, receivers, workers

_EXAMPLE = """\
example: the model on one machine, everything else on another (copy the key file to both)
  python -m pagewire.procs.launch MODEL --actors worker --key-file engine.key \\
      --address worker=tcp://10.0.0.2:7001 core=tcp://10.0.0.1:7000
  python -m pagewire.procs.launch MODEL --actors core,grammar,tokenizer,detokenizer,api --key-file engine.key \\
      --address worker=tcp://10.0.0.2:7001 core=tcp://10.0.0.1:7000
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pagewire.procs.launch",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--actors", metavar="A,B", help=f"which actors to start here (default: all: {', '.join(ACTORS)}, worker-1 …)"
    )
    parser.add_argument(
        "--address",
        action="extend",
        nargs="+",
        default=[],
        metavar="ACTOR=ADDRESS",
        help="where an actor's mailbox is, ipc:///path or tcp://host:port (default: in this launch's own folder)",
    )
    add_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        config = read_flags(arguments)
        size, num_stages = config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size
        num_ranks, num_apis = size * num_stages, config.service.api_processes
        known = names(num_ranks, num_apis)
        actors = arguments.actors.split(",") if arguments.actors else list(known)
        if unknown := [name for name in actors if name not in known]:
            raise ConfigError(f"There is no actor {unknown[0]!r}; there are {', '.join(known)}.")
        if config.service.nnodes > 1:
            raise ConfigError("--nnodes divides the ranks itself; use it with pagewire serve.")
        keys = read_keys(Path(config.service.key_file)) if config.service.key_file else None
        addresses = {}
        for text in arguments.address:
            name, _, address = text.partition("=")
            if name not in (*known, RENDEZVOUS):
                raise ConfigError(
                    f"--address {text}: write ACTOR=ADDRESS with one of {', '.join(known)}, {RENDEZVOUS}."
                )
            check_address(address, keys)
            if name == RENDEZVOUS and not address.startswith("tcp://"):
                raise ConfigError(
                    f"--address {text}: ranks meet at tcp://host:port, a port of the first one's machine."
                )
            addresses[name] = address
        needed = {r for name in actors for r in receivers(name, num_ranks, num_apis, num_stages)} - {
            "supervisor",
            *actors,
        }
        if config.engine.client_address is not None and not {"api", "detokenizer"} & {*actors, *addresses}:
            needed -= {"api", "detokenizer"}  # it serves `EngineClient`s only
        ranks = workers(num_ranks)
        here = {name for name in ranks if name in actors}
        if here and len(here) < num_ranks:
            parts = [len(here & {*ranks[first : first + size]}) for first in range(0, num_ranks, size)]
            if num_stages > 1 and any(0 < num < size for num in parts):
                raise ConfigError("With several stages, start all workers of a stage in one launch.")
            check_several_machines(config.engine, "--actors")
            if config.cpu.cpu_bind == "auto":  # how many ranks share this machine is unknown
                config = replace(config, cpu=replace(config.cpu, cpu_bind="none"))
        across = ranks if "core" in actors else ("core",) if here else ()  # the others of core and ranks, if elsewhere
        far = {name for name in across if name not in actors and addresses.get(name, "").startswith("tcp://")}
        if far:
            is_apart = ("core" in actors and ranks[0] in far) or (ranks[0] in actors and "core" in far)
            check_several_machines(config.engine, "--actors", is_apart=is_apart)
            if is_apart and (note := note_on_folders(config.engine, "--actors")):
                print(f"pagewire: {note}", file=sys.stderr, flush=True)
        if missing := sorted(needed - addresses.keys()):
            raise ConfigError(_say_where(missing[0]))
        prepared = prepare_server(config)
        meets = here and len(here) < num_ranks and not prepared.engine.stages_by_mail
        if meets and RENDEZVOUS not in addresses:  # ranks on GPUs are a group across the stages
            raise ConfigError(_say_where(RENDEZVOUS))
        return run(Supervisor(prepared, actors=actors, addresses=addresses, keys=keys))
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return exit_code(error)


def _say_where(name: str) -> str:
    return f"Say where {name} is: --address {name}=tcp://host:port."


def run(supervisor: Supervisor) -> int:
    """Runs a supervisor. Returns the exit code; later signals are ignored, since the process is about to end."""
    import uvloop

    return uvloop.run(_run(supervisor))


async def _run(supervisor: Supervisor) -> int:
    code = await supervisor.run()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):  # launches that end together may each get a signal as well
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Work for an engine that another machine serves.

The other machine runs `pagewire serve MODEL --nnodes N --join-address tcp://HOST:PORT --key-file K`. This one needs the
same versions of pagewire, Python and torch, the model, and a copy of the key file. It runs the ranks that it is given,
and joins again when the connection was lost. Ctrl-C or SIGTERM hands them over to a spare; without one it ends the
whole engine, after its open requests.
"""

import argparse
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--join", required=True, metavar="ADDRESS", help="the lead's --join-address, tcp://HOST:PORT")
    parser.add_argument("--key-file", metavar="FILE", help="a copy of the lead's key file, mode 0600")
    parser.add_argument(
        "--model", metavar="PATH", help="where the model is on this machine (default: as on the lead's)"
    )
    parser.add_argument(
        "--host", help="this machine's address for the others (default: the one from which it reaches the lead)"
    )
    parser.add_argument("--name", default=socket.gethostname(), help="for messages (default: this host's name)")
    parser.add_argument(
        "--rejoin-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="how long to look for a lead, in seconds (default: 600)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 after a planned end, 2 for what the user can correct, else 1. Raises ConfigError."""
    import uvloop

    from ..ipc.zmq_channel import check_address, read_keys
    from ..procs.follower import Follower
    from ..procs.machine import address_towards, host_address

    url = urlsplit(arguments.join)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ConfigError(f"--join {arguments.join}: write tcp://HOST:PORT.")
    if arguments.key_file is not None and not Path(arguments.key_file).exists():
        raise ConfigError(f"{arguments.key_file} does not exist; copy the lead's key file to this machine.")
    keys = None if arguments.key_file is None else read_keys(Path(arguments.key_file))
    check_address(arguments.join, keys)
    host = host_address(arguments.host) if arguments.host else address_towards(url.hostname, url.port)
    model = None if arguments.model is None else Path(arguments.model)
    follower = Follower(
        arguments.join,
        keys,
        host=host,
        name=arguments.name,
        model=model,
        rejoin_s=arguments.rejoin_timeout,
        rejoin_flag="--rejoin-timeout",
    )
    return uvloop.run(follower.run())

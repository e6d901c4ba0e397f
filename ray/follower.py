"""The program that a holder starts on its node: a follower whose lead the holder names on standard input.

It ends when the holder does, because standard input ends with it, and when the lead does not answer.
"""

import sys
from pathlib import Path

import msgspec

from ..errors import PagewireError
from ..procs.lifeline import end_with, read_line
from .placing import FollowerLaunch

REJOIN_S = 15.0  # how long to look for the lead; a new lead brings followers of its own


def main() -> int:
    """The exit code of `pagewire launch --join`."""
    import uvloop

    from ..ipc.zmq_channel import Keys, read_keys
    from ..procs.child import exit_code
    from ..procs.follower import Follower

    launch = msgspec.json.decode(read_line(0), type=FollowerLaunch)
    end_with(0)
    try:
        if launch.keys is not None:
            keys = Keys(*launch.keys)
        elif launch.key_file is not None and Path(launch.key_file).exists():
            keys = read_keys(Path(launch.key_file))
        else:
            print(f"pagewire: {launch.name}: the key file {launch.key_file} does not exist there.", file=sys.stderr)
            return 2
        follower = Follower(launch.address, keys, host=launch.host, name=launch.name, model=None, rejoin_s=REJOIN_S)
        return uvloop.run(follower.run())
    except PagewireError as error:
        print(f"pagewire: {launch.name}: {error}", file=sys.stderr)
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())

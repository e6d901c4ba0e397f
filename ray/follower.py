"""The program that a holder starts on its node: a follower whose lead the holder names on standard input.

It ends when the holder does, because standard input ends with it, and when the lead does not answer.
"""

import sys
from pathlib import Path

import msgspec

from ..errors import ConfigError, PagewireError
from ..ipc.zmq_channel import Keys, read_keys
from ..procs.lifeline import end_with, read_line
from .placing import FollowerLaunch

REJOIN_S = 15.0  # how long to look for the lead; a new lead brings followers of its own


def main() -> int:
    """The exit code of `pagewire launch --join`."""
    import uvloop

    from ..procs.child import exit_code
    from ..procs.follower import Follower

    launch = msgspec.json.decode(read_line(0), type=FollowerLaunch)
    end_with(0)
    try:
        keys = _keys(launch)
        follower = Follower(launch.address, keys, host=launch.host, name=launch.name, model=None, rejoin_s=REJOIN_S)
        return uvloop.run(follower.run())
    except PagewireError as error:
        print(f"pagewire: {launch.name}: {error}", file=sys.stderr)
        return exit_code(error)


def _keys(launch: FollowerLaunch) -> Keys:
    """The engine's. Raises ConfigError."""
    if launch.secret_key is not None:
        return Keys(launch.public_key, launch.secret_key)
    assert launch.key_file is not None, launch
    path = Path(launch.key_file)
    if not path.exists():
        raise ConfigError(f"The key file {path} does not exist there; copy the lead's to each node.")
    keys = read_keys(path)
    if keys.public != launch.public_key:
        raise ConfigError(f"The key file {path} is not the lead's there; copy the lead's to each node.")
    return keys


if __name__ == "__main__":
    sys.exit(main())

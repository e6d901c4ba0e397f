"""An engine without HTTP, for the program that started it: `python -m pagewire.procs.embedded`.

It reads a `Config` as one line of JSON from standard input, and ends when its standard input is closed, which is also
the case when that program was killed.
"""

import asyncio
import os
import signal
import sys

import msgspec

from ..config.config import Config
from ..errors import PagewireError
from .child import exit_code
from .prepare import prepare_server
from .supervisor import Supervisor
from .topology import workers


def main() -> int:
    """Returns the exit code."""
    import uvloop

    try:
        config = prepare_server(msgspec.json.decode(sys.stdin.buffer.readline(), type=Config))
        actors = [*workers(config.engine.num_ranks), "core", "grammar"]
        return uvloop.run(_run(Supervisor(config, actors=actors, quiet=True)))
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return exit_code(error)


async def _run(supervisor: Supervisor) -> int:
    running = asyncio.ensure_future(supervisor.run())
    loop = asyncio.get_running_loop()
    os.set_blocking(0, False)

    def on_input() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.sleep(0)  # the supervisor installs its signal handlers first
    loop.add_reader(0, on_input)
    return await running


if __name__ == "__main__":
    sys.exit(main())

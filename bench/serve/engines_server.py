"""Several engines behind one api, each with `null_worker` in its worker's place: `engines` starts it.

`python -m pagewire.bench.serve.engines_server MODEL --data-parallel-size N --port P` plus pagewire's flags; the
variables FIRST_ID, NUM_IDS and STEP_MS are the null worker's. A token of engine i is that of engine 0 one id later for
each i, so that a client can tell which engine has sampled it.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from ...config.flags import add_flags, read_flags
from ...ipc.messages import Facts
from ...procs import engines
from ...procs.child import Launch
from ...procs.listening import Listening
from ...procs.prepare import prepare_server
from ...procs.supervisor import Child
from ...procs.topology import kind


class NullEngine(engines.EnginePart):
    """An engine whose worker is a null worker, which is ready at once and answers no ping."""

    async def _start(self, name: str, launch: Launch) -> None:
        if kind(name) != "worker":
            await super()._start(name, launch)
            return
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pagewire.bench.serve.null_worker",
            self._addresses["worker"],
            self._addresses["core"],
            str(int(os.environ["FIRST_ID"]) + self._engine),
            os.environ["NUM_IDS"],
            os.environ["STEP_MS"],
            str(self._engine),
            str(self._device_epoch),
        )
        child = self._children[name] = Child(name, process, self._epoch)
        child.facts = Facts()
        child.exited.add_done_callback(lambda done: self._on_exit(child, done))

    def _restore(self) -> None:
        for child in self._children.values():
            if kind(child.name) == "worker":
                child.epoch = self._epoch
        super()._restore()


class NullEngines(engines.Engines):
    make_part = NullEngine


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser)
    config = prepare_server(read_flags(parser.parse_args(argv)))

    async def run() -> int:
        loop, listening = asyncio.get_running_loop(), Listening(config.http.listen)
        try:
            several = NullEngines(config, listening=listening)
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(signum, several.on_signal, signum)
            several.serve()
            return await several.run()
        finally:
            listening.close()

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())

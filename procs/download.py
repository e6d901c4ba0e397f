"""Downloads a model of the Hub into its cache, in a process of its own: huggingface_hub blocks and cannot be cancelled.

`download` is the side of an api process, for Ollama's /api/pull. The process tells how far it is, one JSON object a
line. It ends with its parent, and when nobody waits for the download any more; the cache keeps what has come, and the
next download goes on from there.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator

import msgspec

from ..api.ollama.types import Progress
from ..engine.checkpoint.source import fetch
from ..errors import ConfigError
from . import interpreter
from .lifeline import end_with_parent


async def download(model: str) -> AsyncGenerator[Progress]:
    """How far it is; the last one is `success`, or has an error. Closing the iterator ends the process."""
    process = await asyncio.create_subprocess_exec(
        *interpreter.COMMAND,
        "pagewire.procs.download",
        model,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=interpreter.environment(),
    )
    assert process.stdout is not None
    try:
        last = Progress()
        async for line in process.stdout:
            last = msgspec.json.decode(line, type=Progress)
            yield last
        if await process.wait() or (last.status != "success" and not last.error):
            yield Progress(error="The download was ended from outside.")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main() -> None:
    """The process that downloads; its argument is the model's name on the Hub."""
    end_with_parent()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no progress

    def tell(progress: Progress) -> None:
        out.write(msgspec.json.encode(progress) + b"\n")

    tell(Progress("pulling manifest"))
    try:
        fetch(sys.argv[1], lambda name, done, total: tell(Progress(f"pulling {name}", name, total, done)))
    except ConfigError as error:
        tell(Progress(error=str(error)))
    else:
        tell(Progress("success"))


if __name__ == "__main__":
    main()

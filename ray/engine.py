"""The program of one engine of a Ray Serve application: `pagewire serve` with the settings on standard input.

It ends when standard input does, so that an engine does not outlive its replica, however that ends.
"""

import json
import sys

from ..config.flags import from_options
from ..errors import PagewireError
from ..procs.lifeline import end_with, read_line


def main() -> int:
    """The exit code of `pagewire serve`."""
    import uvloop

    from ..procs.child import exit_code
    from ..procs.generations import Generations
    from ..procs.prepare import prepare_server

    settings = json.loads(read_line(0))
    end_with(0)
    if settings.get("backend") == "ray":
        settings["join_address"] = f"tcp://{settings['host']}:0"  # where its followers reach it
    try:
        config = from_options("pagewire.ray.app", settings, strict=False)
        if config.source.models:
            from ..procs.models import Models, prepare_models

            return uvloop.run(Models(*prepare_models(config, prepare_server), prepare=prepare_server).run())
        if config.service.backend == "ray":
            from .lead import serve

            return uvloop.run(serve(prepare_server(config)))
        return uvloop.run(Generations(config, prepare_server).run())
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())

"""pagewire on a Ray cluster: the ranks of an engine on its nodes (`--backend ray`), and engines of Ray Serve (`app`).

Ray finds room and starts programs. Leases, epochs, deaths and replacement are those of `procs/lead.py`. Only this
folder imports the package ray, and only in functions, since nothing else needs it.
"""

from collections.abc import Mapping


def app(args: Mapping[str, object]) -> object:
    """A Ray Serve application. `args`: settings as in a `--config` file, and those of `serving.ServeOptions`. For
    `serve run pagewire.ray:app model=PATH` and Serve's config files. Raises ConfigError."""
    from .serving import build

    return build(args)

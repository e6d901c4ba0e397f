"""How a process starts another one: with the same interpreter and the same import path.

Plain `python -m` would import from the working folder first, which may be a model's folder with a torch.py.
"""

import os
import sys

COMMAND = (sys.executable, "-P", "-m")
"""The command line before a module's name."""


def environment() -> dict[str, str]:
    """The environment for a process that is started with `COMMAND`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

"""How one of our processes starts another: with its own interpreter, which imports from where we do and nowhere else.

`python -m` would look into the working folder first. That may be a model's, where a torch.py may lie.
"""

import os
import sys

COMMAND = (sys.executable, "-P", "-m")
"""In front of a module's name."""


def environment() -> dict[str, str]:
    """This process's own, for a process that is started with `COMMAND`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

"""How one of our processes starts another: with the same interpreter and import path, and without secrets.

`python -m` would import from the working folder first, which may be a model's and contain a torch.py.
"""

import os
import sys
from collections.abc import Collection

COMMAND = (sys.executable, "-P", "-m")
"""The command line before a module's name."""

API_KEYS = ("PAGEWIRE_API_KEY",)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
COLLECTOR_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
SECRETS = (*API_KEYS, *HUB_TOKENS, *COLLECTOR_HEADERS)
"""Environment variables that hold secrets; a process is given only those that it uses itself."""


def environment(keep: Collection[str] = ()) -> dict[str, str]:
    """For a process that is started with `COMMAND`: this process's own variables, of `SECRETS` only those in `keep`."""
    own = {name: value for name, value in os.environ.items() if name in keep or name not in SECRETS}
    return own | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

"""How one of our processes starts another: with its own interpreter, which imports from where we do and nowhere else.

`python -m` would look into the working folder first. That may be a model's, where a torch.py may lie.
"""

import os
import sys
from collections.abc import Collection

COMMAND = (sys.executable, "-P", "-m")
"""In front of a module's name."""


API_KEYS = ("PAGEWIRE_API_KEY",)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
COLLECTOR_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
SECRETS = (*API_KEYS, *HUB_TOKENS, *COLLECTOR_HEADERS)
"""Environment variables that hold secrets, of which a process is given those that it uses itself."""


def environment(keep: Collection[str] = ()) -> dict[str, str]:
    """This process's own, for a process that is started with `COMMAND`. Of the variables that hold secrets only `keep`
    is left."""
    own = {name: value for name, value in os.environ.items() if name in keep or name not in SECRETS}
    return own | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

"""`python -m pagewire.dynamo` is the worker for NVIDIA Dynamo, `client/dynamo.py`."""

import sys
from pkgutil import extend_path

if __name__ == "dynamo":  # in the root of a checkout `import dynamo` finds this file before Dynamo's package
    __path__: list[str] = extend_path([], __name__)
elif __name__ == "__main__":
    from .client.dynamo import main

    sys.exit(main())

"""`python -m pagewire.dynamo` is the worker for NVIDIA Dynamo, `client/dynamo.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Started in a checkout's root, `import dynamo` would find this file instead of Dynamo's package.
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]

    from .client.dynamo import main

    sys.exit(main())

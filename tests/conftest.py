"""Makes the shared test helpers importable (`import fakes`, `import checkpoints`); quiet threads, no downloads."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; Ctrl-C is tested in children
    signal.signal(signal.SIGINT, signal.default_int_handler)

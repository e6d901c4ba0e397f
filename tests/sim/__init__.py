"""An engine without text and without a device, in one process and under a virtual clock.

The scheduler and its KV connectors are the real ones, driven call by call as the core's process drives them; clients
are played, texts are ids, and the worker is the one of `fakes.py`, whose KV holds hashes, so that any lost, doubled,
reordered or wrongly cached token changes everything after it. `history.py` plays one random history and checks every
invariant at every step; a seed is all it takes to play it again.

    python -m tests.sim --seeds 100000        as many as you have time for, stopping at the first failure
    python -m tests.sim --seed 4711           one of them, told event by event
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # `fakes` and `invariants`, which all tests share

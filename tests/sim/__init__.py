"""An engine without text and without a device, in one process and under a virtual clock.

The scheduler and its KV connectors are the real ones, driven call by call as the core's process drives them. Clients
are simulated, texts are ids, and the worker is that of `fakes.py`: its KV holds hashes, so any lost, doubled, reordered
or wrongly cached token changes every token after it. `history.py` runs one random history and checks every invariant
after every step. The seed alone determines the history.

    python -m tests.sim --seeds 100000        many histories; stops at the first failure
    python -m tests.sim --seed 4711           one history; prints every event
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the shared helpers `fakes` and `invariants`

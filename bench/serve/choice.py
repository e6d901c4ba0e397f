"""What the router's choice of an engine costs, by the number of engines.

`python -m pagewire.bench.serve.choice` asks the real `Choice` for the engine of each turn of many conversations.
"""

import argparse
import time
from pathlib import Path

from ...api.engines.choice import Choice, Condition, Conversation, Member
from ...api.engines.stable_hash import stable_hash
from ..report import Row, machine, print_table, write_json

_SYSTEM_BLOCKS = 16  # of 256 bytes
_TURN_BLOCKS = 4


def measure(row: Row, num_engines: int, num_conversations: int, num_turns: int) -> None:
    """Adds the CPU time of a choice in µs."""
    choice: Choice[Member] = Choice(seed=0)
    for i in range(num_engines):
        member = Member(f"http://engine-{i}:8000")
        choice.add(member)
        choice.turned(member, Condition.ABLE)
    choice.choose([], Conversation(0, 0), 0.0)  # builds the ring
    prompts = [list(range(_SYSTEM_BLOCKS)) for _ in range(num_conversations)]
    conversations = [Conversation(stable_hash(b"%d" % i), _SYSTEM_BLOCKS) for i in range(num_conversations)]
    open_ones: list[Member] = []
    spent = 0.0
    for turn in range(num_turns):
        for i, (prompt, conversation) in enumerate(zip(prompts, conversations, strict=True)):
            prompt += [hash((i, turn, block)) for block in range(_TURN_BLOCKS)]
            started = time.process_time()
            chosen = choice.choose(prompt, conversation, 0.0)
            spent += time.process_time() - started
            assert chosen is not None
            choice.opened(chosen)
            open_ones.append(chosen)
            if len(open_ones) > 20 * num_engines:
                choice.closed(open_ones.pop(0))
    row.add(**{"µs": 1e6 * spent / (num_turns * num_conversations)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 64, 1000])
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/choice.json"), help="where to write")
    given = parser.parse_args()
    facts = machine()
    rows = [Row(f"{num} engines") for num in given.engines]
    for _ in range(given.repeat):
        for row, num in zip(rows, given.engines, strict=True):
            measure(row, num, given.conversations, given.turns)
    print_table(rows)
    settings = {"conversations": given.conversations, "turns": given.turns}
    write_json(given.json, "CPU time of the router's choice", rows, facts, settings)


if __name__ == "__main__":
    main()

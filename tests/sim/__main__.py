"""The command line of the simulation, described in the package's docstring."""

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tqdm import tqdm

from .history import History

_BATCH = 100  # seeds that a process runs before it reports


def replay_line(seed: int, num_stages: int) -> str:
    """The command that runs a seed again and prints its events."""
    return f"PYTHONPATH=.typing python -m tests.sim --stages {num_stages} --seed {seed}"


def play(seeds: range, num_stages: int) -> tuple[Counter[str], int | None]:
    """(event counts of these histories, the first seed that failed or None)."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += History(seed, num_stages=num_stages).run()
        except Exception:
            return counts, seed
    return counts, None


def play_many(num: int, first: int, jobs: int, num_stages: int) -> int:
    """Runs `num` seeds in `jobs` processes. Returns the exit status."""
    counts: Counter[str] = Counter()
    todo: Iterator[range] = (range(i, min(i + _BATCH, first + num)) for i in range(first, first + num, _BATCH))
    failed: list[int] = []
    with ProcessPoolExecutor(jobs) as pool, tqdm(total=num, unit=" histories", disable=None) as bar:
        running: dict[Future[tuple[Counter[str], int | None]], range] = {}
        while not failed:
            while len(running) < 2 * jobs and (seeds := next(todo, None)) is not None:
                running[pool.submit(play, seeds, num_stages)] = seeds
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                bar.update(len(running.pop(future)))
                new_counts, bad = future.result()
                counts += new_counts
                failed += [] if bad is None else [bad]
    print(", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))
    if failed:
        print(f"history {min(failed)} failed. To see it: {replay_line(min(failed), num_stages)}")
        return 1
    return 0


def play_one(seed: int, num_stages: int) -> int:
    """Runs one history and prints every event. Returns the exit status."""
    try:
        History(seed, log=print, num_stages=num_stages).run()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    print("every invariant held")
    return 0


def main() -> int:
    """Parses the flags and runs the histories. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Runs random histories of an engine.")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only this seed and print every event")
    parser.add_argument("--stages", type=int, default=1, help="stages of the model, each with a worker of its own")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    options = parser.parse_args()
    if options.seed is not None:
        return play_one(options.seed, options.stages)
    return play_many(options.seeds, options.first, max(1, options.jobs), options.stages)


if __name__ == "__main__":
    sys.exit(main())

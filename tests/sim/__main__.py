"""See the head of the package."""

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tqdm import tqdm

from .history import History

_BATCH = 100  # seeds that a process plays before it reports


def replay_line(seed: int) -> str:
    """The command that plays a seed again and tells its events."""
    return f"PYTHONPATH=.typing python -m tests.sim --seed {seed}"


def play(seeds: range) -> tuple[Counter[str], int | None]:
    """(what happened in these histories, the first that failed)."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += History(seed).run()
        except Exception:
            return seen, seed
    return seen, None


def play_many(num: int, first: int, jobs: int) -> int:
    """Plays `num` seeds in `jobs` processes. Returns the exit status."""
    seen: Counter[str] = Counter()
    todo: Iterator[range] = (range(i, min(i + _BATCH, first + num)) for i in range(first, first + num, _BATCH))
    failed: list[int] = []
    with ProcessPoolExecutor(jobs) as pool, tqdm(total=num, unit=" histories", disable=None) as bar:
        running: dict[Future[tuple[Counter[str], int | None]], range] = {}
        while not failed:
            while len(running) < 2 * jobs and (seeds := next(todo, None)) is not None:
                running[pool.submit(play, seeds)] = seeds
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                bar.update(len(running.pop(future)))
                what, bad = future.result()
                seen += what
                failed += [] if bad is None else [bad]
    print(", ".join(f"{count:,} {name}" for name, count in sorted(seen.items())))
    if failed:
        print(f"history {min(failed)} failed. To see it: {replay_line(min(failed))}")
        return 1
    return 0


def play_one(seed: int) -> int:
    """Tells everything that happens. Returns the exit status."""
    try:
        History(seed, tell=print).run()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    print("everything held")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Plays random histories of an engine.")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, told event by event")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        return play_one(options.seed)
    return play_many(options.seeds, options.first, max(1, options.jobs))


if __name__ == "__main__":
    sys.exit(main())

"""A progress bar of bytes on stderr, for what a person may wait for in front of a terminal."""

import contextlib
from collections.abc import Callable


def progress_bar(stack: contextlib.ExitStack, what: str, *, delay_s: float = 0.0) -> Callable[[int, int], None]:
    """Call the function with the bytes that are done, and all. `what`: written before the bar. `delay_s`: what takes
    less has no bar. `stack` removes it, if it has not become full."""
    from tqdm import tqdm

    bar = stack.enter_context(tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=delay_s))

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return progress

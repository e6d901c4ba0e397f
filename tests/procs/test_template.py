"""Two workers of a template that has not forked them yet. That workers run is shown by every server of the tests."""

import asyncio
import os
from pathlib import Path

import pytest

from pagewire.procs.template import Templates


@pytest.mark.long
def test_a_worker_that_is_killed_before_it_begins_leaves_others_alone(tmp_path: Path) -> None:
    async def run() -> None:
        templates = Templates()
        environment = dict(os.environ)
        os.mkfifo(tmp_path / "blocks")
        try:
            killed = templates.fork("worker", str(tmp_path / "blocks"), {}, environment)
            other = templates.fork("worker", str(tmp_path / "none"), {}, environment)
            third = templates.fork("worker", str(tmp_path / "none"), {}, environment | {"OMP_NUM_THREADS": "7"})
            killed.kill()
            third.kill()
            await asyncio.wait_for(third.wait(), 120)
            assert third.returncode == -9, "nobody else needs its template, which may hang"
            await asyncio.wait_for(asyncio.gather(killed.wait(), other.wait()), 120)
            assert (killed.returncode, other.returncode) == (-9, 1), "the other one has looked for its launch file"
            again = templates.fork("worker", str(tmp_path / "none"), {}, environment)
            await asyncio.wait_for(again.wait(), 120)
            assert again.returncode == 1
        finally:
            templates.close()

    asyncio.run(run())

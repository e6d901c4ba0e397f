"""When a process counts as hung (silence, a step that never ends) and when deaths are a storm; work is neither."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from waiting import until

from pagewire.ipc.messages import Pong
from pagewire.procs.liveness import STEP_LIMIT_S, STORM_DEATHS, STORM_S, Deaths, Liveness


def test_silence_gives_a_complaint_until_the_next_answer() -> None:
    liveness = Liveness(os.getpid(), may_be_busy=False, now=0.0)
    assert liveness.complaint(2.0, 1.9) is None
    assert "has said nothing for 2.5 s" in str(liveness.complaint(2.0, 2.5))
    liveness.heard(Pong("core"), 2.5)
    assert liveness.complaint(2.0, 4.0) is None


def test_silence_while_the_supervisor_did_not_run_gives_no_complaint() -> None:
    liveness = Liveness(os.getpid(), may_be_busy=False, now=0.0)
    liveness.excuse(100.0)
    assert liveness.complaint(2.0, 101.0) is None


def test_a_worker_that_computes_is_busy_and_one_that_is_stopped_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        liveness = Liveness(process.pid, may_be_busy=True, now=0.0)
        for now in range(1, 5):  # each check finds that it has used more CPU time
            before = process_ticks(process.pid)
            until(lambda before=before: process_ticks(process.pid) != before, "the process uses CPU time")  # type: ignore[misc]
            assert liveness.complaint(2.0, 10.0 * now) is None
        process.send_signal(signal.SIGSTOP)
        until(lambda: state(process.pid) == "T", "the process is stopped")
        liveness.complaint(2.0, 50.0)
        assert "has said nothing" in str(liveness.complaint(2.0, 53.0))
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_answers_but_completes_no_step_is_stuck() -> None:
    liveness = Liveness(os.getpid(), may_be_busy=True, now=0.0)
    for now in range(0, int(STEP_LIMIT_S) + 1):
        liveness.heard(Pong("worker", 1, 7, is_busy=True), now)
        assert liveness.complaint(10.0, now) is None
    assert "at one step" in str(liveness.complaint(10.0, STEP_LIMIT_S + 1))
    liveness.heard(Pong("worker", 1, 8, is_busy=True), STEP_LIMIT_S + 2)
    assert liveness.complaint(10.0, STEP_LIMIT_S + 2) is None
    for now in range(200, 500):  # idle is not stuck
        liveness.heard(Pong("worker", 1, 8, is_busy=False), now)
        assert liveness.complaint(10.0, now) is None


def test_more_deaths_than_the_limit_within_the_window_are_a_storm() -> None:
    deaths = Deaths()
    for i in range(STORM_DEATHS):
        assert deaths.add("core", "was killed", float(i)) == i + 1
    assert not deaths.are_a_storm
    assert deaths.add("worker", "has said nothing for 10 s", STORM_DEATHS) == 1
    assert deaths.are_a_storm
    assert "worker has said nothing" in deaths.summary() and len(deaths.summary().splitlines()) == STORM_DEATHS + 2
    deaths.add("core", "was killed", STORM_DEATHS + STORM_S + 1)  # the others are older than the window
    assert len(deaths) == 1 and not deaths.are_a_storm


def process_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

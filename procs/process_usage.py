"""What this process takes of its machine, by Linux: processor time, threads, resident memory.

Each process reads it of itself when the supervisor asks for a sign of life, which takes some 30 µs. The share that a
process has of pages that several map (PSS) is left out: the kernel walks all page tables for it, and holds up the
process's own page faults meanwhile.
"""

import time
from pathlib import Path

from ..ipc.messages import ProcessUsage

_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def process_usage() -> ProcessUsage:
    """Without processor time only on systems without /proc, where it says nothing."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return ProcessUsage()
    return usage_of(text, time.process_time())


def usage_of(status: str, cpu_s: float) -> ProcessUsage:
    """status: the text of /proc/PID/status. A field that a system lacks is 0."""
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    threads, *memory = (int(fields.get(name, "0").split()[0]) for name in ("Threads", "RssAnon", "RssFile", "RssShmem"))
    anonymous, file, shared = (1024 * number for number in memory)  # kB
    return ProcessUsage(cpu_s, threads, anonymous, file, shared)


def available_bytes(memory: Path = _MEMORY, group: Path = _GROUP) -> int:
    """Memory that the machine, or the process's cgroup, can still give: without what is used, but with file caches that
    the system gives up when it must. 0: unknown."""
    found = []
    try:
        fields = dict(line.partition(":")[::2] for line in memory.read_text().splitlines())
        found.append(1024 * int(fields["MemAvailable"].split()[0]))
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(int(limit) - int(used) + int(stat["inactive_file"]))
    except (OSError, KeyError, ValueError):  # another system, or no limit: "max"
        pass
    return max(0, min(found, default=0))

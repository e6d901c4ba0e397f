"""Networks of two machines, between which a test makes ports unreachable as a firewall does: also over connections that
were made before. What is sent there waits or fails, and nothing tells the other side. Each machine reaches itself."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache

HERE, THERE = "10.0.0.1", "10.0.0.2"
_CLONE_NEWNET = 0x40000000
_RULES = "ip link set lo up && ip rule add pref 10 lookup local && ip rule del pref 0"  # those before it are obeyed
_LINK = (
    f"ip link add here type veth peer name there netns $0 && ip addr add {HERE}/24 dev here && ip link set here up && "
    f"nsenter --net=$0 sh -c 'ip link set lo up && ip addr add {THERE}/24 dev there && ip link set there up'"
)


@cache
def can_have_networks() -> bool:
    """Whether this user may make them, with the programs that takes."""
    if os.getuid() != 0:
        return False
    try:
        with two_networks(), unreachable([1]):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, ...]]:
    """This thread, and what it starts meanwhile, are on the machine HERE. Yields what goes before a command that runs
    on the machine THERE; the process stays the same."""
    before = _network()
    there = -1
    try:
        _call("unshare", _CLONE_NEWNET)
        there = _network()
        _call("unshare", _CLONE_NEWNET)
        path = f"/proc/{os.getpid()}/fd/{there}"
        for command in (_RULES, _LINK):
            subprocess.run(("sh", "-c", command, path), check=True, capture_output=True)
        yield "nsenter", f"--net={path}"
    finally:
        _call("setns", before, _CLONE_NEWNET)
        for fd in (before, there):
            if fd >= 0:
                os.close(fd)


@contextlib.contextmanager
def unreachable(ports: Sequence[int]) -> Iterator[None]:
    """Nothing passes between the machines to these ports, nor from them, until the block ends."""
    ways = [(way, THERE, "ipproto", "tcp", side) for way in ("from", "to") for side in ("sport", "dport")]
    rules = [("pref", "5", *way, str(port), "unreachable") for port in ports for way in ways]
    with contextlib.ExitStack() as stack:
        for rule in rules:
            subprocess.run(("ip", "rule", "add", *rule), check=True, capture_output=True)
            stack.callback(subprocess.run, ("ip", "rule", "del", *rule), check=True)
        yield


def _network() -> int:
    """A descriptor of this thread's."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *numbers: int) -> None:
    """A system call that Python 3.11 does not have."""
    if ctypes.CDLL(None, use_errno=True)[name](*numbers) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

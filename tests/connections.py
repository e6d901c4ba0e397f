"""Breaks TCP connections between two processes of a test as a network does: neither of them asked for it."""

import contextlib
import ctypes
import errno
import os
import socket
from pathlib import Path

import psutil

_LISTEN = "0A"  # a state in /proc/net/tcp
_PIDFD_GETFD = 438  # the system call's number, on all architectures


def mailbox_port(process: psutil.Process) -> int:
    """Where the mailbox of an actor's process can be reached by other machines. The process may have another network
    than this one, which psutil does not see."""
    folder = Path(f"/proc/{process.pid}")
    own = set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            own.add(os.readlink(descriptor))
    rows = [line.split() for line in (folder / "net" / "tcp").read_text().splitlines()[1:]]
    (port,) = {row[1].partition(":")[2] for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in own}
    return int(port, 16)


def cut(sender: psutil.Process, port: int) -> int:
    """Breaks the connections of a process, which this one has started, to this port. Returns how many there were; the
    process may end meanwhile."""
    num = 0
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for one in sender.net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port == port:
                try:
                    with _socket_of(sender.pid, one.fd) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
                    num += 1
                except OSError as error:
                    if error.errno not in (errno.EBADF, errno.ENOTCONN):  # it has ended by itself
                        raise
    return num


def _socket_of(pid: int, fd: int) -> socket.socket:
    """The same socket in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        own = libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if own < 0:
        raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid} cannot be had")
    return socket.socket(fileno=own)

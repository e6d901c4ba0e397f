"""What a launch of several machines needs to know of its own: versions, addresses, sockets."""

import importlib.metadata
import os
import socket
import sys
from pathlib import Path

from ..config.machine import machine_facts
from ..errors import ConfigError
from ..ipc.control_messages import Versions
from ..ipc.messages import SCHEMA_VERSION
from ..version import __version__

_BACKLOG = 128


def versions_here() -> Versions:
    python = ".".join(map(str, sys.version_info[:2]))
    return Versions(
        __version__, SCHEMA_VERSION, python, importlib.metadata.version("torch"), machine_facts().usable_levels
    )


def num_gpus() -> int:
    """The NVIDIA GPUs that processes of this machine may use, found without torch."""
    if not machine_facts().has_gpu:
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(chosen.split(",")) if chosen else len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def host_address(host: str) -> str:
    """The IPv4 address of a host's name. Raises ConfigError."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"{host} is no host name or IPv4 address that is known here: {error.strerror}.") from error


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches another one. Sends nothing. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host_address(host), port))
        except OSError as error:
            raise ConfigError(f"There is no way to {host}: {error.strerror}.") from error
        return str(probe.getsockname()[0])


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of this address. Raises ConfigError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"Cannot listen on {host}: {error.strerror}; is it an address of this machine?") from error
    sock.setblocking(False)
    return sock


def unused_address(host: str) -> str:
    """tcp://host:port that is free now, for a program that binds it soon. Raises ConfigError."""
    with listen(host) as probe:
        return f"tcp://{host}:{probe.getsockname()[1]}"

"""Facts about the machine for the report: device, driver, versions, commit. Imports no torch."""

import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .setting import ROOT

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "pyzmq", "uvloop")
_ASKED = ("name", "driver_version", "memory.total", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem")


def machine() -> dict[str, object]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": device(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def device() -> dict[str, str]:
    """nvidia-smi's facts about the first GPU, with its present clocks; empty without a GPU."""
    answer = _output("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "--id=0")
    return dict(zip(_ASKED, (value.strip() for value in answer.split(",")), strict=False)) if answer else {}


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()

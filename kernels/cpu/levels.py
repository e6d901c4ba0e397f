"""The levels for which the C files are compiled: one library for each set of instructions that CPUs have.

The first level that the CPU and the operating system allow is used. `build.py` compiles a level or finds it compiled.
"""

import ctypes
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

_V2 = ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_V4_BF16 = (*_V4, "avx512_bf16", "avx512_vnni")
_V4_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_ARM_82 = ("asimd", "asimddp", "asimdrdm", "atomics")


@dataclass(frozen=True)
class Level:
    """A set of instructions. `needs`: their names in /proc/cpuinfo, all that the compiler may use under `flags`."""

    name: str
    machine: str  # as platform.machine() calls the architecture
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    is_for_tests: bool = False

    @property
    def has_tiles(self) -> bool:
        return "amx_tile" in self.needs


LEVELS = (
    Level(
        "amx",
        "x86_64",
        (*_V4_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DPAGEWIRE_AMX"),
        (*_V4_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    ),
    Level("avx512bf16", "x86_64", _V4_BF16_FLAGS, _V4_BF16),
    Level("avx512", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("avx2", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("portable", "x86_64", ("-march=x86-64",), ()),
    Level("i8mm", "aarch64", ("-march=armv8.2-a+dotprod+bf16+i8mm",), (*_ARM_82, "bf16", "i8mm")),
    Level("dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), _ARM_82),
    Level("neon", "aarch64", ("-march=armv8-a",), ("asimd",)),
)
"""Best first. An architecture that is not among them has the level `portable` with the compiler's own flags."""
EMULATED = "amx-emulated"
"""The kernels of `amx` with tile instructions in plain C, for tests on CPUs without tiles. Never chosen, only named."""
NAMES = tuple(level.name for level in LEVELS)
"""What --cpu-kernels may name besides auto and torch."""


def levels_of(machine: str) -> tuple[Level, ...]:
    """The levels of an architecture that are shipped, best first."""
    return tuple(level for level in LEVELS if level.machine == machine) or (Level("portable", machine, (), ()),)


def levels_within(machine: str, features: Iterable[str], *, tiles: bool) -> tuple[Level, ...]:
    """The levels that a CPU with these features can run, best first. tiles: the system lets this process use them."""
    has = set(features)
    return tuple(
        level for level in levels_of(machine) if has.issuperset(level.needs) and (tiles or not level.has_tiles)
    )


@cache
def levels_here() -> tuple[Level, ...]:
    """The levels that this process can run, best first. Asks for the use of tiles if the CPU has them."""
    features = cpu_features(Path("/proc/cpuinfo"))
    return levels_within(platform.machine(), features, tiles="amx_tile" in features and request_tiles())


def emulated() -> Level:
    """The level EMULATED, compiled for what this machine has besides tiles."""
    base = next(level for level in levels_here() if not level.has_tiles)
    defines = ("-DPAGEWIRE_AMX", "-DPAGEWIRE_EMULATE_TILES")
    return replace(base, name=EMULATED, flags=(*base.flags, *defines), is_for_tests=True)


def cpu_features(cpuinfo: Path) -> frozenset[str]:
    """The features that all CPUs have in common; the kernel lists only those that it supports."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    of_each = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset.intersection(*of_each) if of_each else frozenset()


@cache
def request_tiles() -> bool:
    """Asks the system to let this process use tiles, whose registers are large and not saved otherwise. Returns whether
    it does: a kernel older than Linux 5.16, or a sandbox, refuses."""
    sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata = 158, 0x1023, 18
    if platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype, syscall.argtypes = ctypes.c_long, (ctypes.c_long, ctypes.c_long, ctypes.c_long)
    return bool(syscall(sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0)

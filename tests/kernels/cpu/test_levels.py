"""Which levels a CPU can run, and that every one of them computes."""

import platform
from pathlib import Path

import pytest
import remote_kernels
import torch

from pagewire.kernels.cpu import build, levels
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.operations import native_ops

_V2 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{_V2} fma movbe avx f16c abm bmi1 avx2 bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN_5 = f"{SKYLAKE_X} avx512_bf16 avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN_5} amx_bf16 amx_tile amx_int8"
RASPBERRY_PI_4 = "fp asimd evtstrm crc32 cpuid"
GRAVITON_2 = "fp asimd aes atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
GRAVITON_3 = f"{GRAVITON_2} sve i8mm bf16"


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, "amx"),
        ("x86_64", ZEN_5, "avx512bf16"),
        ("x86_64", ZEN_5.replace("avx512_vnni", ""), "avx512"),
        ("x86_64", SKYLAKE_X, "avx512"),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", HASWELL.replace(" fma", ""), "portable"),
        ("x86_64", _V2, "portable"),
        ("aarch64", GRAVITON_3, "i8mm"),
        ("aarch64", GRAVITON_2, "dotprod"),
        ("aarch64", RASPBERRY_PI_4, "neon"),
        ("riscv64", "", "portable"),
    ],
)
def test_the_best_level_of_a_cpu(machine, features, best):
    found = levels.levels_within(machine, features.split(), tiles=True)
    assert found[0].name == best
    below = [level.name for level in levels.levels_of(machine)]
    assert [level.name for level in found] == below[below.index(best) :], "not the worse ones as well"


def test_without_the_systems_permission_there_are_no_tiles():
    assert levels.levels_within("x86_64", SAPPHIRE_RAPIDS.split(), tiles=False)[0].name == "avx512bf16"


def test_only_what_all_cpus_have_counts(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu fma\n")
    assert levels.cpu_features(cpuinfo) == {"fpu", "fma"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd i8mm\nCPU part\t: 0xd40\n")
    assert levels.cpu_features(cpuinfo) == {"fp", "asimd", "i8mm"}
    assert levels.cpu_features(tmp_path / "none") == frozenset()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are of x86-64")
def test_tiles_are_granted_only_where_they_are():
    if not levels.request_tiles():
        assert all(not level.has_tiles for level in levels.levels_here())
    elif "amx_tile" in levels.cpu_features(Path("/proc/cpuinfo")):
        assert levels.levels_here()[0].name == "amx"


def test_emulated_tiles_are_compiled_for_this_machine_and_never_chosen():
    emulated = levels.emulated()
    assert emulated.is_for_tests and not emulated.has_tiles
    assert {"-DPAGEWIRE_AMX", "-DPAGEWIRE_EMULATE_TILES"} <= set(emulated.flags)
    assert emulated.name not in {level.name for level in levels.levels_here()}


@pytest.mark.parametrize("name", [name for name in levels.NAMES if name not in {x.name for x in levels.levels_here()}])
def test_levels_that_this_cpu_lacks_compile(name, tmp_path):
    level = next(level for level in levels.LEVELS if level.name == name)
    cc = remote_kernels.cross_compiler(level.machine)
    if cc is None:
        pytest.skip(f"no compiler for {level.machine}")
    build.compile_levels(cc, [(level, tmp_path / "kernels.so")])
    assert (tmp_path / "kernels.so").stat().st_size > 10_000


def test_each_level_computes(level):
    torch.manual_seed(0)
    weight, x = torch.randn(100, 34), torch.randn(13, 34)
    torch.testing.assert_close(NativeMatrix(level, weight).product(x, None), x @ weight.t(), atol=2e-4, rtol=1e-5)
    most, ids = native_ops(level).greedy(x)
    assert torch.equal(most, x.amax(1)) and torch.equal(ids, x.argmax(1))

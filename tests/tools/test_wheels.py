"""Wheels with compiled kernels, made of a small wheel and one C file; `make dist` and `make wheels` are the whole."""

import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.kernels.cpu import build, levels
from pagewire.tools import wheels

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}


@pytest.fixture
def pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A wheel for any platform in a folder of its own. The kernels' source is tmp_path/sources/number.c."""
    sources, dist, top = tmp_path / "sources", tmp_path / "dist", tmp_path / "pagewire-1.0"
    for folder in (sources, dist, top / "pagewire" / "kernels" / "cpu", top / "pagewire-1.0.dist-info"):
        folder.mkdir(parents=True)
    (sources / "number.c").write_text(
        "#include <math.h>\n#include <pthread.h>\n"
        "int pagewire_number(void) { pthread_t t; return pthread_create(&t, 0, 0, 0) + pthread_detach(t); }\n"
        "float pagewire_tanh(float x) { return tanhf(x); }\n"
    )
    monkeypatch.setattr(build, "_FOLDER", sources)
    build._sources.cache_clear()
    (top / "pagewire" / "kernels" / "cpu" / "number.c").write_bytes((sources / "number.c").read_bytes())
    info = top / "pagewire-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagewire\nVersion: 1.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").touch()
    subprocess.run([sys.executable, "-m", "wheel", "pack", top, "--dest-dir", dist], check=True, capture_output=True)
    yield dist / "pagewire-1.0-py3-none-any.whl"
    build._sources.cache_clear()


@pytest.mark.parametrize("machine", sorted(ELF_MACHINE))
def test_a_wheel_holds_each_level_of_its_architecture(
    machine: str, pure: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if machine != platform.machine() and shutil.which(f"{machine}-linux-gnu-gcc") is None:
        pytest.skip(f"no compiler for {machine}")
    assert wheels.main([str(pure.parent), machine]) == 0, capsys.readouterr().err
    (wheel,) = pure.parent.iterdir()
    assert wheel.name == f"pagewire-1.0-py3-none-manylinux_2_28_{machine}.whl"
    assert wheel.name in capsys.readouterr().out
    with zipfile.ZipFile(wheel) as archive:
        about = archive.read("pagewire-1.0.dist-info/WHEEL").decode().splitlines()
        assert {"Root-Is-Purelib: false", f"Tag: py3-none-manylinux_2_28_{machine}"} <= set(about)
        compiled = [name for name in archive.namelist() if "/compiled/" in name]
        expected = {build.shipped(level).name for level in levels.levels_of(machine)}
        assert {Path(name).name for name in compiled} == expected
        record = archive.read("pagewire-1.0.dist-info/RECORD").decode()
        for name in compiled:
            content = archive.read(name)
            assert content[:4] == b"\x7fELF" and content[18] == ELF_MACHINE[machine] and name in record


def test_libraries_that_need_a_newer_glibc_are_refused(pure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pure.parents[1] / "sources" / "number.c").write_text(
        "#include <pthread.h>\nint pagewire_number(pthread_t t) { return pthread_join(t, 0); }\n"
    )
    build._sources.cache_clear()
    assert wheels.main([str(pure.parent), platform.machine()]) == 1
    assert "does not work with glibc 2.28" in capsys.readouterr().err
    assert list(pure.parent.iterdir()) == [pure]


def test_a_missing_cross_compiler_is_named(
    pure: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    assert wheels.main([str(pure.parent), other]) == 1
    assert f"Kernels for {other} need {other}-linux-gnu-gcc (Debian's" in capsys.readouterr().err
    assert wheels.main([str(pure.parent), platform.machine()]) == 1
    assert "need a C compiler (gcc or clang)" in capsys.readouterr().err

"""Where the library of a level comes from. The sources are one small file, so that compiling is quick."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from pagewire.config.config import CpuLevel
from pagewire.kernels.cpu import build, levels

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")


def forget():
    """What a process remembers of libraries and sources."""
    build._find.cache_clear()
    build._sources.cache_clear()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """The folder of the only C file, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "number.c").write_text("int pagewire_number(void) { return 7; }\n")
    monkeypatch.setattr(build, "_FOLDER", folder)
    monkeypatch.setattr(build, "SHIPPED", folder / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield folder
    forget()


def number(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).pagewire_number())


def ship(*names: str) -> None:
    build.SHIPPED.mkdir()
    cc = build.compiler()
    assert cc is not None
    here = [level for level in levels.levels_here() if level.name in names]
    build.compile_levels(cc, [(level, build.shipped(level)) for level in here], stripped=True)


def test_a_level_is_compiled_once(sources):
    best = levels.levels_here()[0].name
    first = build.find()
    assert first.level.name == best and first.origin.startswith("compiled in ")
    assert number(first.path) == 7
    forget()
    assert build.find() == build.Library(first.level, first.path, "compiled before")
    assert build.find("portable").level.name == "portable" and build.find().level.name == best


def test_changed_sources_are_compiled_again(sources):
    before = build.find("portable")
    (sources / "number.c").write_text("int pagewire_number(void) { return 8; }\n")
    forget()
    after = build.find("portable")
    assert after.origin.startswith("compiled in ") and (number(before.path), number(after.path)) == (7, 8)


def test_a_shipped_library_needs_no_compiler(sources, monkeypatch):
    ship("portable", levels.levels_here()[0].name)
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = build.find()
    assert found.origin == "from the wheel" and found.level == levels.levels_here()[0] and number(found.path) == 7
    assert set(build.shipped_levels()) == {"portable", found.level.name}
    with pytest.raises(build.BuildError, match="there is no C compiler"):
        build.find(levels.EMULATED)


def test_a_shipped_library_of_other_sources_is_never_loaded(sources, monkeypatch):
    ship("portable")
    (sources / "number.c").write_text("int pagewire_number(void) { return 8; }\n")
    forget()
    assert build.shipped_levels() == ()
    assert number(build.find("portable").path) == 8
    forget()
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match="there is no C compiler"):
        build.find("portable")


def test_what_the_compiler_says_is_told(sources):
    (sources / "wrong.c").write_text("int pagewire_wrong(void) { return nothing; }\n")
    with pytest.raises(build.BuildError, match=r"(?s)failed: .*wrong\.c.*nothing"):
        build.find("portable")
    assert not list((sources.parent / "cache").rglob("*.so"))


def test_a_compiler_that_takes_too_long_is_ended_and_told(sources, tmp_path, monkeypatch):
    """Nothing is compiled a second time for the other cache folder, and the message does not blame the folders."""
    count, cc = tmp_path / "count", tmp_path / "cc"
    cc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo slow\necho "$@" >>{count}\nexec sleep infinity\n')
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    monkeypatch.setattr(build, "_TIMEOUT_S", 2.0)
    count.touch()
    with pytest.raises(build.BuildError, match=r"cc took longer than 2 s for one file, .*: start again when .* or "):
        build.find("portable")
    assert len(count.read_text().splitlines()) <= 1, "one that has hardly begun is ended before it counts"
    assert not list((sources.parent / "cache").rglob("*.so"))


def test_a_level_that_the_cpu_lacks_is_refused(sources):
    with pytest.raises(build.BuildError, match="this CPU cannot run kernels of the level nonsense, only "):
        build.find("nonsense")


def test_processes_that_start_together_compile_once(sources, tmp_path):
    """The compiler is a script that counts its calls."""
    count, cc = tmp_path / "count", tmp_path / "cc"
    cc.write_text(f'#!/bin/sh\necho "$@" >>{count}\nexec {build.compiler()} "$@"\n')
    cc.chmod(0o755)
    code = (
        "from pathlib import Path; from pagewire.kernels.cpu import build;"
        f"build._FOLDER = Path({str(sources)!r}); print(build.find('portable').origin.split()[1])"
    )

    def start(_: int) -> str:
        environment = os.environ | {"CC": str(cc)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        return done.stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(start, range(3))) == ["before", "before", "in"]
    calls = count.read_text().splitlines()
    assert [line.count(" -c ") for line in calls if "--version" not in line] == [1, 0]


def test_the_flag_names_every_level():
    assert set(get_args(CpuLevel)) == {"auto", "torch", levels.EMULATED, *levels.NAMES}

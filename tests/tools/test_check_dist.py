"""`make dist` fails on an sdist that lacks files of a release. `make dist` itself tests the good case."""

import io
import platform
import tarfile
from pathlib import Path

import pytest

from pagewire.tools import check_dist


def test_files_that_an_sdist_lacks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "pagewire-1.0.tar.gz", "w:gz") as archive:
        for name in ("LICENSE", "README.md", "pyproject.toml", "engine/CHANGELOG.md"):
            archive.addfile(tarfile.TarInfo(f"pagewire-1.0/{name}"), io.BytesIO())
    (tmp_path / f"pagewire-1.0-py3-none-manylinux_2_28_{platform.machine()}.whl").touch()
    assert check_dist.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "pagewire-1.0.tar.gz lacks CHANGELOG.md, SECURITY.md\n"

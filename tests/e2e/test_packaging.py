"""The contents of the wheel and the sdist, and a server from the wheel outside the checkout."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from pagewire.kernels.cpu import build, levels
from pagewire.tools.servers import ROOT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of what git tracks, built from a copy."""
    source, out = tmp_path_factory.mktemp("source") / "pagewire", tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode == 0:
        for name in tracked.stdout.decode().strip("\0").split("\0"):
            if (ROOT / name).is_file() and not name.startswith(".typing"):
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, source / name)
    else:
        skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
        shutil.copytree(ROOT, source, ignore=skip)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def test_the_wheel_contains_only_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pagewire", next(top for top in tops if top.endswith(".dist-info"))}
    folders = {name.split("/")[1] for name in names if name.startswith("pagewire/")}
    assert not folders & {"tests", "bench", "tools", "docs"}
    assert {"api", "engine", "ipc", "kernels", "procs", "demo_model", "cli.py", "py.typed"} <= folders
    for demo in ("demo_model", "demo_hybrid"):
        assert {f"pagewire/{demo}/model.safetensors", f"pagewire/{demo}/tokenizer.json"} <= set(names)
    assert "pagewire/api/web/static/index.html" in names
    assert wheel.stat().st_size < 12 * 2**20


def test_the_sdist_contains_the_sources_and_the_demo_model(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "CHANGELOG.md", "SECURITY.md"} <= names
    assert {"pyproject.toml", "README.md", "engine/core/scheduler.py", "demo_model/model.safetensors"} <= names
    assert "demo_hybrid/model.safetensors" in names


def test_the_wheel_serves_outside_the_checkout(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that `make dist` would put into it, and without a compiler."""
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The .pth files in that folder, such as the one of an editable pagewire, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    python = tmp_path / "venv" / "bin" / "python"
    cc, level = build.compiler(), levels.levels_here()[0]
    if cc is not None:
        folder = site / "pagewire" / "kernels" / "cpu" / build.SHIPPED.name
        folder.mkdir()
        build.compile_levels(cc, [(level, folder / build.shipped(level).name)], stripped=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(python.parent))
    where = subprocess.run(
        [python, "-c", "import pagewire; print(pagewire.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert where.stdout.startswith(str(site)), where.stdout + where.stderr
    with Server(tmp_path, command=(str(python), "-m", "pagewire", "serve")) as server:
        assert server.answers("/v1/models")
    told = f"C kernels for {level.name}, from the wheel" if cc else "kernels of torch, which are slower, because the"
    assert told in server.log.read_text()

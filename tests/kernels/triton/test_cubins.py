"""The cache folder of compiled kernels, and the archives of shipped kernels."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pagewire.kernels.triton.cubins import install_shipped, pack, share_cache

ROOT = Path(__file__).resolve().parents[3]
KEY = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


def test_workers_share_the_cache_folder_that_the_operator_chooses():
    environ = {"XDG_CACHE_HOME": "/of/user"}
    assert share_cache(environ) == Path("/of/user/pagewire/triton") == Path(environ["TRITON_CACHE_DIR"])
    environ = {"XDG_CACHE_HOME": "/of/user", "TRITON_CACHE_DIR": "/chosen"}
    assert share_cache(environ) == Path("/chosen") and environ["TRITON_CACHE_DIR"] == "/chosen"
    assert share_cache({}) == Path.home() / ".cache" / "pagewire" / "triton"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of one kernel, and a file outside of the kernel's folder."""
    made = tmp_path / "cache" / KEY
    made.mkdir(parents=True)
    for suffix in (".cubin", ".json", ".ttgir"):
        (made / f"_kernel{suffix}").write_text(suffix)
    pack(tmp_path / "new" / "sm_90.zip", [{path.suffix: path for path in made.iterdir()}])
    with zipfile.ZipFile(tmp_path / "new" / "sm_90.zip", "a") as out:
        out.writestr("../evil/_kernel.cubin", b"")
    return tmp_path / "new" / "sm_90.zip"


def test_only_the_files_needed_to_run_a_kernel_are_installed(archive, tmp_path):
    folder = tmp_path / "folder"
    assert install_shipped(archive, folder) == 1
    listed = json.loads((folder / KEY / "__grp___kernel.json").read_text())["child_paths"]
    assert {name: Path(path).read_text() for name, path in listed.items()} == {
        "_kernel.cubin": ".cubin",
        "_kernel.json": ".json",
    }
    assert [path.name for path in folder.iterdir()] == [KEY] and len(list((folder / KEY).iterdir())) == 3


def test_kernels_in_the_cache_are_kept_unless_incomplete(archive, tmp_path):
    entry = tmp_path / "folder" / KEY
    install_shipped(archive, entry.parent)
    (entry / "_kernel.cubin").write_text("compiled here")
    assert install_shipped(archive, entry.parent) == 0
    assert (entry / "_kernel.cubin").read_text() == "compiled here"
    (entry / "__grp___kernel.json").unlink()  # as left by a process that died while writing
    assert install_shipped(archive, entry.parent) == 1
    assert (entry / "_kernel.cubin").read_text() == ".cubin"


LAUNCH = """
import os, sys
from pathlib import Path
from pagewire.kernels.triton.compile import compile_variant, main
from pagewire.kernels.triton.cubins import install_shipped
from pagewire.kernels.triton.silu_mul import VARIANTS

folder = Path(sys.argv[1])
os.environ["TRITON_CACHE_DIR"] = str(folder / "theirs")
main(["silu_mul", "--ship", str(folder / "sm_90.zip"), "--arch", "90"])
os.environ["TRITON_CACHE_DIR"] = str(folder / "ours")
print(install_shipped(folder / "sm_90.zip", folder / "ours"))
for architecture in (90, 80):
    print([sorted(files) for variant in VARIANTS for files in compile_variant(variant, architecture).values()])
"""


@pytest.mark.slow
def test_a_launch_finds_shipped_kernels(tmp_path):
    """A compilation without a device makes the same cache keys as a launch, as far as this can be tested without a
    device. In a process of its own, because this one runs Triton's interpreter."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".typing")}
    command = [sys.executable, "-c", LAUNCH, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    number, found, compiled = result.stdout.splitlines()
    assert number == "2" and found == "[['.cubin', '.json'], ['.cubin', '.json']]"
    assert ".ttgir" in compiled, "nothing was shipped for sm_80"

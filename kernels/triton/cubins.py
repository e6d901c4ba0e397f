"""The cache of compiled Triton kernels, and how the kernels shipped with a wheel get into it.

Triton compiles a kernel at its first launch and caches the result under a key: the kernel's source, the kinds of its
arguments, the architecture, and the version of Triton with its compiler. `compile.py` computes the same keys without a
GPU, so an archive of its kernels (`pack`) saves the first start on a GPU that work. An archive made with another Triton
does no harm: its keys are never looked up.

The worker calls `share_cache` and `install_shipped` before its first launch. Nothing here imports Triton.
"""

import json
import os
import re
import zipfile
from collections.abc import Iterable, MutableMapping
from pathlib import Path

_ENTRY = re.compile(r"([A-Z2-7]+)/(\w+)\.cubin")  # key, kernel


def share_cache(environ: MutableMapping[str, str] = os.environ) -> Path:
    """The folder in which all workers of a user share compiled kernels: the operator's TRITON_CACHE_DIR, or one in the
    user's cache. Call it before Triton is imported; child processes inherit the variable."""
    if not environ.get("TRITON_CACHE_DIR"):
        home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        environ["TRITON_CACHE_DIR"] = str(Path(home) / "pagewire" / "triton")
    return Path(environ["TRITON_CACHE_DIR"])


def shipped(architecture: int) -> Path:
    """The path at which an installation may have the archive for an architecture (90: sm_90)."""
    return Path(__file__).parent / "shipped" / f"sm_{architecture}.zip"


def pack(archive: Path, entries: Iterable[dict[str, Path]]) -> None:
    """Writes the archive: each kernel's code and launch metadata. entries: the files of each kernel by suffix; the
    intermediate representations among them are left out."""
    files = {f"{path.parent.name}/{path.name}": path for of in entries for path in (of[".cubin"], of[".json"])}
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as out:
        for name in sorted(files):  # ZipInfo has a fixed date, so the same kernels give the same archive
            out.writestr(zipfile.ZipInfo(name), files[name].read_bytes(), zipfile.ZIP_DEFLATED)
    partial.replace(archive)


def install_shipped(archive: Path, folder: Path) -> int:
    """Adds the archive's kernels that the folder lacks and returns their number. Other processes may install or compile
    the same kernels meanwhile: Triton takes a kernel as present once its __grp__ file exists, which is written last."""
    num_added = 0
    with zipfile.ZipFile(archive) as source:
        for name in source.namelist():
            found = _ENTRY.fullmatch(name)
            if found is None:
                continue
            entry, kernel = folder / found[1], found[2]
            listed = entry / f"__grp__{kernel}.json"
            if listed.exists():
                continue
            entry.mkdir(parents=True, exist_ok=True)
            paths = {file: str(entry / file) for file in (f"{kernel}.cubin", f"{kernel}.json")}
            for file, path in paths.items():
                _write(Path(path), source.read(f"{found[1]}/{file}"))
            _write(listed, json.dumps({"child_paths": paths}).encode())
            num_added += 1
    return num_added


def _write(path: Path, data: bytes) -> None:
    """Replaces the file atomically, so that another process never reads a part of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)

"""Where compiled kernels are kept, and how those that come with a wheel get there.

Triton compiles a kernel when it is launched for the first time, and keeps the result under a key: what the kernel is
made of, the kinds of its arguments, the architecture, and Triton itself with its compiler. `compile.py` comes to the
same keys on a machine without a GPU, so an archive of what it compiled (`pack`) spares the first start on a GPU that
work. An archive made with another Triton does no harm: nobody asks for its keys.

The worker calls `share_cache` and `install_shipped` before it launches anything. Nothing here imports Triton.
"""

import json
import os
import re
import zipfile
from collections.abc import Iterable, MutableMapping
from pathlib import Path

_ENTRY = re.compile(r"([A-Z2-7]+)/(\w+)\.cubin")  # key, kernel


def share_cache(environ: MutableMapping[str, str] = os.environ) -> Path:
    """The folder in which all workers of a user find what one of them compiled: the operator's TRITON_CACHE_DIR, or a
    folder of ours. To be called before Triton is imported, so that Triton takes it, and so do the children."""
    if not environ.get("TRITON_CACHE_DIR"):
        home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        environ["TRITON_CACHE_DIR"] = str(Path(home) / "pagewire" / "triton")
    return Path(environ["TRITON_CACHE_DIR"])


def shipped(architecture: int) -> Path:
    """Where the archive for an architecture (90: sm_90) is, if this installation came with one."""
    return Path(__file__).parent / "shipped" / f"sm_{architecture}.zip"


def pack(archive: Path, entries: Iterable[dict[str, Path]]) -> None:
    """Writes what is needed to run kernels: their code, and the numbers that a launch needs. entries: the files of each
    kernel by suffix, of which the others say how the code came about."""
    files = {f"{path.parent.name}/{path.name}": path for of in entries for path in (of[".cubin"], of[".json"])}
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as out:
        for name in sorted(files):  # of a fixed date, so that the same kernels make the same archive
            out.writestr(zipfile.ZipInfo(name), files[name].read_bytes(), zipfile.ZIP_DEFLATED)
    partial.replace(archive)


def install_shipped(archive: Path, folder: Path) -> int:
    """Adds the kernels of an archive that the folder lacks. Returns their number. Other processes may do the same, or
    compile the same kernels meanwhile: a kernel counts as there when its list of files is, which comes last."""
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
    """At once, so that another process sees all of it or none."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)

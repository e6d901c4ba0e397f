#!/bin/sh
# One command that proves and measures on a GPU what CI cannot, without an install and without a download.
#   bench/gpu/verify.sh [--smoke] [--only PART ...] [--out FOLDER] [--budget-s SECONDS]
#   PYTHON=python3.12 bench/gpu/verify.sh      another interpreter
#   WHEELS=folder bench/gpu/verify.sh          wheels for what is missing; they go to build/gpu-site and nowhere else
# Python, torch 2.11 with CUDA and Triton 3.6 have to be there. Parts whose packages are missing are skipped and named.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-}
for found in python3 python3.12 python3.11 python; do
    [ -n "$python" ] || ! command -v "$found" >/dev/null || python=$found
done
[ -n "$python" ] || { echo "There is no Python here; name one with PYTHON=." >&2; exit 2; }
site=$root/build/gpu-site
export PYTHONPATH="$root/.typing:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # the folder that this is called in is no place for imports: ours has a `kernels`
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" - "$site" "${WHEELS:-}" "$@" <<'PYTHON' || exit 2
"""Says what there is, installs what a folder of wheels has, and names what is missing."""
import re, subprocess, sys
from importlib.metadata import PackageNotFoundError, version

site, wheels, *flags = sys.argv[1:]
# What pagewire, its tests and the benchmarks need and a GPU machine may lack, with what that needs in turn.
PACKAGES = """msgspec numpy safetensors tokenizers huggingface-hub jinja2 markupsafe transformers tqdm regex pyyaml
pyzmq uvloop starlette anyio idna sniffio httptools uvicorn click h11 prometheus-client setproctitle psutil pytest
pluggy iniconfig pygments packaging pytest-xdist execnet hypothesis sortedcontainers""".split()

def has(package):
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False

def number(text):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])

for package in [p for p in PACKAGES if not has(p)]:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--target", site, *(["--find-links", wheels] if wheels else []), package]
    if subprocess.run(command, capture_output=True).returncode:
        print(f"missing: {package}; no wheel of it was found (pip download --no-deps {package}, then WHEELS=folder)")
    else:
        print(f"installed for this run: {package}")
wrong = [] if sys.version_info >= (3, 11) else [f"Python {sys.version.split()[0]}, and it needs 3.11"]
for package, least in (("torch", (2, 11)), ("triton", (3, 6))):
    if not has(package):
        wrong.append(f"no {package}")
    elif number(version(package)) < least:
        wrong.append(f"{package} {version(package)}, and it needs {'.'.join(map(str, least))}")
if not wrong:
    import torch
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"Triton {version('triton')}")
    if "--smoke" not in flags and "--help" not in flags and not torch.cuda.is_available():
        wrong.append("no CUDA device that torch sees (--smoke runs the same program on a CPU)")
for reason in wrong:
    print(f"cannot run: {reason}", file=sys.stderr)
sys.exit(bool(wrong))
PYTHON
exec "$python" -m pagewire.bench.gpu.verify "$@"

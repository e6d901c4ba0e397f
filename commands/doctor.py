"""Checks what a server needs here: Python, torch and triton, the device, memory, port, folders and a model.

Each line says what was found; one that is not well says what to do. The exit code is 1 if something would not work.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from ..config.config import MachineFacts
from ..config.flags import make_config
from ..config.machine import machine_facts
from ..errors import ConfigError, PagewireError, UnsupportedModel

_FEW_FILES = 4096  # descriptors: one for each connection
_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "note", "bad"]  # note: it works, and could be better
    subject: str
    found: str
    advice: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="a folder or Hub name to look at as well")
    parser.add_argument("--host", default="127.0.0.1", help="the address that serve is to listen on")
    parser.add_argument("--port", type=int, default=8000, help="the port that serve is to listen on (default: 8000)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code."""
    machine = machine_facts()
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_software,
        lambda: check_device(machine),
        lambda: check_memory(machine),
        check_folders,
        lambda: check_port(arguments.host, arguments.port),
        lambda: check_model(arguments.model, machine),
    ]
    num_bad = 0
    for check in checks:
        for finding in check():
            print(f"{_MARKS[finding.level]}  {finding.subject}: {finding.found}", flush=True)
            if finding.advice:
                print(f"      → {finding.advice}")
            num_bad += finding.level == "bad"
    print(f"{num_bad} thing{'s' * (num_bad != 1)} to mend" if num_bad else "everything that serve needs is here")
    return 1 if num_bad else 0


def check_software() -> Iterator[Finding]:
    """Python, the packages, and whether torch and triton belong together."""
    yield Finding("ok", "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    missing = []
    for line in requires("pagewire") or ():
        name = re.match(r"[\w.-]+", line)
        if name and "extra ==" not in line and _version(name[0]) is None:
            missing.append(name[0])
    if missing:
        yield Finding("bad", "packages", f"{', '.join(missing)} missing", f"pip install {' '.join(missing)}")
    torch, triton = _version("torch"), _version("triton")
    if torch is None:
        return
    wanted = wanted_triton(requires("torch") or [])
    pair = f"{torch}, triton {triton or 'none'}"
    if wanted is None:
        yield Finding("ok", "torch", f"{pair}; this build of torch asks for no triton")
    elif triton == wanted:
        yield Finding("ok", "torch", f"{pair}, which belong together")
    else:
        level: Literal["note", "bad"] = "bad" if Path("/dev/nvidiactl").exists() else "note"
        yield Finding(level, "torch", f"{pair}, but it was built with {wanted}", f"pip install triton=={wanted}")


def wanted_triton(requirements: list[str]) -> str | None:
    """The version of triton that this torch was made with, from its own metadata; None if it asks for none."""
    for line in requirements:
        if found := re.match(r"triton\s*\(?==\s*([\w.+]+)", line):
            return found[1]
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_device(machine: MachineFacts) -> Iterator[Finding]:
    """GPU with driver, or the CPU with its kernels."""
    has_node = Path("/dev/nvidiactl").exists()
    if has_node:
        yield from _check_gpu()
    else:
        yield Finding("ok", "GPU", "no NVIDIA device; the model runs on the CPU")
    has = [name for name, is_there in (("bfloat16", machine.has_bfloat16), ("AMX", machine.has_amx)) if is_there]
    found = f"{machine.num_cores} cores that may be used, {' and '.join(has) or 'no bfloat16'} instructions"
    yield Finding("ok", "CPU", found)
    if not has_node:
        yield _check_kernels(machine)


def _check_gpu() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text()) if driver.exists() else None
    name = found[0] if found else "of unknown version"
    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch

        works = torch.cuda.is_available()
    cuda = torch.version.cuda
    if works:
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            free, total = torch.cuda.mem_get_info(index)
            text = f"{torch.cuda.get_device_name(index)}, compute {major}.{minor}, driver {name}, CUDA {cuda}"
            yield Finding("ok", f"GPU {index}", f"{text}, {_size(free)} of {_size(total)} free")
            if (major, minor) < (8, 0):
                yield Finding(
                    "note", f"GPU {index}", "older than compute 8.0", "the kernels are made for 8.0 and newer"
                )
            elif free < total // 2:
                yield Finding(
                    "note",
                    f"GPU {index}",
                    "others hold most of its memory",
                    "end them, or lower --gpu-memory-utilization",
                )
    elif cuda is None:
        advice = "install a CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield Finding("bad", "GPU", f"there is one (driver {name}), but this torch is built for CPUs", advice)
    else:
        why = str(said[0].message).splitlines()[0] if said else "torch does not say why"
        advice = "is the driver as new as this CUDA asks for, and CUDA_VISIBLE_DEVICES not empty? try nvidia-smi"
        yield Finding("bad", "GPU", f"driver {name} does not work with torch's CUDA {cuda}: {why}", advice)


def _check_kernels(machine: MachineFacts) -> Finding:
    from ..kernels.cpu.build import BuildError, compiler, load

    cc = compiler()
    if cc is None or not machine.has_compiler:
        advice = (
            "install gcc or clang: the kernels for this CPU are two to four times as fast, and --deterministic needs "
            "them"
        )
        return Finding("note", "C compiler", "none; torch's own kernels are used", advice)
    try:
        import torch  # noqa: F401  # before the kernels, so that both share one pool of threads

        load()
    except (BuildError, ImportError) as error:
        return Finding("note", "C compiler", f"{cc}, but {error}", "torch's own kernels are used, which are slower")
    return Finding("ok", "C compiler", f"{cc}; the kernels for this CPU are compiled")


def check_memory(machine: MachineFacts) -> Iterator[Finding]:
    """Memory and descriptors."""
    free = free_memory()
    level: Literal["ok", "note"] = "ok" if free > 2 << 30 else "note"
    advice = "" if level == "ok" else "end other programs, or choose a small model and --kv-cache-memory"
    yield Finding(level, "memory", f"{_size(free)} free of {_size(machine.memory_bytes)}", advice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        yield Finding("ok", "open files", f"up to {'any number' if hard == resource.RLIM_INFINITY else hard}")
    else:
        yield Finding("note", "open files", f"at most {hard}, one a connection", "raise it: ulimit -Hn 65536")


def free_memory() -> int:
    """Bytes that this machine has, and this process's control group still allows."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        return min(free, max(0, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError):  # no such group, or "max"
        return free


def check_folders() -> Iterator[Finding]:
    """Where sockets and compiled kernels go."""
    from ..ipc.zmq_channel import make_run_folder, remove_run_folder

    try:
        folder = make_run_folder()
        remove_run_folder(folder)
        yield Finding("ok", "sockets", f"in {folder.parent}")
    except (ConfigError, OSError) as error:
        yield Finding("bad", "sockets", str(error), "set TMPDIR to a folder with a short path that you may write to")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache")
    there = next(p for p in (home, *home.parents) if p.exists())
    yield Finding("ok", "disk", f"{_size(shutil.disk_usage(there).free)} free for models under {home}")


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Whether serve could listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
        yield Finding("ok", "port", f"{host}:{port} is free")
    except OSError as error:
        advice = "end the program that has it, or choose another --port" if error.errno else "choose another --host"
        yield Finding("bad", "port", f"cannot listen on {host}:{port}: {error.strerror}", advice)


def check_model(model: str, machine: MachineFacts) -> Iterator[Finding]:
    """The model: configuration, tokenizer, chat template, weights, and whether serve would take it. Nothing is
    downloaded."""
    from ..config.resolve import resolve
    from ..engine.checkpoint.spec import read_spec
    from ..engine.runner.forecast import forecast
    from ..procs.prepare import examine

    if model and not Path(model).expanduser().exists() and not model.startswith((".", "/", "~")):
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            yield Finding(
                "note", "model", f"{model} is not in the Hub's cache", "serve downloads it at its first start"
            )
            return
    try:
        config = make_config(model=model)
        facts, _ = examine(config)
        engine = resolve(config, facts, machine)
        folder = Path(facts.path)
        yield from _check_text(folder)
        yield from _check_weights(folder)
        forecast(engine)
        summary = f"{read_spec(folder).architecture}, {facts.checkpoint_dtype}, context {facts.max_position:,} tokens"
        yield Finding("ok", "model", f"{facts.name}: {summary}")
    except UnsupportedModel as error:
        yield Finding("bad", "model", str(error), "choose a model of another architecture")
        return
    except PagewireError as error:
        yield Finding("bad", "model", str(error), "is this the folder of a whole checkpoint?")
        return
    room = free_memory()
    if not machine.has_gpu and facts.weight_bytes > room:
        found = f"{_size(facts.weight_bytes)} of weights, and {_size(room)} of memory are free"
        yield Finding("bad", "model", found, "choose a smaller model, or --quantization int8")


def _check_text(folder: Path) -> Iterator[Finding]:
    from ..engine.text.chat_template import load_chat_template
    from ..engine.text.tokenizer import load_tokenizer
    from ..errors import RequestError

    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer)
    try:
        template.encode(tokenizer, messages=b'[{"role":"user","content":"Hello"}]')
        yield Finding("ok", "tokenizer", f"{tokenizer.vocab_size:,} tokens, and a chat template that renders")
    except RequestError as error:
        yield Finding(
            "note", "tokenizer", f"{tokenizer.vocab_size:,} tokens; {error}", "completions work, chat does not"
        )


def _check_weights(folder: Path) -> Iterator[Finding]:
    """Whole files, by their headers. Raises ConfigError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors files.")
    for file in files:
        _check_file(file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text()))
        if missing := sorted(named - {file.name for file in files}):
            raise ConfigError(f"{folder} lacks {missing[0]}, which its index names.")
    total = sum(file.stat().st_size for file in files)
    yield Finding("ok", "weights", f"{len(files)} file{'s' * (len(files) != 1)}, {_size(total)}, none cut short")


def _check_file(file: Path) -> None:
    """Raises ConfigError for a file that ends too early."""
    import msgspec

    class Entry(msgspec.Struct):
        data_offsets: tuple[int, int]

    with file.open("rb") as data:
        head = data.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else sys.maxsize
        try:
            header = msgspec.json.decode(data.read(min(length, 100 << 20)), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            ends = [msgspec.json.decode(raw, type=Entry).data_offsets[1] for raw in header.values()]
        except msgspec.DecodeError:
            raise ConfigError(f"{file} is no safetensors file, or cut short.") from None
    if 8 + length + max(ends, default=0) > file.stat().st_size:
        raise ConfigError(f"{file} is cut short; fetch it again.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MB"

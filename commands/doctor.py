"""Checks what a server needs on this machine: packages, device, memory, port, folders and a model.

Each line reports a finding; a problem comes with advice. The exit code is 1 if a server would not work.
"""

import argparse
import asyncio
import os
import platform
import re
import resource
import shutil
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..config.config import EngineConfig, MachineFacts
from ..config.cpu_bind import bind_ranks, num_threads
from ..config.cpus import show_cpus
from ..config.flags import make_config
from ..config.machine import machine_facts
from ..errors import ConfigError, PagewireError, UnsupportedModel

if TYPE_CHECKING:
    from ..engine.runner.kernel_checks import Checked

_FEW_FILES = 4096  # descriptors: one for each connection
_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "note", "bad"]  # note: it works, but could be better
    subject: str
    found: str
    advice: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="a folder, GGUF file or Hub name (default: the demo model)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the --host of serve (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="the --port of serve (default: 8000)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        choices=range(1, 65),
        default=1,
        metavar="N",
        help="that of serve, to show each rank's CPUs and its part of the model (default: 1)",
    )
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", help="that of serve, to see how its ranks share the experts"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="run each GPU kernel that MODEL needs, and compare it with torch"
    )
    parser.add_argument("--cpu-bind", default="auto", metavar="TEXT", help="that of serve (default: auto)")


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    machine = machine_facts()
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_software,
        lambda: check_device(machine),
        lambda: check_cpus(machine, arguments.tensor_parallel_size, arguments.cpu_bind),
        lambda: check_memory(machine),
        check_folders,
        lambda: check_port(arguments.host, arguments.port),
        lambda: check_model(
            arguments.model,
            machine,
            num_ranks=arguments.tensor_parallel_size,
            deals_experts=arguments.enable_expert_parallel,
        ),
    ]
    if arguments.gpu:
        checks.append(lambda: check_gpu_kernels(arguments.model, machine))
        checks.append(lambda: check_weight_keeper(arguments.model, machine))
    num_bad = 0
    for check in checks:
        for finding in check():
            print(f"{_MARKS[finding.level]}  {finding.subject}: {finding.found}", flush=True)
            if finding.advice:
                print(f"      → {finding.advice}")
            num_bad += finding.level == "bad"
    print(f"{num_bad or 'no'} problem{'s' * (num_bad != 1)} found")
    return 1 if num_bad else 0


def check_software() -> Iterator[Finding]:
    """Python, the packages, and whether the versions of torch and triton match."""
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
        yield Finding("ok", "torch", f"{pair}; this build of torch requires no triton")
    elif triton == wanted:
        yield Finding("ok", "torch", f"{pair}, which match")
    else:
        level: Literal["note", "bad"] = "bad" if Path("/dev/nvidiactl").exists() else "note"
        yield Finding(level, "torch", f"{pair}, but torch requires {wanted}", f"pip install triton=={wanted}")


def wanted_triton(requirements: list[str]) -> str | None:
    """The version of triton in torch's requirements; None if there is none."""
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
    """The GPU with its driver, or the CPU with its kernels."""
    has_node = Path("/dev/nvidiactl").exists()
    if has_node:
        yield from _check_gpu()
    else:
        yield Finding("ok", "GPU", "no NVIDIA device; the model runs on the CPU")
    has = [name for name, is_there in (("bfloat16", machine.has_bfloat16), ("AMX", machine.has_amx)) if is_there]
    yield Finding("ok", "CPU", f"{' and '.join(has) or 'no bfloat16'} instructions")
    if not has_node:
        yield _check_kernels(machine)


def check_cpus(machine: MachineFacts, num_ranks: int, cpu_bind: str) -> Iterator[Finding]:
    """Sockets, NUMA nodes, the CPUs and the CPU time that a server may use, and what its ranks would use of them."""
    if not machine.numa_nodes:
        yield Finding("ok", "CPUs", f"{_count(machine.num_cores, 'core')}; this system does not show NUMA nodes")
        return
    allowed = [cpu for node in machine.numa_nodes for core in node.cores for cpu in core]
    num_cores, num_nodes = sum(len(node.cores) for node in machine.numa_nodes), len(machine.numa_nodes)
    places = f"{_count(machine.num_sockets, 'socket')}, {_count(num_nodes, 'NUMA node')}"
    cpus = f"CPUs {show_cpus(allowed)} of {show_cpus(machine.online_cpus)} allowed, {_count(num_cores, 'core')}"
    quota = "no quota" if machine.cpu_quota is None else f"a quota of {_count(machine.cpu_quota, 'CPU')}"
    yield Finding("ok", "CPUs", f"{places}; {cpus}; {quota}")
    if num_nodes > 1:
        for node in machine.numa_nodes:
            node_cpus = show_cpus(cpu for core in node.cores for cpu in core)
            yield Finding("ok", f"NUMA node {node.number}", f"CPUs {node_cpus}, {_count(len(node.cores), 'core')}")
    if machine.has_gpu:
        return
    try:
        sets = bind_ranks(cpu_bind, num_ranks, machine)
    except ConfigError as error:
        yield Finding("bad", "ranks", str(error), "correct it, or leave --cpu-bind out")
        return
    each = _count(num_threads(sets, num_ranks, machine), "thread")
    where = f"bound to CPUs {' | '.join(map(show_cpus, sets))}" if sets else "not bound to CPUs"
    found = f"{_count(num_ranks, 'rank')} of {each}, {where}"
    if num_ranks > 1 or num_nodes < 2:
        yield Finding("ok", "ranks", found)
    else:
        advice = (
            f"--tensor-parallel-size {num_nodes} runs a rank on each node, whose memory is nearer to its cores; what "
            "this gains was not measured yet"
        )
        yield Finding("note", "ranks", found, advice)


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"


def _check_gpu() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text()) if driver.exists() else None
    name = found[0] if found else "of unknown version"
    import warnings

    from ..kernels.triton import cubins

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
                    "note", f"GPU {index}", "older than compute 8.0", "the kernels are written for 8.0 and newer"
                )
            elif free < total // 2:
                yield Finding(
                    "note",
                    f"GPU {index}",
                    "other processes use most of its memory",
                    "end them, or lower --gpu-memory-utilization",
                )
        yield check_triton_build(cubins.share_cache(dict(os.environ)))
    elif cuda is None:
        advice = 'install a CUDA build of torch, with the command that PyTorch\'s page "Get started" shows'
        yield Finding("bad", "GPU", f"found (driver {name}), but this torch is built for CPUs", advice)
    else:
        why = str(said[0].message).splitlines()[0] if said else "torch gives no reason"
        advice = "check with nvidia-smi that the driver supports this CUDA, and that CUDA_VISIBLE_DEVICES is not empty"
        yield Finding("bad", "GPU", f"driver {name} does not work with torch's CUDA {cuda}: {why}", advice)


def check_triton_build(cache: Path) -> Finding:
    """Whether Triton can build the module by which it starts kernels. It does so once for each Python, whether the
    kernels themselves are shipped or not. cache: the folder of compiled kernels."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if any(cache.glob(f"*/cuda_utils{suffix}")):
        return Finding("ok", "Triton", f"its module for CUDA is built, in {cache}")
    named = os.environ.get("CC")
    found = [name for name in ((named,) if named else ("gcc", "clang")) if shutil.which(name)]
    header = Path(sysconfig.get_paths("posix_prefix")["include"]) / "Python.h"
    lacks = [] if found else [f"CC={named}" if named else "a C compiler"]
    lacks += [] if header.exists() else [str(header)]
    if not lacks:
        return Finding("ok", "Triton", f"{found[0]} and {header} are there, with which it builds its module for CUDA")
    advice = "apt install gcc python3-dev, or what this system calls them; they are needed for the first start only"
    return Finding("bad", "Triton", f"cannot build its module for CUDA without {' and '.join(lacks)}", advice)


def _check_kernels(machine: MachineFacts) -> Finding:
    from ..kernels.cpu.build import BuildError, compiler, find

    cc = compiler()
    if not machine.usable_levels:
        advice = (
            "install a wheel for this machine, or gcc or clang: our kernels are two to four times as fast, and "
            "--deterministic needs them"
        )
        found = "none for this CPU in the installation, and no C compiler; torch's own kernels are used"
        return Finding("note", "CPU kernels", found, advice)
    level = machine.usable_levels[0]
    try:
        library = find(level)
        library.load()
    except (BuildError, OSError) as error:
        found = f"{level}, but {error}"
        return Finding("note", "CPU kernels", found, "torch's own kernels are used, which are slower")
    by = "" if library.origin == "from the wheel" else f" by {cc}"
    others = ", ".join(machine.usable_levels[1:])
    return Finding("ok", "CPU kernels", f"{level}, {library.origin}{by}" + (f"; also {others}" if others else ""))


def check_memory(machine: MachineFacts) -> Iterator[Finding]:
    """Memory and file descriptors."""
    free = free_memory()
    level: Literal["ok", "note"] = "ok" if free > 2 << 30 else "note"
    advice = "" if level == "ok" else "end other programs, or choose a small model and a small --kv-cache-memory"
    yield Finding(level, "memory", f"{_size(free)} free of {_size(machine.memory_bytes)}", advice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        yield Finding("ok", "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard}")
    else:
        yield Finding("note", "open files", f"at most {hard}; each connection needs one", "raise it: ulimit -Hn 65536")


def free_memory() -> int:
    """Bytes that are available on this machine and within the limit of this process's control group."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        return min(free, max(0, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError):  # no control group, or its limit is "max"
        return free


def check_folders() -> Iterator[Finding]:
    """The folders of sockets and of downloaded models."""
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
    """Whether serve could listen on the port."""
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


def check_model(
    model: str, machine: MachineFacts, *, num_ranks: int = 1, deals_experts: bool = False
) -> Iterator[Finding]:
    """The model's configuration, tokenizer, chat template and weights, and whether serve supports it with so many
    ranks. deals_experts: they have whole experts. Downloads nothing."""
    from ..config.resolve import resolve
    from ..engine.checkpoint.source import is_here
    from ..engine.runner.forecast import forecast
    from ..procs.prepare import examine

    if model and not is_here(model):
        yield Finding("note", "model", f"{model} is not in the Hub's cache", "serve downloads it at its first start")
        return
    try:
        config = make_config(model=model, tensor_parallel_size=num_ranks, enable_expert_parallel=deals_experts)
        facts, _ = examine(config)
        engine = resolve(config, facts, machine)
        folder = Path(facts.path)
        yield from _check_text(folder)
        yield from _check_weights(folder)
        served = forecast(engine).served
        summary = f"{facts.checkpoint_dtype}, context {facts.max_position:,} tokens"
        yield Finding("ok", "model", f"{facts.name}: {summary}; {'; '.join(served.lines(engine))}")
    except UnsupportedModel as error:
        yield Finding("bad", "model", str(error), "choose a model of another architecture")
        return
    except PagewireError as error:
        yield Finding("bad", "model", str(error), "check that the checkpoint is complete")
        return
    room = free_memory()
    if not machine.has_gpu and facts.weight_bytes > room:
        found = f"{_size(facts.weight_bytes)} of weights, but only {_size(room)} of memory are free"
        yield Finding("bad", "model", found, "choose a smaller model, or --quantization int8")


def check_gpu_kernels(
    model: str, machine: MachineFacts, try_all: "Callable[[EngineConfig], Checked] | None" = None
) -> Iterator[Finding]:
    """A line for each kernel. try_all: that of `kernel_checks`, or of a test."""
    from ..config.resolve import resolve
    from ..engine.runner import kernel_checks
    from ..procs.prepare import examine

    subject = "GPU kernels"
    try:
        config = make_config(model=model)
        engine = resolve(config, examine(config)[0], machine)
        checked = (try_all or kernel_checks.try_all)(engine)
    except PagewireError as error:
        yield Finding("bad", subject, str(error), "correct it, and call doctor --gpu again")
        return
    for check in checked.checks:
        name = f"GPU kernel {check.kernel}"
        if check.problem:
            advice = "torch computes instead, which is slower; please report it with all of this output"
            yield Finding("bad", name, check.problem, advice)
        else:
            yield Finding("ok", name, f"gives what torch gives, up to {check.error:.1g}, in {check.ms:.0f} ms")
    if not checked.checks:
        why = checked.served.why or "torch sees no GPU on this machine"
        yield Finding("note", subject, f"not checked, because {why}")


def check_weight_keeper(model: str, machine: MachineFacts) -> Iterator[Finding]:
    """Whether a worker that is replaced finds its weights on the GPU."""
    from ..config.resolve import resolve
    from ..engine.runner.kept_weights import try_keeper
    from ..procs.prepare import examine
    from ..procs.weight_keeper import while_it_runs

    if not machine.has_gpu:
        return
    subject = "weight keeper"
    try:
        engine = resolve(make_config(model=model), examine(make_config(model=model))[0], machine)
        problem = asyncio.run(while_it_runs(lambda address: try_keeper(engine, address)))
    except PagewireError:
        return  # the check of the kernels says so
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem:
        yield Finding("ok", subject, "a worker that is replaced finds the weights on the GPU")
    else:
        yield Finding("note", subject, f"a worker that is replaced reads the checkpoint again, because {problem}")


def _check_text(folder: Path) -> Iterator[Finding]:
    from ..engine.text.chat_template import load_chat_template
    from ..engine.text.tokenizer import load_tokenizer
    from ..errors import RequestError

    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer)
    try:
        template.encode(tokenizer, messages=b'[{"role":"user","content":"Hello"}]')
        yield Finding("ok", "tokenizer", f"{tokenizer.vocab_size:,} tokens, with a working chat template")
    except RequestError as error:
        yield Finding(
            "note", "tokenizer", f"{tokenizer.vocab_size:,} tokens; {error}", "use completions; chat does not work"
        )


def _check_weights(folder: Path) -> Iterator[Finding]:
    """Checks the sizes of the files against their headers. Raises ConfigError."""
    from ..engine.checkpoint.gguf import is_gguf, read_gguf

    if is_gguf(folder):
        parts = read_gguf(folder, has_vocabulary=False).parts  # compares them
        size = sum(part.stat().st_size for part in parts)
        yield Finding("ok", "weights", f"{len(parts)} GGUF file{'s' * (len(parts) != 1)}, {_size(size)}")
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors files.")
    for file in files:
        _check_file(file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text()))
        if missing := sorted(named - {file.name for file in files}):
            raise ConfigError(f"{folder} lacks {missing[0]}, which its index names; download it.")
    total = sum(file.stat().st_size for file in files)
    yield Finding("ok", "weights", f"{len(files)} file{'s' * (len(files) != 1)}, {_size(total)}, all complete")


def _check_file(file: Path) -> None:
    """Raises ConfigError if the file is shorter than its header says."""
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
            raise ConfigError(f"{file} is truncated, or not a safetensors file; download it again.") from None
    if 8 + length + max(ends, default=0) > file.stat().st_size:
        raise ConfigError(f"{file} is truncated; download it again.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MB"

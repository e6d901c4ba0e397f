"""What a worker does about kernels that fail their trial: torch computes instead, with one line and a metric, or with
`--strict-kernels` the start ends.

A trial runs before the weights are read, because the executor decides how they are packed. All ranks take the same
decision: otherwise their collectives would not match.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from msgspec import structs

from ...config.config import EngineConfig
from ...config.machine import cache_folder
from ...errors import StartError
from ...kernels.cpu.levels import levels_here
from ...version import __version__
from ..checkpoint.spec import ModelSpec, read_spec
from ..device.base import Device, choose_device
from ..device.queue import Queue
from ..models.program import Program
from ..parallel.collectives import Alone, Group
from ..parallel.rank import RankInfo
from ..steps.trial import Check, fill_random
from ..steps.trial_journal import TrialJournal
from ..weights.loader import Sink, load_weights
from ..weights.open import open_checkpoint
from .served import Served, how_served

log = logging.getLogger(__name__)

GPU_KERNELS = (
    "activations", "copy_pages", "decode_attention", "edit_logits", "edit_rows", "elementwise", "extend_attention",
    "gated_norm", "latent_attention", "logprobs", "moe", "norm_rotary_write", "open_rows", "prepare_step", "product",
    "quantized_product", "rms_norm", "rotate", "round_rows", "row_statistics", "sampling", "scans", "silu_mul",
    "small_product", "widen",
)  # fmt: skip
"""Modules of `kernels/triton` that a trial can blame."""
_OTHER = "another rank's kernel"
_KEPT = {"quantized_product", "widen"}  # without them matrices are widened while they are loaded


@dataclass(frozen=True)
class Checked:
    """How a model is served after the trial of its kernels."""

    served: Served
    config: EngineConfig  # with the level of the C kernels that passed
    failed: tuple[str, ...] = ()  # kernels that torch, or a lower level, replaces
    without: frozenset[str] = frozenset()  # of them, those of a GPU that others run beside
    checks: tuple[Check, ...] = ()


def check_kernels(
    config: EngineConfig,
    spec: ModelSpec,
    served: Served,
    device: Device,
    queue: Queue | None,
    group: Group,
    broken: Collection[str] = (),
    rank: int = 0,
) -> Checked:
    """Tries the kernels that the model needs. broken: those that broke the device of an earlier process. rank: of all
    ranks, of which the group may have a part. Raises BrokenDeviceError, StartError with `--strict-kernels`, and
    ConfigError if torch cannot do what was asked for."""
    if served.executor == "Triton":
        assert queue is not None
        return _check_triton(config, spec, served, device, queue, group, broken, rank)
    if served.executor == "C":
        return _check_c(config, spec, served, device, group)
    return Checked(served, config)


def _check_triton(
    config: EngineConfig,
    spec: ModelSpec,
    served: Served,
    device: Device,
    queue: Queue,
    group: Group,
    broken: Collection[str],
    rank: int,
) -> Checked:
    from ..gpu.trial import OPTIONAL, try_kernels

    assert served.program is not None
    journal = TrialJournal(cache_folder(), machine_key(queue.device, rank))
    failed = dict.fromkeys(broken, "it broke the device of the process that tried it") | {
        kernel: f"a process that tried it on this machine has ended in it; remove {path} to try it again"
        for kernel, path in journal.crashed().items()
    }
    checks = {kernel: Check(kernel, problem, 0.0, 0.0) for kernel, problem in failed.items()}
    is_new = True
    while is_new and failed.keys() <= OPTIONAL:
        with torch.inference_mode():
            tried = try_kernels(
                config, served.program, queue=queue, dtype=served.dtype, shape=served.kv_shape,
                is_kept=served.is_kept and not failed.keys() & _KEPT, has_narrow_inputs=served.has_narrow_inputs,
                fill=_filler(config, served),
                without=frozenset(failed) | served.left_out, journal=journal,
            )  # fmt: skip
        checks |= {check.kernel: check for check in tried if check.kernel not in failed}
        found = {check.kernel: check.problem for check in tried if check.problem and check.kernel not in failed}
        failed |= found
        is_new = bool(found)  # a kernel that replaces another one may not have been tried
    journal.close()
    device.trim()
    table = tuple(checks.values())
    failed = _of_all_ranks(failed, group, queue.device)
    if not failed:
        return Checked(served, config, checks=table)
    is_whole = not failed.keys() <= OPTIONAL
    for kernel, problem in failed.items():
        instead = "the whole model" if is_whole else "that operation"
        _report(config, f"The GPU kernel {kernel}", problem, f"torch computes {instead} instead, which is slower")
    if is_whole:
        served = how_served(
            config, spec, queue.device, has_triton=True, rank=group.rank,
            failed=f"the kernel {next(kernel for kernel in failed if kernel not in OPTIONAL)} failed its check",
        )  # fmt: skip
        return Checked(served, config, tuple(failed), checks=table)
    served = replace(served, is_kept=served.is_kept and not failed.keys() & _KEPT)
    return Checked(served, config, tuple(failed), frozenset(failed), table)


def _check_c(config: EngineConfig, spec: ModelSpec, served: Served, device: Device, group: Group) -> Checked:
    """Tries the level, then those below it, and takes torch in the end."""
    from .native_trial import try_kernels

    names: dict[str, None] = {}
    levels = [level.name for level in levels_here()]
    first: tuple[Check, ...] = ()
    while served.executor == "C":
        with torch.inference_mode():
            checks = try_kernels(config, served, _filler(config, served))
        first = first or checks
        failed = {check.kernel: check.problem for check in checks if check.problem}
        failed = _of_all_ranks(failed, group, torch.device("cpu"))
        if not failed:
            break
        now = config.cpu_level or levels[0]
        below = levels[levels.index(now) + 1 :] if now in levels else levels
        config = structs.replace(
            config, cpu_level=below[0] if below else None, kernels="compiled" if below else "torch"
        )
        instead = f"the level {below[0]} is used" if below else "torch computes"
        for kernel, problem in failed.items():
            _report(config, f"The C kernel {kernel} of the level {now}", problem, f"{instead} instead, which is slower")
        names |= dict.fromkeys(failed)
        served = how_served(config, spec, device.torch_device, has_triton=False, rank=group.rank)
    return Checked(served, config, tuple(names), checks=first)


def _report(config: EngineConfig, what: str, problem: str, instead: str) -> None:
    if config.strict_kernels:
        raise StartError(f"{what} failed its check: {problem}. Without --strict-kernels, {instead}.")
    log.warning(
        "%s failed its check: %s. Now %s. Please report it with the output of `pagewire doctor --gpu MODEL`.",
        what, problem, instead,
    )  # fmt: skip


def _filler(config: EngineConfig, served: Served) -> Callable[[Program, Sequence[Sink]], None]:
    """Random weights, or where matrices stay as they are stored those of the checkpoint."""

    def fill(program: Program, sinks: Sequence[Sink]) -> None:
        if not served.is_kept:
            fill_random(program, sinks)
            return
        assert served.found is not None
        with open_checkpoint(Path(config.model.path), config.model.adapter) as reader:
            for sink in sinks:
                load_weights(reader, program, served.found, sink, scheme=served.spec.scheme)

    return fill


def _of_all_ranks(failed: dict[str, str], group: Group, device: torch.device) -> dict[str, str]:
    """With the kernels that failed on other ranks only."""
    if group.size == 1:
        return failed
    names = (*GPU_KERNELS, _OTHER)
    numbers = [float(name in failed) for name in GPU_KERNELS]
    numbers.append(float(any(name not in GPU_KERNELS for name in failed)))
    votes = torch.tensor(numbers, device=device)
    group.all_reduce(votes)
    others = _named(names, votes.tolist())
    return (
        failed
        | {name: "it failed on another rank" for name in others if name not in failed and name != _OTHER}
        | ({_OTHER: "it failed there"} if _OTHER in others and failed.keys() <= set(GPU_KERNELS) else {})
    )


def _named(names: Iterable[str], votes: Iterable[float]) -> list[str]:
    return [name for name, vote in zip(names, votes, strict=True) if vote]


def machine_key(device: torch.device, rank: int) -> str:
    """Of what decides whether a kernel works, for a `TrialJournal`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    parts = (name, torch.__version__, triton, __version__, rank)
    return sha256(repr(parts).encode()).hexdigest()[:16]


def try_all(config: EngineConfig, *, queue: Queue | None = None) -> Checked:
    """The trial of a worker's kernels without a worker, for `pagewire doctor --gpu`. queue: for the Triton kernels;
    None: a GPU's own. Raises ConfigError and CheckpointError for a model that is not served, and StartError."""
    spec, device = read_spec(Path(config.model.path)), choose_device(config, rank_info=RankInfo())
    queue = queue or device.queue()
    served = how_served(config, spec, device.torch_device, has_triton=queue is not None, capability=device.capability)
    if served.executor != "Triton":
        return Checked(served, config)
    return check_kernels(structs.replace(config, strict_kernels=False), spec, served, device, queue, Alone())

"""What a step of the engine launches on a GPU, found without one.

The engine's own decoder walks a program whose weights and buffers have shapes and no memory. Triton compiles the
kernels for the wanted architecture, as on a device, and a driver that runs nothing keeps every launch with its grid and
its arguments. torch's operations are kept as well. So the list is that of the engine at this commit.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.attention.kv_cache import KvCache
from ...engine.checkpoint.spec import read_spec
from ...engine.gpu.decoder import PROMPT_ROWS, TritonDecoder
from ...engine.gpu.packet import Limits, Packet, size_of
from ...engine.gpu.rules import largest_group
from ...engine.gpu.shapes import SampleShape, StepShape
from ...engine.gpu.state import RowState
from ...engine.gpu.weights import Loaded
from ...engine.models.program import Program
from ...engine.parallel.collectives import Alone
from ...engine.runner.served import program_of, shape_of
from ...kernels.triton.compile import NoDevice, disassembled
from ...kernels.triton.extend_attention import max_tiles, tile_tokens
from ...tools.make_checkpoint import make_checkpoint
from . import sass

BLOCK_SIZE = 64
_META = torch.device("meta")
_MAX_LEN = 8192


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the compiler made of a kernel."""

    registers: int  # per thread
    shared: int  # bytes per program
    warps: int
    code: sass.Code


@dataclass(frozen=True, kw_only=True)
class Launch:
    name: str  # the kernel's or, of torch's, "aten." with the operation's
    programs: int = 0
    kernel: Kernel | None = None  # None: one of torch's or the vendor's
    arguments: dict[str, Any]  # by name; of torch's operations by their number, and "out"

    def tensor(self, name: str) -> Tensor:
        found = self.arguments[name]
        assert isinstance(found, Tensor), (self.name, name)
        return found


@cache
def _kernel(cubin: Path, shared: int, warps: int) -> Kernel:
    registers, _, text = disassembled(cubin)
    return Kernel(registers=registers, shared=shared, warps=warps, code=sass.read(text))


class _Recorder(NoDevice):
    """A driver that keeps launches."""

    def __init__(self, architecture: int) -> None:
        super().__init__(architecture)
        self.launches: list[Launch] = []
        self._files: dict[str, Path] = {}

    def compiled(self, *, src: Any, metadata_group: dict[str, str], **_: object) -> None:
        """Triton calls it before the kernel's first launch."""
        self._files = {Path(path).suffix: Path(path) for path in metadata_group.values()}

    def launcher_cls(self, *args: Any) -> Any:
        src, metadata = args
        names = tuple(src.fn.arg_names)
        kernel = _kernel(self._files[".cubin"], metadata.shared, metadata.num_warps)

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            values = rest[-len(names) :]
            made = Launch(
                name=src.fn.fn.__name__, programs=x * y * z, kernel=kernel,
                arguments=dict(zip(names, values, strict=True)),
            )  # fmt: skip
            self.launches.append(made)

        return launch


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Keeps torch's operations that launch something: those that make or change numbers."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_made = not func.is_view and "empty" not in name and name not in ("detach", "alias", "_unsafe_view", "split")
        if is_made and isinstance(result, Tensor):
            operands = {str(number): arg for number, arg in enumerate(args)}
            self._launches.append(Launch(name=f"aten.{name}", arguments={**operands, **(kwargs or {}), "out": result}))
        return result


@contextmanager
def _recording(architecture: int) -> Iterator[list[Launch]]:
    recorder = _Recorder(architecture)
    triton.runtime.driver.set_active(recorder)
    triton.knobs.compilation.listener = recorder.compiled
    try:
        with _Operations(recorder.launches):
            yield recorder.launches
    finally:
        triton.knobs.compilation.listener = None


@cache
def program(model: str) -> Program:
    """Of one of `make_checkpoint.SHAPES`, from its config."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), model, weights=False)
        return program_of(read_spec(Path(folder)), 0, 1)


class Model:
    """An engine without memory. programs: of decode attention, by the head dimension."""

    def __init__(self, of: Program, *, rows: int, tokens: int, programs: int, dtype: torch.dtype) -> None:
        self.program = of
        shape = shape_of(of, dtype)
        groups = shape.groups(BLOCK_SIZE)
        assert not groups.state_pages, "recurrent layers are not estimated"
        group = largest_group(of)
        self.limits = Limits(
            rows=rows, tokens=max(rows, tokens), samples=rows, part=min(rows, 256),
            tiles=max_tiles(max(rows, tokens), rows, tile_tokens(group, 16)), blocks=-(-(_MAX_LEN + 1) // BLOCK_SIZE),
            tables=groups.num_tables,
        )  # fmt: skip
        loaded = Loaded(dtype=dtype, device=_META, keeps=False)
        for target in of.targets:
            loaded.end(target, loaded.begin(target))
        self.decoder = TritonDecoder(
            of, loaded, shape=shape, group=Alone(), max_len=_MAX_LEN, limits=self.limits, dtype=dtype,
            num_programs=lambda head_dim: programs, is_deterministic=False,
        )  # fmt: skip
        self.state = RowState(limits=self.limits, vocab_size=of.vocab, device=_META)
        self.decoder.open(
            KvCache(shape=shape, num_pages=1024, block_size=BLOCK_SIZE, device=_META, head_major=True)
        )  # fmt: skip
        self.packet = Packet.over(torch.empty(size_of(self.limits), dtype=torch.int32, device=_META), self.limits)

    def step(self, architecture: int, *, tokens: int, samples: int, is_prompt: bool) -> Sequence[Launch]:
        """The launches of a step and of its greedy samples, in their order."""
        with _recording(architecture) as launches:
            shape = StepShape(tokens, PROMPT_ROWS if is_prompt else 0)
            self.decoder.run(self.packet, self.state, shape)
            logits = self.decoder.sampled_logits(self.packet.parts[0].tokens[:samples])
            self.state.sample(logits, self.packet, 0, SampleShape(samples, 0, False, False))
        return launches

"""Where a part runs and how large its work is: on a GPU in full, or tiny on a CPU to see that its program is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...tools.make_checkpoint import make_checkpoint

if TYPE_CHECKING:
    from ...engine.device.queue import Queue

ROOT = Path(__file__).resolve().parents[2]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Of one part, which is a process of its own."""

    smoke: bool
    scratch: Path  # a folder that is removed at the end
    model: str = ""  # a name of `tools.make_checkpoint.SHAPES`, for parts that run one

    def choose(self, full: _T, smoke: _T) -> _T:
        """One of the two sizes."""
        return smoke if self.smoke else full

    def open_queue(self) -> "Queue":
        """Where kernels are launched. Only for parts that make no `Runner`, which has a queue of its own."""
        import torch

        from ...engine.device.queue import CudaQueue, EagerQueue

        return EagerQueue(torch.device("cpu")) if self.smoke else CudaQueue(torch.device("cuda", 0))

    def model_folder(self) -> Path:
        """Config and tokenizer of the model, for dummy weights."""
        like = self.choose(self.model, "qwen3-tiny")
        folder = self.scratch / like
        if not (folder / "config.json").exists():
            make_checkpoint(folder, like, weights=False)
        return folder

    def flags(self) -> dict[str, object]:
        """Settings of every engine here."""
        device = "cpu" if self.smoke else "cuda"
        return {"model": str(self.model_folder()), "load_format": "dummy", "dtype": "bfloat16", "device": device}

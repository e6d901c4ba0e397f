"""The device and the size of a part's work: full size on a GPU, or tiny on a CPU as a test of the program."""

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
    """The setting of one part."""

    smoke: bool
    scratch: Path  # a folder that is removed at the end
    model: str = ""  # a name of `tools.make_checkpoint.SHAPES`, for parts that run one

    def choose(self, full: _T, smoke: _T) -> _T:
        """`full` on a GPU, the other size in a smoke run."""
        return smoke if self.smoke else full

    def open_queue(self) -> "Queue":
        """The queue for kernels. Only for parts without a `Runner`, which has its own queue."""
        import torch

        from ...engine.device.queue import CudaQueue, EagerQueue

        return EagerQueue(torch.device("cpu")) if self.smoke else CudaQueue(torch.device("cuda", 0))

    def model_folder(self) -> Path:
        """A folder with the model's config and tokenizer, for dummy weights."""
        like = self.choose(self.model, "qwen3-tiny")
        folder = self.scratch / like
        if not (folder / "config.json").exists():
            make_checkpoint(folder, like, weights=False)
        return folder

    def flags(self) -> dict[str, object]:
        """Settings of every engine here."""
        device = "cpu" if self.smoke else "cuda"
        return {"model": str(self.model_folder()), "load_format": "dummy", "dtype": "bfloat16", "device": device}

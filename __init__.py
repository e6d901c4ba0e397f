"""pagewire: an LLM serving engine made of small processes.

Importing the package costs nothing: `LLM` and its parameters are loaded on first use, so that the processes which do
not need torch never see it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_llm import AsyncLLM as AsyncLLM
    from .beam import BeamSearchParams as BeamSearchParams
    from .engine_client import EngineClient as EngineClient
    from .llm import LLM as LLM
    from .llm import RequestOutput as RequestOutput
    from .sampling_params import SamplingParams as SamplingParams
    from .sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from .version import __version__ as __version__

_HOMES = {
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "beam",
    "EngineClient": "engine_client",
    "LLM": "llm",
    "RequestOutput": "llm",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "__version__": "version",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "EngineClient",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)

"""pagewire: an LLM serving engine made of small processes.

Public names are imported on first use, so that processes which do not need torch do not import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api.output.beam_search import BeamSearchParams as BeamSearchParams
    from .client.engine_client import EngineClient as EngineClient
    from .offline.async_llm import AsyncLLM as AsyncLLM
    from .offline.llm import LLM as LLM
    from .offline.llm import RequestOutput as RequestOutput
    from .offline.sampling_params import SamplingParams as SamplingParams
    from .offline.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from .version import __version__ as __version__

_HOMES = {
    "AsyncLLM": "offline.async_llm",
    "BeamSearchParams": "api.output.beam_search",
    "EngineClient": "client.engine_client",
    "LLM": "offline.llm",
    "RequestOutput": "offline.llm",
    "SamplingParams": "offline.sampling_params",
    "StructuredOutputsParams": "offline.sampling_params",
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

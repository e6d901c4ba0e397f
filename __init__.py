"""pagewire: an LLM serving engine made of small processes.

Importing the package costs nothing: `LLM` and its parameters are loaded on first use, so that the processes which do
not need torch never see it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_llm import AsyncLLM as AsyncLLM
    from .beam import BeamSearchParams as BeamSearchParams
    from .engine_client import EngineClient as EngineClient
    from .llm import LLM as LLM
    from .llm import RequestOutput as RequestOutput
    from .llm import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "EngineClient", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("LLM", "BeamSearchParams", "RequestOutput", "SamplingParams"):
        from . import llm

        return getattr(llm, name)
    if name == "AsyncLLM":
        from .async_llm import AsyncLLM

        return AsyncLLM
    if name == "EngineClient":
        from .engine_client import EngineClient

        return EngineClient
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")

"""pagewire: an LLM serving engine made of small processes.

Public names are imported on first use, so that processes which do not need torch do not import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api.output.beam_search import BeamSearchParams as BeamSearchParams
    from .client.engine_client import EngineClient as EngineClient
    from .engine.plugin.base import RunnerPlugin as RunnerPlugin
    from .offline.async_llm import AsyncLLM as AsyncLLM
    from .offline.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from .offline.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from .offline.engine_args import EngineArgs as EngineArgs
    from .offline.llm import LLM as LLM
    from .offline.llm_engine import LLMEngine as LLMEngine
    from .offline.outputs import CompletionOutput as CompletionOutput
    from .offline.outputs import RequestOutput as RequestOutput
    from .offline.pooled import PoolingParams as PoolingParams
    from .offline.prompts import TextPrompt as TextPrompt
    from .offline.prompts import TokensPrompt as TokensPrompt
    from .offline.sampling_params import RequestOutputKind as RequestOutputKind
    from .offline.sampling_params import SamplingParams as SamplingParams
    from .offline.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from .version import __version__ as __version__

_HOMES = {
    "AsyncEngineArgs": "offline.engine_args",
    "AsyncLLM": "offline.async_llm",
    "AsyncLLMEngine": "offline.async_llm_engine",
    "BeamSearchParams": "api.output.beam_search",
    "CompletionOutput": "offline.outputs",
    "EngineArgs": "offline.engine_args",
    "EngineClient": "client.engine_client",
    "LLM": "offline.llm",
    "LLMEngine": "offline.llm_engine",
    "PoolingParams": "offline.pooled",
    "RequestOutput": "offline.outputs",
    "RequestOutputKind": "offline.sampling_params",
    "RunnerPlugin": "engine.plugin.base",
    "SamplingParams": "offline.sampling_params",
    "StructuredOutputsParams": "offline.sampling_params",
    "TextPrompt": "offline.prompts",
    "TokensPrompt": "offline.prompts",
    "__version__": "version",
}
__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineClient",
    "LLM",
    "LLMEngine",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "RunnerPlugin",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> object:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)

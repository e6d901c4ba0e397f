"""`AsyncLLMEngine`: `AsyncLLM` with vLLM's methods, whose requests have ids.

engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="Qwen/Qwen3-0.6B"))
async for output in engine.generate("Hello", SamplingParams(max_tokens=64), request_id="a"):
    ...
await engine.shutdown()
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from ..errors import RequestError
from .async_llm import AsyncLLM
from .engine_args import EngineArgs
from .outputs import RequestOutput
from .prompts import Prompt
from .sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from ..engine.text.tokenizer import Tokenizer


class AsyncLLMEngine:
    """A model in separate processes, which start with the first request and end with `shutdown` or this process."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Raises ConfigError."""
        settings = engine_args.settings()
        self._llm = AsyncLLM(str(settings.pop("model")), **settings)
        self._starting: asyncio.Task[None] | None = None
        self._aborted: dict[str, asyncio.Event] = {}  # by the id of an open request

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: object) -> Self:
        """`options`: vLLM's other arguments, which are ignored. Raises ConfigError."""
        return cls(engine_args)

    async def start(self) -> None:
        """Loads the model, once. Raises ConfigError, CheckpointError, StartError."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._llm.start())
        await asyncio.shield(self._starting)

    async def shutdown(self) -> None:
        """Ends the engine. Open requests fail."""
        await self._llm.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Completes one prompt. Yields as `sampling_params.output_kind` says; the last output has `finished` set, with
        the finish reason "abort" after `abort`. `trace_headers`: vLLM's, without effect. Raises RequestError if it is
        refused or fails, ValueError if the id is in use."""
        if lora_request is not None:
            raise ValueError("lora_request is not there: give the adapter's folder as the model.")
        if request_id in self._aborted:
            raise ValueError(f"request_id {request_id!r} is in use")
        aborted = self._aborted[request_id] = asyncio.Event()
        told: dict[int, tuple[int, int, bool]] = {}
        try:
            await self.start()
            outputs = self._llm.generate(prompt, sampling_params, priority=priority)
            async for output in _until(outputs, aborted):
                output.request_id = request_id
                if (kind := sampling_params.output_kind) is RequestOutputKind.DELTA:
                    yield output.news(told)
                elif kind is RequestOutputKind.CUMULATIVE or output.finished:
                    yield output.copy()
        finally:
            del self._aborted[request_id]

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests; unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (aborted := self._aborted.get(name)) is not None:
                aborted.set()

    async def check_health(self) -> None:
        """Raises RequestError if the engine is lost."""
        await self._llm.snapshot()

    async def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        await self.start()
        return self._llm.get_tokenizer()


async def _until(outputs: AsyncGenerator[RequestOutput], aborted: asyncio.Event) -> AsyncGenerator[RequestOutput]:
    """The outputs until there are no more, or `aborted` is set: then the last one again, with the reason abort."""
    ending = asyncio.ensure_future(aborted.wait())
    last: RequestOutput | None = None
    try:
        while last is None or not last.finished:
            coming = asyncio.ensure_future(anext(outputs))
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                last = coming.result()
                yield last
                continue
            coming.cancel()
            await asyncio.wait((coming,))
            if last is None:
                raise RequestError("unavailable", "The request was aborted before its first token.")
            for output in last.outputs:
                output.finish_reason = output.finish_reason or "abort"
            yield replace(last, finished=True)
            return
    finally:
        ending.cancel()
        await outputs.aclose()

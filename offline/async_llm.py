"""`AsyncLLM`: the offline API for programs with an event loop. The core and the workers are separate processes; the
tokenizer and the detokenizer run in the caller's process.

    async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=64)):
            ...
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from ..api.output.parsers.registry import find_family
from ..client.engine_client import EngineClient
from ..config.flags import from_options
from ..errors import RequestError
from ..ipc.messages import (
    ChatPrompt,
    Enqueue,
    Failed,
    IdsPrompt,
    Message,
    Opened,
    Snapshot,
    StopHit,
    TextBatch,
    TextPrompt,
    TokenBatch,
)
from ..procs.detokenizer import DetokenizerActor
from ..procs.prepare import prepare
from ..procs.tokenizer import TokenizerActor
from .llm import Conversation, chat_prompt
from .outputs import CompletionOutput, RequestOutput
from .prompts import Prompt, parse
from .sampling_params import SamplingParams, submit

if TYPE_CHECKING:
    from ..engine.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model in separate processes, which end with the `async with` block, `close`, or this process."""

    def __init__(self, model: str = "", **options: object) -> None:
        """The arguments are those of `LLM`. `start` loads the model. Raises ConfigError."""
        self._model = model
        self._options = options
        self._config = from_options("AsyncLLM", {**options, "model": model})
        self._client: EngineClient | None = None
        self._posted: list[Message] = []  # by tokenizer and detokenizer, not handled yet
        self._next_rid = 1

    async def start(self) -> None:
        """Loads the model. Raises ConfigError, CheckpointError, StartError."""
        config = await asyncio.to_thread(prepare, self._config)
        self._folder = Path(config.model.path)
        self._reasoning = find_family(config.tool_call_parser, config.reasoning_parser).reasoning or ()
        self._tokenizer = TokenizerActor(config)
        self._detokenizer = DetokenizerActor(config)
        for actor in (self._tokenizer, self._detokenizer):
            actor.start(lambda receiver, message: self._posted.append(message))
        self._client = await EngineClient.start(self._model, **self._options)

    async def close(self) -> None:
        """Ends the engine. Open requests fail."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput]:
        """Completes one prompt: a text or token ids. Yields the same object each time, with all output so far; the last
        one has `finished` set. Closing the iterator cancels the request. Raises RequestError if it is refused or
        fails."""
        parsed = parse(prompt)
        if parsed.cache_salt:
            raise RequestError("invalid_request", "cache_salt is there in LLM and over HTTP.", param="cache_salt")
        return self._run(parsed.wire, parsed.text, sampling_params, priority)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Answers one conversation, rendered by the model's chat template. Yields and raises as `generate` does."""
        prompt = chat_prompt(messages, tools, chat_template_kwargs, add_generation_prompt, continue_final_message)
        return self._run(prompt, None, sampling_params, priority)

    async def snapshot(self) -> Snapshot:
        """The engine's gauges and counters. Raises RequestError if it is lost."""
        return await self._engine().snapshot()

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        from ..engine.text.tokenizer import load_tokenizer

        self._engine()
        return load_tokenizer(self._folder)

    def _engine(self) -> EngineClient:
        if self._client is None:
            raise RequestError("unavailable", "The AsyncLLM is not running: use it in an `async with` block.")
        return self._client

    async def _run(
        self,
        prompt: TextPrompt | ChatPrompt | IdsPrompt,
        text: str | None,
        sampling_params: SamplingParams | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput]:
        client = self._engine()
        params = sampling_params or SamplingParams()
        rid = self._next_rid
        self._next_rid += params.n
        self._tokenizer.handle([submit(rid, prompt, params, priority, self._reasoning)])
        enqueue = self._take_posted()[0]
        if isinstance(enqueue, Failed):
            raise RequestError(enqueue.kind, enqueue.detail, param=enqueue.param, num_tokens=enqueue.num_tokens)
        assert isinstance(enqueue, Enqueue), enqueue
        result = RequestOutput(str(rid), text, [], [CompletionOutput(i) for i in range(params.n)])
        ids = memoryview(enqueue.prompt_ids).cast("i").tolist()
        opened = Opened(rid, len(ids), 0, enqueue.prompt_ids, enqueue.text)
        generation = client.generate(
            ids, enqueue.sampling, enqueue.limits, n=params.n, priority=priority, constraint=enqueue.constraint
        )
        self._detokenizer.handle([replace(opened, rid=rid + i) for i in range(params.n)])
        try:
            async for choice, tokens in generation:
                self._detokenizer.handle([TokenBatch((replace(tokens, rid=rid + choice),))])
                for message in self._take_posted():
                    match message:
                        case TextBatch(chunks=chunks):
                            for chunk in chunks:
                                result.add(chunk.rid - rid, chunk)
                        case StopHit(rids=rids):
                            for hit in rids:
                                generation.cancel(hit - rid)
                yield result
                if result.finished:
                    return
        finally:
            generation.cancel()
            # Frees the detokenizer's state of sequences that have not ended.
            self._detokenizer.handle([Failed(rid + i, "unavailable", "") for i in range(params.n)])
            self._posted.clear()

    def _take_posted(self) -> list[Message]:
        posted, self._posted = self._posted, []
        return posted

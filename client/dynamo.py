"""A worker of NVIDIA Dynamo in front of a running engine: `python -m pagewire.dynamo --engine ADDRESS`.

Dynamo's frontend tokenizes, routes and detokenizes. This worker passes token ids to the core of an engine that was
started with `--client-address`, and its tokens back. It needs the package `ai-dynamo`, which registers it and serves
its requests; nothing of it is imported before `main`.
"""

import argparse
import asyncio
import json
import secrets
import sys
from array import array
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError, RequestError, StartError
from ..ipc.client_messages import Welcome
from ..ipc.messages import Constraint, Limits, RowLogprobs, Sampling, Tokens, bytes_to_ids
from ..procs.child import exit_code
from .engine_client import EngineClient, Generation

FINISH = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""Our reasons for an end, as Dynamo names them; others are errors."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


class Asked(NamedTuple):
    """A request of Dynamo in the engine's words."""

    prompt_ids: list[int]
    sampling: Sampling
    limits: Limits
    constraint: Constraint | None


def asked_of(request: Mapping[str, Any]) -> Asked:
    """Raises RequestError for what the engine does not do. What is null has its default."""
    options = {key: value for key, value in (request.get("sampling_options") or {}).items() if value is not None}
    stops = {key: value for key, value in (request.get("stop_conditions") or {}).items() if value is not None}
    output = {key: value for key, value in (request.get("output_options") or {}).items() if value is not None}
    for name in ("n", "best_of"):
        if options.get(name, 1) != 1:
            raise RequestError("invalid_request", f"{name} must be 1: Dynamo sends a request for each choice.")
    if request.get("multi_modal_data"):
        raise RequestError("invalid_request", "The model reads text only.")
    if request.get("prefill_result") or request.get("bootstrap_info"):
        raise RequestError("invalid_request", "This worker computes prompts itself: register no prefill workers.")
    numbers: dict[str, Any] = {name: float(options[name]) for name in _NUMBERS if name in options}
    sampling = Sampling(
        **numbers,
        top_k=max(0, int(options.get("top_k", 0))),  # -1: off, as 0
        seed=int(options["seed"]) % 2**63 if "seed" in options else secrets.randbits(62),
        logprobs=output.get("logprobs"),
    )
    limits = Limits(
        max_tokens=stops.get("max_tokens"),
        stop_token_ids=tuple({*stops.get("stop_token_ids", ()), *stops.get("stop_token_ids_hidden", ())}),
        ignore_eos=bool(stops.get("ignore_eos", False)),
        min_tokens=stops.get("min_tokens", 0),
    )
    return Asked(list(request["token_ids"]), sampling, limits, _constraint(options.get("guided_decoding")))


def _constraint(guided: Mapping[str, Any] | None) -> Constraint | None:
    for key, kind in _GRAMMARS.items():
        if guided and (value := guided.get(key)) is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            return Constraint(kind, text)  # type: ignore[arg-type]  # one of the table's
    return None


def chunk_of(tokens: Tokens, num_best: int | None) -> dict[str, Any]:
    """What Dynamo is sent of new tokens. num_best: of the log-probabilities that were asked for; None: none."""
    chunk: dict[str, Any] = {"token_ids": list(bytes_to_ids(tokens.ids)), "index": 0}
    if num_best is not None and tokens.logprobs is not None:
        chunk |= _logprobs(tokens.logprobs, num_best)
    if tokens.finish is not None:
        chunk["finish_reason"] = FINISH.get(tokens.finish, f"error: {tokens.finish}")
        if (usage := tokens.usage) is not None:
            chunk["completion_usage"] = {
                "prompt_tokens": usage.num_prompt,
                "completion_tokens": usage.num_output,
                "total_tokens": usage.num_prompt + usage.num_output,
                "prompt_tokens_details": {"cached_tokens": usage.num_cached},
            }
    return chunk


def _logprobs(found: RowLogprobs, num_best: int) -> dict[str, Any]:
    ids, values, width = bytes_to_ids(found.ids), array("f", found.values), found.width
    firsts = range(0, len(ids), width)
    best = [
        [
            {"rank": rank, "token_id": ids[first + rank], "token": "", "logprob": values[first + rank]}
            for rank in range(1, min(num_best, width - 1) + 1)
        ]
        for first in firsts
    ]
    chosen = {"log_probs": [values[first] for first in firsts]}
    return chosen | ({"top_logprobs": best} if num_best else {})


def check_block_size(facts: Welcome, given: int | None) -> None:
    """`given`: --block-size. Raises ConfigError if the engine's is another one: prefixes that Dynamo's router counts in
    blocks of another size are found nowhere."""
    if given not in (None, facts.block_size):
        raise ConfigError(
            f"--block-size {given} is not the engine's, whose KV blocks have {facts.block_size} tokens; leave it out."
        )


class Relay:
    """The methods of `dynamo.common.backend.LLMEngine`, which `engine_class` makes its base."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._client: EngineClient | None = None
        self.refusal: ConfigError | StartError | None = None  # why it could not be started
        self._open: dict[str, Generation] = {}  # by the id of Dynamo's context

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["Relay", Any]:
        """An engine that is not started, and how Dynamo registers it."""
        from dynamo.common.backend.worker import WorkerConfig

        arguments = parser().parse_args(argv)
        config = WorkerConfig(
            namespace=arguments.namespace,
            component=arguments.component,
            endpoint=arguments.endpoint,
            model_name=arguments.model,
            served_model_name=arguments.served_model_name,
            discovery_backend=arguments.discovery_backend,
            request_plane=arguments.request_plane,
            event_plane=arguments.event_plane,
            tool_call_parser=arguments.tool_call_parser,
            reasoning_parser=arguments.reasoning_parser,
        )
        return cls(arguments), config

    async def start(self, worker_id: int) -> Any:
        """Connects. Returns Dynamo's `EngineConfig`. Raises StartError if no engine answers, ConfigError if its blocks
        have another size than --block-size; Dynamo then raises an exception of its own, so `refusal` keeps it."""
        try:
            return await self._start()
        except (ConfigError, StartError) as error:
            self.refusal = error
            raise

    async def _start(self) -> Any:
        from dynamo.common.backend.engine import EngineConfig, LlmRegistration

        arguments = self._arguments
        self._client = await EngineClient.connect(arguments.engine, key_file=arguments.key_file, name="dynamo")
        facts = self._client.facts
        check_block_size(facts, arguments.block_size)
        snapshot = await self._client.snapshot()
        return EngineConfig(
            model=arguments.model,
            served_model_name=arguments.served_model_name or facts.model,
            llm=LlmRegistration(
                context_length=facts.max_model_len,
                kv_cache_block_size=facts.block_size,
                total_kv_blocks=snapshot.num_blocks,
                max_num_seqs=arguments.max_num_seqs,
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields tokens as they come. What cannot be done ends with an error's sentence as the reason."""
        assert self._client is not None, "generate before start"
        try:
            asked = asked_of(request)
            generation = self._client.generate(
                asked.prompt_ids, asked.sampling, asked.limits, constraint=asked.constraint
            )
        except (RequestError, ValueError, TypeError) as error:
            yield {"token_ids": [], "index": 0, "finish_reason": f"error: {error}"}
            return
        self._open[context.id()] = generation
        try:
            async with generation:
                async for _, tokens in generation:
                    yield chunk_of(tokens, asked.sampling.logprobs)
        except RequestError as error:
            yield {"token_ids": [], "index": 0, "finish_reason": f"error: {error}"}
        finally:
            self._open.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        """Dynamo's client has gone."""
        if (generation := self._open.get(context.id())) is not None:
            generation.cancel()

    async def is_quiescent(self) -> bool | None:
        """Nothing is sent from one worker to another."""
        return True

    async def kv_event_sources(self) -> list[Any]:
        """The engine's own events, which Dynamo reads as they are."""
        from dynamo.common.backend.publisher import ZmqSource

        arguments = self._arguments
        return [ZmqSource(arguments.kv_events, arguments.kv_events_topic)] if arguments.kv_events else []

    async def cleanup(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m pagewire.dynamo", description=__doc__.partition("\n")[0])
    made.add_argument("--engine", required=True, help="the engine's --client-address")
    made.add_argument("--key-file", help="the engine's --client-key-file, for tcp:// addresses")
    made.add_argument("--model", required=True, help="the model's folder: Dynamo's frontend reads its tokenizer")
    made.add_argument("--served-model-name", help="the model's name in requests (default: the engine's)")
    made.add_argument("--kv-events", help="the engine's --kv-events, if Dynamo is to route by KV")
    made.add_argument("--kv-events-topic", default="", help="prefix of the topics to read (default: all)")
    made.add_argument("--block-size", type=int, help="tokens of the engine's KV blocks, if they are to be checked")
    made.add_argument("--max-num-seqs", type=int, help="the engine's, for Dynamo's planner")
    made.add_argument("--namespace", default="dynamo")
    made.add_argument("--component", default="backend")
    made.add_argument("--endpoint", default="generate")
    made.add_argument("--discovery-backend", default="etcd", help="etcd, kubernetes, file or mem")
    made.add_argument("--request-plane", default="tcp")
    made.add_argument("--event-plane", default=None)
    made.add_argument("--tool-call-parser", help="of Dynamo's frontend")
    made.add_argument("--reasoning-parser", help="of Dynamo's frontend")
    return made


def engine_class() -> type[Any]:
    """`Relay` as a subclass of Dynamo's engine. Raises ConfigError without the package."""
    try:
        from dynamo.common.backend.engine import LLMEngine
    except ImportError as error:
        raise ConfigError(f"Dynamo is not installed ({error}); run pip install ai-dynamo.") from error
    return type("PagewireEngine", (Relay, LLMEngine), {})


def main(argv: list[str] | None = None) -> int:
    """Serves Dynamo's requests until it ends. The exit code."""
    parser().parse_args(argv)
    try:
        kind = engine_class()
        from dynamo.common.backend.worker import Worker
    except ConfigError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return exit_code(error)

    async def work() -> None:
        engine, config = await kind.from_args(argv)
        try:
            await Worker(engine, config).run()
        except Exception:
            if engine.refusal is None:
                raise
            raise engine.refusal from None

    try:
        asyncio.run(work())
    except (ConfigError, StartError) as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return exit_code(error)
    return 0

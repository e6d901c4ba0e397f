"""An engine for Ray Serve LLM: `RAYLLM_VLLM_ENGINE_CLS=pagewire.ray.serve_llm:Engine`, or `LLMServer(engine_cls=…)`.

`Engine` has the names and parameters of Ray's abstract class `LLMEngine`, and imports nothing of it, because importing
it needs vLLM or SGLang. It runs pagewire's server as a child and talks HTTP to it.
"""

import json
import secrets
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import aiohttp

from ..config.flags import SETTINGS
from ..errors import ConfigError
from .engine_process import EngineProcess

_MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"  # imported by whoever calls `Engine`
_STOP_S = 15.0


class Engine:
    def __init__(self, llm_config: Any) -> None:
        """`llm_config`: Ray's LLMConfig. Its `engine_kwargs` are settings of `pagewire serve`. Raises ConfigError."""
        unknown = sorted(llm_config.engine_kwargs.keys() - SETTINGS.keys())
        if unknown:
            raise ConfigError(f"engine_kwargs: {unknown[0]} is no setting of pagewire serve.")
        self._name = llm_config.model_id
        source = llm_config.model_loading_config.model_source
        self._key, admin_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._admin_headers = {"Authorization": f"Bearer {admin_key}"}
        self._settings = {
            "enable_sleep_mode": True,
            **llm_config.engine_kwargs,
            "model": source if isinstance(source, str) else self._name,
            "served_model_name": [self._name],
            "api_key": [self._key],
            "admin_api_key": [admin_key],
        }
        self._process: EngineProcess | None = None

    async def start(self) -> None:
        """Returns when the model is loaded. Raises StartError."""
        import ray

        host = ray.util.get_node_ip_address()
        self._process = EngineProcess(self._settings, host=host, key=self._key)
        await self._process.until_ready()

    def routing_stats(self) -> dict[str, Any]:
        """None: requests are routed by Serve's own rules."""
        return {}

    async def resolve_lora(self, lora_model: Any) -> None:
        raise NotImplementedError("pagewire serves one adapter, merged at start: name it as the model.")

    # ── requests: each call yields texts of a stream, or one object ──────────────────────────────────────────────────

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for one in self._post("/v1/chat/completions", request, "ChatCompletionResponse"):
            yield one

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for one in self._post("/v1/completions", request, "CompletionResponse"):
            yield one

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for one in self._post("/v1/embeddings", request, "EmbeddingResponse"):
            yield one

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        yield _refusal(501, "pagewire transcribes no audio.")

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for one in self._post("/tokenize", request, "TokenizeResponse"):
            yield one

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for one in self._post("/detokenize", request, "DetokenizeResponse"):
            yield one

    async def _post(self, path: str, request: Any, kind: str) -> AsyncGenerator[Any, None]:
        process = self._running()
        body = {**request.model_dump(mode="json", exclude_unset=True), "model": self._name}
        call = process.session.post(
            process.url + path, json=body, headers=process.headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        async with call as response:
            if response.status != 200:
                text = await response.text()
                yield _refusal(response.status, _message_of(text))
            elif response.content_type == "text/event-stream":
                event = b""
                async for line in response.content:
                    event += line
                    if event.endswith(b"\n\n"):
                        yield event.decode()
                        event = b""
            else:
                yield _made(kind, json.loads(await response.read()))

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def check_health(self) -> None:
        """Raises StartError if the engine has ended."""
        self._running().check()

    async def build_asgi_app(self) -> Any:
        raise NotImplementedError("Direct streaming is pagewire.ray.app's: deploy that.")

    async def reset_prefix_cache(self) -> None:
        raise NotImplementedError("pagewire drops no cached prefix while it serves; sleep and wake it.")

    async def sleep(self, **kwargs: Any) -> None:
        await self._administer("POST", "/sleep", {name: str(value) for name, value in kwargs.items()})

    async def wakeup(self, **kwargs: Any) -> None:
        await self._administer("POST", "/wake_up", {})

    async def is_sleeping(self) -> bool:
        return bool((await self._administer("GET", "/is_sleeping", {}))["is_sleeping"])

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        raise NotImplementedError("pagewire runs no code of its caller in its workers.")

    async def pause(self, **kwargs: Any) -> None:
        raise NotImplementedError("pagewire cannot pause; use sleep.")

    async def resume(self, **kwargs: Any) -> None:
        raise NotImplementedError("pagewire cannot pause; use wakeup.")

    async def is_paused(self) -> bool:
        return False

    async def shutdown(self) -> None:
        """Ends open requests after --drain-timeout."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.drain(_STOP_S)

    def _running(self) -> EngineProcess:
        assert self._process is not None, "start was not called, or shutdown was"
        return self._process

    async def _administer(self, method: str, path: str, query: dict[str, str]) -> dict[str, Any]:
        process = self._running()
        limit = aiohttp.ClientTimeout(total=None)
        call = process.session.request(
            method, process.url + path, params=query, headers=self._admin_headers, timeout=limit
        )
        async with call as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(_message_of(text))
            found: dict[str, Any] = json.loads(text)
            return found


def _made(kind: str, values: dict[str, Any]) -> Any:
    """Ray's object of this kind; where Ray LLM is not imported, one with the same attributes."""
    models = sys.modules.get(_MODELS)
    return SimpleNamespace(**values) if models is None else getattr(models, kind).model_validate(values)


def _refusal(status: int, message: str) -> Any:
    """Ray's ErrorResponse."""
    error = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "code": status}
    return _made("ErrorResponse", {"error": error})


def _message_of(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "The engine has refused the request."

"""What the router reads of an engine's /load, and with which of its keys.

The client's key is passed on to the engine, so each key of the router should be one of the engine. The keys are tried
when the engine has (re)started; then one that it takes is used. An engine logs each key that it refuses, so refused
ones are tried again less and less often.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec
from msgspec import Struct

MAX_KEYS = 8  # that are tried, so that the first check of a router with very many keys is short
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
_MOST_DOUBLINGS = 6
_REFUSED = 401  # 403 is of an engine that takes no requests by this name, with no key


class ModelReport(Struct, frozen=True):
    """The fields of a model in /load that the router reads. Servers before 0.2 lack the last three."""

    state: str
    fits: bool
    files_digest: str = ""
    max_model_len: int = 0  # tokens
    kv_digest: str = ""


class LoadReport(Struct, frozen=True):
    """The fields of an engine's /load that the router reads. Servers before 0.2 have only the first."""

    server_load: int
    version: str = ""
    role: str = "both"
    kv_host: str | None = None
    kv_port: int | None = None
    takes_peers: bool = False
    prompt_ms: float = 0.0
    load_ms: float = 0.0
    models: dict[str, ModelReport] = {}


class LoadReader:
    """Reads the /load of one engine."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, keys: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`url`: of /load. `keys`: all that the router's clients may have; empty: it asks none of them."""
        self._session = session
        self._url = url
        self._clock = clock
        self._keys: Sequence[str | None] = keys[:MAX_KEYS] or [None]
        self._num_keys = len(keys)
        self._is_taken = False  # whether the engine takes `key`
        self._try_at = 0.0  # when all keys are tried
        self._num_tries = 0  # with refused keys, in a row
        self.key = self._keys[0]  # the first that the engine takes, None without keys
        self.refusal: str | None = None  # why requests of this router's clients fail, one sentence
        self.concern: str | None = None  # what else is wrong with its keys or its /load, one sentence

    async def read(self) -> LoadReport | None:
        """None: it does not say, or it is not time to ask. Raises aiohttp.ClientError or OSError."""
        if self._clock() >= self._try_at:
            return await self._try()
        if not self._is_taken:
            return None
        status, body = await self._get(self.key)
        if status == _REFUSED:  # its keys have changed
            return await self._try()
        return self._report(status, body)

    def restarted(self) -> None:
        """The engine cannot be reached; when it can be again it may have other keys."""
        self._try_at, self._num_tries = 0.0, 0

    async def _try(self) -> LoadReport | None:
        """Asks with every key."""
        answers = [(key, *await self._get(key)) for key in self._keys]
        taken = [answer for answer in answers if answer[1] != _REFUSED]
        num_refused = len(answers) - len(taken)
        self._is_taken, self.refusal, self.concern, self._try_at = bool(taken), None, None, math.inf
        if num_refused:
            self._try_at = self._clock() + min(LAST_RETRY_S, FIRST_RETRY_S * 2.0**self._num_tries)
            self._num_tries = min(self._num_tries + 1, _MOST_DOUBLINGS)
        else:
            self._num_tries = 0
        if not taken:
            self._refused()
            return None
        self.key, status, body = taken[0]
        report = self._report(status, body)
        if num_refused:
            self.concern = f"It refuses {num_refused} of {self._tried()}; give both the same keys."
        return report

    def _tried(self) -> str:
        few = f"this router's {self._num_keys} API keys"
        return few if self._num_keys == len(self._keys) else f"the first {len(self._keys)} of {few}"

    def _refused(self) -> None:
        """It has refused every key that was tried."""
        if self._keys == [None]:
            self.concern = "It asks for an API key, and this router has none, so its load and its models are unknown."
        elif self._num_keys > len(self._keys):  # it may take one of the others
            self.concern = (
                f"It refuses {self._tried()}, so its load and its models are unknown; give both the same keys."
            )
        elif len(self._keys) == 1:
            self.refusal = f"It refuses this router's API key (status {_REFUSED}); give both the same --api-key."
        else:
            self.refusal = f"It refuses all API keys of this router (status {_REFUSED}); give both the same keys."

    def _report(self, status: int, body: bytes) -> LoadReport | None:
        if status == 200:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                report = msgspec.json.decode(body, type=LoadReport)
                if self._try_at == math.inf:  # no key is refused
                    self.concern = None
                return report
        self.concern = f"Its /load cannot be read (status {status}), so its load and its models are unknown."
        return None

    async def _get(self, key: str | None) -> tuple[int, bytes]:
        async with self._session.get(self._url, headers=bearer(key)) as response:
            return response.status, await response.read()


def bearer(key: str | None) -> dict[str, str]:
    """The headers of a request with this key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}

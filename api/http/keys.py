"""API keys: finds the owner of a request's key, in OpenAI's header or Anthropic's."""

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence

from ...config.access import ApiKey
from .entitlement import EVERYTHING, Entitlement
from .http_error import HttpError
from .rate_limit import Account, Bucket


class Caller:
    """The owner of a key; without keys all requests have the same one."""

    def __init__(self, name: str, salt: bytes, account: Account, entitlement: Entitlement) -> None:
        self.name = name  # for logs and lists: the beginning of the key's SHA-256, in hex
        self.entitlement = entitlement
        self.salt = salt  # separates owners' prefix caches and stored responses; empty with fewer than two keys
        self.account = account


class Keys:
    """The keys of users, or those of administrators."""

    def __init__(self, keys: Sequence[ApiKey], anyone: Account, clock: Callable[[], float]) -> None:
        """`anyone`: the account of all requests if there are no keys."""
        self._clock = clock
        self._digests: list[bytes] = []
        self._callers: list[Caller] = []
        self._anyone = Caller("anyone", b"", anyone, EVERYTHING)
        self.change(keys)

    def change(self, keys: Sequence[ApiKey]) -> None:
        """These are the keys from now on. One that there was keeps what it has taken of its rates."""
        before = {digest: caller.account for digest, caller in zip(self._digests, self._callers, strict=True)}
        self._digests = [hashlib.sha256(key.key.encode()).digest() for key in keys]
        self._callers = []
        for digest, key in zip(self._digests, keys, strict=True):
            account = before.get(digest) or Account(clock=self._clock)
            account.change(key.requests_per_minute, key.tokens_per_minute)
            salt = digest[:16] if len(keys) > 1 else b""
            entitlement = Entitlement(key.latency_classes, key.min_priority)
            self._callers.append(Caller(f"key {digest.hex()[:8]}", salt, account, entitlement))

    def __contains__(self, caller: Caller) -> bool:
        """Whether it has one of these keys."""
        return any(caller is each for each in self._callers)

    def buckets(self) -> dict[str, Bucket]:
        """Of all accounts, by names that do not depend on the other keys."""
        owned = dict(zip(self._digests, self._callers, strict=True)) or {b"": self._anyone}
        return {
            f"{digest.hex()}/{name}": bucket
            for digest, caller in owned.items()
            for name, bucket in caller.account.buckets.items()
        }

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The owner of the request's key. Raises HttpError 401."""
        if not self._digests:
            return self._anyone
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not scheme and b"x-api-key" in headers:  # Anthropic's way
            scheme, key = b"bearer", headers[b"x-api-key"]
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, so the time does not tell which one was close.
        is_known = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(is_known):
            raise HttpError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return self._callers[is_known.index(True)]

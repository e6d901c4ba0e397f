"""The key with which the doors of a cluster's applications reach their engines, if clients need none.

It is made once and kept in Ray's store, so that engines and doors of different versions of an application have the same
one. Whoever may run code in the cluster can read it.
"""

import secrets

_NAMESPACE, _NAME = b"pagewire", b"inner-key"


def inner_key() -> str:
    """Call it in a process that is connected to Ray."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    _internal_kv_put(_NAME, secrets.token_urlsafe(24).encode(), overwrite=False, namespace=_NAMESPACE)
    found: bytes = _internal_kv_get(_NAME, namespace=_NAMESPACE)
    return found.decode()

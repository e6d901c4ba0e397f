"""`kv_transfer_params`: what a proxy in front of prefill and decode engines says of a request's KV, and is told.

The forms are those of llm-d's sidecar (2026-08: its connectors `nixlv2`, `shared-storage` and `offloading`) and of
production-stack's router. pagewire finds KV by the keys of blocks, so the parameters name no blocks here: they say that
another engine computes the prompt (a prefill leg, whose blocks this engine must offer) or has computed it (a decode
leg). The KV itself travels by `--kv-connector`: p2p on one machine, or shared.
"""

import secrets
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from ...config.config import EngineConfig
from ...ipc.messages import Submit
from ..http.http_error import HttpError, unsupported

_PARAM = "kv_transfer_params"
_ENGINE_ID = secrets.token_hex(16)
_FOREIGN = {
    "remote_bootstrap_addr": "Mooncake",
    "transfer_id": "Mooncake and MoRI-IO",
    "remote_notify_port": "MoRI-IO",
    "remote_handshake_port": "MoRI-IO",
    "remote_hosts": "MoRI-IO",
    "bootstrap_host": "SGLang",
    "bootstrap_port": "SGLang",
    "bootstrap_room": "SGLang",
}
_Name = Annotated[str, Meta(min_length=1, max_length=253)]


class RemoteEngine(Struct, frozen=True, forbid_unknown_fields=True):
    """The other engine, in the form of llm-d's connector `offloading`; a prefill leg names no host."""

    kv_request_id: str
    remote_host: _Name | None = None
    remote_port: int | None = None


class TransferParams(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that are understood. What an engine answered to a prefill leg is sent verbatim with the decode leg."""

    do_remote_decode: bool | None = None  # a prefill leg
    do_remote_prefill: bool | None = None  # a decode leg
    remote_engine_id: str | None = None
    remote_block_ids: list[object] | None = None  # not used: blocks have keys
    remote_request_id: str | None = None
    remote_host: _Name | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    tp_size: int | None = None
    remote_dp_rank: int | None = None
    remote_dp_rank_override: bool | None = None
    remote_decoder: RemoteEngine | None = None  # a prefill leg, of `offloading`
    remote_prefiller: RemoteEngine | None = None  # a decode leg that is sent at the same time
    remote_kv_source: RemoteEngine | None = None  # the prompt's beginning was computed there


class TransferAnswer(Struct, frozen=True):
    """What the decode leg gets of a prefill leg."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_num_tokens: int  # of the prompt
    tp_size: int
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_block_ids: tuple[int, ...] = ()
    remote_port: None = None


class Transfer:
    """The KV side of one request."""

    def __init__(self, params: TransferParams, config: EngineConfig) -> None:
        """Raises HttpError."""
        self.is_prefill = bool(params.do_remote_decode) or params.remote_decoder is not None
        self.awaits_kv = params.remote_prefiller is not None
        self._num_ranks = config.tensor_parallel_size
        sources = [one for one in (params.remote_prefiller, params.remote_kv_source) if one is not None]
        is_decode = bool(params.do_remote_prefill) or self.awaits_kv
        if self.is_prefill and is_decode:
            raise _refused("do_remote_decode and do_remote_prefill cannot both be asked for in one request.")
        if self.is_prefill and not any(_offers(spec) for spec in config.kv_connector):
            raise _refused(
                "A prefill leg needs an engine whose KV others can load: start it with --kv-connector p2p,serve=SOCKET "
                "or shared,path=FOLDER,size=SIZE."
            )
        if (is_decode or sources) and not any(_loads(spec) for spec in config.kv_connector):
            raise _refused(
                "A decode leg needs an engine that loads KV from others: start it with --kv-connector p2p,peer=SOCKET "
                "or shared,path=FOLDER,size=SIZE."
            )
        hosts = [one.remote_host for one in sources] + ([params.remote_host] if is_decode else [])
        for host in hosts:
            if host is not None and not any(fnmatchcase(host, pattern) for pattern in config.kv_peers):
                raise _refused(f"remote_host {host[:100]!r} is not among the hosts of --kv-peers.")

    def answer(self, request_id: str, num_prompt: int) -> TransferAnswer:
        """What the decode leg is told of this prefill leg."""
        return TransferAnswer(_ENGINE_ID, request_id, socket.gethostname(), num_prompt, self._num_ranks)


def transferred(transfer: Transfer | None, request_id: str, num_prompt: int) -> TransferAnswer | msgspec.UnsetType:
    """What a plain answer says of it; UNSET unless another engine is to go on."""
    if transfer is None or not transfer.is_prefill:
        return msgspec.UNSET
    return transfer.answer(request_id, num_prompt)


def read_transfer(params: dict[str, object] | None, config: EngineConfig) -> Transfer | None:
    """The request's parameters; None if it has none, or an empty object. Raises HttpError."""
    given = {name: value for name, value in (params or {}).items() if value is not None}
    if not given:
        return None
    for name in given:
        if name in _FOREIGN:
            raise _refused(f"{name} is of {_FOREIGN[name]}, whose transfers are not offered here.")
    try:
        return Transfer(msgspec.convert(given, TransferParams), config)
    except msgspec.ValidationError as error:
        raise _refused(f"{str(error)[:200]}.") from None


def with_transfer(
    submits: Sequence[Submit], transfer: Transfer | None, cache_hit_threshold: float | None
) -> list[Submit]:
    """The submits, which the core treats accordingly."""
    if transfer is None and cache_hit_threshold is None:
        return list(submits)
    awaits_kv = transfer is not None and transfer.awaits_kv
    return [structs.replace(one, awaits_kv=awaits_kv, cache_hit_threshold=cache_hit_threshold) for one in submits]


def _refused(detail: str) -> HttpError:
    return unsupported(_PARAM, f"{_PARAM}: {detail}")


def _offers(spec: str) -> bool:
    name, *options = spec.split(",")
    return name == "shared" or (name == "p2p" and any(option.startswith("serve=") for option in options)) or ":" in name


def _loads(spec: str) -> bool:
    name, *options = spec.split(",")
    return name == "shared" or (name == "p2p" and any(option.startswith("peer=") for option in options)) or ":" in name

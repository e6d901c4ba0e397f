"""`kv_transfer_params`: what a proxy in front of prefill and decode engines says of a request's KV, and is told.

The forms are those of llm-d's sidecar (2026-08: its connectors `nixlv2`, `shared-storage` and `offloading`) and of
production-stack's router. pagewire finds KV by the keys of blocks, so the parameters name no blocks here: they say that
another engine computes the prompt (a prefill leg, whose blocks this engine must offer) or has computed it (a decode
leg). The KV itself travels by `--kv-connector`: p2p or shared. With p2p,peer=named it comes from the host and port that
the request names, which must match `--kv-peers`.
"""

import secrets
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, structs

from ...config.config import EngineConfig
from ...config.plugins import split_spec
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


class Role(Struct, frozen=True):
    """What the p2p connector's options say of this engine."""

    name: str = "both"  # prefill, decode or both
    host: str | None = None  # where others load its KV; None: at no address of its own, or at any of this machine
    port: int | None = None
    takes_named: bool = False  # it loads from the peers that requests name

    @classmethod
    def of(cls, config: EngineConfig) -> "Role":
        for spec in config.kv_connector:
            name, options = split_spec("--kv-connector", spec)
            if name == "p2p":
                served = options.get("serve", "")
                url = urlsplit(served if served.startswith("tcp://") else "")
                host = None if url.hostname in (None, "*", "0.0.0.0", "::") else url.hostname
                return cls(options.get("role", "both"), host, url.port, options.get("peer") == "named")
        return cls()


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
    remote_port: int | None = None


class Transfer:
    """The KV side of one request."""

    def __init__(self, params: TransferParams, config: EngineConfig) -> None:
        """Raises HttpError."""
        self.is_prefill = bool(params.do_remote_decode) or params.remote_decoder is not None
        self.awaits_kv = params.remote_prefiller is not None
        self.peer = ""  # address of the engine that has or computes the KV; empty: that of --kv-connector
        self._num_ranks = config.tensor_parallel_size
        self._role = Role.of(config)
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
        named = [(one.remote_host, one.remote_port) for one in sources]
        named += [(params.remote_host, params.remote_port)] if is_decode else []
        for host, port in named:
            if host is None:
                continue
            if not any(fnmatchcase(host, pattern) for pattern in config.kv_peers):
                raise _refused(f"remote_host {host[:100]!r} is not among the hosts of --kv-peers.")
            if self._role.takes_named and port is not None and not self.peer:
                self.peer = _address(host, port)

    def answer(self, request_id: str, num_prompt: int) -> TransferAnswer:
        """What the decode leg is told of this prefill leg."""
        host = self._role.host or socket.gethostname()
        return TransferAnswer(_ENGINE_ID, request_id, host, num_prompt, self._num_ranks, remote_port=self._role.port)


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
    awaits_kv, peer = (False, "") if transfer is None else (transfer.awaits_kv, transfer.peer)
    return [
        structs.replace(one, awaits_kv=awaits_kv, cache_hit_threshold=cache_hit_threshold, kv_peer=peer)
        for one in submits
    ]


def _address(host: str, port: int) -> str:
    """Raises HttpError."""
    if not 1 <= port <= 65535 or not all(char.isascii() and (char.isalnum() or char in "-._:") for char in host):
        raise _refused(f"{host[:100]!r} and {port} are no host and port.")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _refused(detail: str) -> HttpError:
    return unsupported(_PARAM, f"{_PARAM}: {detail}")


def _offers(spec: str) -> bool:
    name, *options = spec.split(",")
    return name == "shared" or (name == "p2p" and any(option.startswith("serve=") for option in options)) or ":" in name


def _loads(spec: str) -> bool:
    name, *options = spec.split(",")
    return name == "shared" or (name == "p2p" and any(option.startswith("peer=") for option in options)) or ":" in name

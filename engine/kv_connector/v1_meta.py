"""What the halves of a `KVConnectorBase_V1` tell each other. Its own metadata travel as msgpack: a dataclass by its
fields, a tensor by type, shape and bytes. So neither half can make the other one run code."""

import sys
from typing import Any

import msgspec
from msgspec import Struct

from .v1_names import KVConnectorMetadata


class V1Load(Struct, frozen=True, array_like=True):
    """A load of a step."""

    rid: int
    is_async: bool  # `get_finished` says when it is over; else the step does
    kept: bytes  # int32: blocks of the request that the device had, and that must stay as they are


class V1Step(Struct, frozen=True, array_like=True):
    """A step of vLLM's scheduler."""

    metadata: bytes
    loads: tuple[V1Load, ...] = ()
    finished: tuple[str, ...] = ()  # requests that have ended since the step before


class V1Plan(Struct, frozen=True, array_like=True):
    """The work for a plan."""

    before: tuple[V1Step, ...]  # the forward pass: what has been computed is saved
    after: tuple[V1Step, ...]
    held: tuple[int, ...]  # ended rids whose blocks stay


def encode_metadata(metadata: object) -> bytes:
    """Raises TypeError."""
    kind = type(metadata)
    try:
        return msgspec.msgpack.encode((_name(kind), metadata), enc_hook=_encode)
    except TypeError as error:
        raise TypeError(
            f"{kind.__qualname__} cannot be sent to the worker: {error}. Metadata are dataclasses with plain values "
            "and tensors."
        ) from error


def decode_metadata(data: bytes) -> KVConnectorMetadata:
    """Raises TypeError, msgspec.ValidationError."""
    name, raw = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
    kind = next((kind for kind in _kinds(KVConnectorMetadata) if _name(kind) == name), None)
    if kind is None:
        raise TypeError(f"{name} is not a subclass of KVConnectorMetadata in a module that the connector imports")
    return msgspec.msgpack.decode(raw, type=kind, dec_hook=_decode)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _kinds(base: type[KVConnectorMetadata]) -> "list[type[KVConnectorMetadata]]":
    found = [base]
    for kind in base.__subclasses__():
        found += _kinds(kind)
    return found


def _encode(value: object) -> object:
    torch: Any = sys.modules.get("torch")  # the core has it only if the connector imports it
    if torch is None or not isinstance(value, torch.Tensor):
        raise TypeError(f"it has a {type(value).__name__}")
    whole = value.detach().cpu().contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(whole.dtype).removeprefix("torch."), list(whole.shape), data


def _decode(kind: type, value: Any) -> object:
    torch: Any = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor:
        raise TypeError(f"it has a {kind.__name__}")
    dtype, shape, data = value
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)

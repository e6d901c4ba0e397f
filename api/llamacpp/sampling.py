"""Sampling parameters by llama.cpp's names, in the terms of `GenerationRequest`.

Both have the same meaning where it is not said otherwise. A parameter at the value that switches it off changes
nothing, so clients that send all parameters are served; a sampler that pagewire does not have is refused.
"""

from typing import Annotated

from msgspec import Meta, Struct

from ...ipc.messages import StopString
from ..http.http_error import unsupported
from ..output.shapes import Penalty, StopStrings

# Samplers that pagewire does not have, and the values that switch them off.
_OFF: dict[str, tuple[float, ...]] = {
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0,),
    "dynatemp_range": (0.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "top_n_sigma": (-1.0, 0.0),
}


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """Null means absent: the model's default holds."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # 0 and less: all tokens
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None  # 0: the most likely token
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # less than 0: a random one
    stop: StopString | StopStrings | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    repeat_last_n: int | None = None  # 0: no repeat_penalty; else it counts all tokens
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    # Refused unless they are off.
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: float | None = None
    dynatemp_range: float | None = None
    xtc_probability: float | None = None
    dry_multiplier: float | None = None
    top_n_sigma: float | None = None


def sampling_fields(options: SamplingOptions, num_predict: int | None, place: str = "") -> dict[str, object]:
    """Fields of a `GenerationRequest`. `num_predict`: the most tokens, less than 1: as many as fit. `place`: what comes
    before a parameter's name in an error. Raises HttpError."""
    for name, off in _OFF.items():
        value = getattr(options, name)
        if value is not None and value not in off:
            raise unsupported(place + name)
    is_penalized = options.repeat_last_n != 0
    return {
        "max_tokens": num_predict if num_predict is not None and num_predict > 0 else None,
        "temperature": options.temperature,
        "top_k": 1 if options.top_p == 0 else None if options.top_k is None else max(options.top_k, 0),
        "top_p": options.top_p or None,
        "min_p": options.min_p,
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty if is_penalized else 1.0,
        "presence_penalty": options.presence_penalty if is_penalized else 0.0,
        "frequency_penalty": options.frequency_penalty if is_penalized else 0.0,
    }


# Field of `GenerationRequest` → its name here, where it has another one.
OWN_NAMES = {
    "max_tokens": "num_predict",
    "max_completion_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
}

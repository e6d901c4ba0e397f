"""What every request must keep to before the core sees it, whoever has sent it: ids index the device's memory."""

from array import array
from collections.abc import Collection

from ..errors import RequestError
from ..ipc.messages import Limits, Sampling


def check_ids(vocab_size: int, field: str, ids: "Collection[int] | array[int]") -> None:
    """Raises RequestError unless all are tokens of the vocabulary. None at all are fine."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError("invalid_request", f"{field} must hold token ids between 0 and {vocab_size - 1}.")


def check_parameters(vocab_size: int, sampling: Sampling, limits: Limits) -> None:
    """Raises RequestError if a parameter names tokens that there are not."""
    check_ids(vocab_size, "stop_token_ids", limits.stop_token_ids)
    check_ids(vocab_size, "logit_bias", tuple(sampling.logit_bias or ()))

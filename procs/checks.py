"""What every request must keep to before the core sees it, whoever has sent it: ids index the device's memory."""

from array import array
from collections.abc import Collection

from ..errors import RequestError
from ..ipc.messages import MOST_BIASES, Constraint, Limits, Sampling, bytes_to_ids


def check_ids(vocab_size: int, field: str, ids: "Collection[int] | array[int]") -> None:
    """Raises RequestError unless all are tokens of the vocabulary. None at all are fine."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError("invalid_request", f"{field} must hold token ids between 0 and {vocab_size - 1}.")


def check_parameters(vocab_size: int, sampling: Sampling, limits: Limits, constraint: Constraint | None = None) -> None:
    """Raises RequestError if a parameter names tokens that there are not."""
    check_ids(vocab_size, "stop_token_ids", limits.stop_token_ids)
    check_ids(vocab_size, "logit_bias", tuple(sampling.logit_bias or ()))
    check_ids(vocab_size, "allowed_token_ids", sampling.allowed_token_ids)
    for word in constraint.bad_words if constraint is not None else ():
        if len(word) % 4 or not word:
            raise RequestError("invalid_request", "bad_words must hold sequences of token ids.")
        check_ids(vocab_size, "bad_words", bytes_to_ids(word))


def check_min_tokens(eos_token_ids: Collection[int], sampling: Sampling, limits: Limits) -> None:
    """Raises RequestError if `min_tokens` cannot be kept to."""
    if limits.min_tokens and limits.max_tokens is not None and limits.min_tokens > limits.max_tokens:
        raise RequestError("invalid_request", "min_tokens must not be more than max_tokens.")
    ends = {*limits.stop_token_ids, *eos_token_ids}  # they take places of the row's bias until then
    if limits.min_tokens and len(ends | set(sampling.logit_bias or ())) > MOST_BIASES:
        detail = f"With min_tokens, at most {MOST_BIASES} tokens may be named in stop_token_ids, logit_bias and as eos."
        raise RequestError("invalid_request", detail)

"""Draft tokens: what `--speculative` accepts, and how many draft tokens a step's result has accepted.

A wrong draft token costs only the time of computing it: a token is a function of its logits, the request's seed and its
output position alone, so a draft token is accepted if it is the token that is sampled at its position.
"""

from array import array

from ...config.plugins import split_spec
from ...errors import ConfigError
from ...ipc.messages import StepResult, bytes_to_ids
from .plan_builder import InFlight

_FLAG = "--speculative"
_NUM_TOKENS = 4
_MAX_TOKENS = 15  # less than a block: see `Planner`
_one = array("i", [1])


def num_draft_tokens(spec: str | None) -> int:
    """The most draft tokens of a row in a step; 0: none are made. Raises ConfigError."""
    if spec is None:
        return 0
    name, options = split_spec(_FLAG, spec)
    unknown = [option for option in options if option != "tokens"]
    if name != "ngram" or unknown:
        raise ConfigError(f"{_FLAG} {spec}: write ngram, or ngram,tokens=N.")
    text = options.get("tokens", str(_NUM_TOKENS))
    num = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= num <= _MAX_TOKENS:
        raise ConfigError(f"{_FLAG} {spec}: tokens is a number from 1 to {_MAX_TOKENS}.")
    return num


def num_until_end(tokens: "array[int]", stops: frozenset[int]) -> int:
    """How many tokens there are up to the first that ends their request, that one included."""
    return next((i for i, token in enumerate(tokens, start=1) if token in stops), len(tokens))


def num_sampled(flight: InFlight, result: StepResult, num_ids: int) -> "array[int]":
    """How many tokens each speculative row sampled. Raises ValueError if the plan does not allow it."""
    due, first = len(flight.decodes) + sum(flight.sample), flight.num_speculative
    if not result.num_sampled:
        if num_ids != due:
            raise ValueError(f"step {result.step} sampled {num_ids} tokens where {due} were due")
        return _one * first
    nums = bytes_to_ids(result.num_sampled)
    if len(nums) != due or sum(nums) != num_ids or min(nums) < 1:
        raise ValueError(f"step {result.step} sampled {num_ids} tokens, but counts {sum(nums)} in {len(nums)} rows")
    if max(nums[:first], default=1) > 1 + flight.speculate or max(nums[first:], default=1) > 1:
        raise ValueError(f"step {result.step} sampled more tokens of a row than its plan allows")
    return nums[:first]

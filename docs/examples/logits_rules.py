"""Logits processors that a request chooses by its arguments.

    PYTHONPATH=docs/examples pagewire serve MODEL --runner-plugin logits_rules:Rules

`"vllm_xargs": {"no_repeat_ngram_size": 3}` never samples a token that would repeat three tokens of the output, and
`{"warm_up": [1.5, 20]}` lowers a temperature of 1.5 to 1 over the first 20 tokens.
"""

from collections.abc import Sequence

from torch import Tensor

from pagewire import RunnerPlugin
from pagewire.engine.plugin.base import LogitsRow
from pagewire.errors import RequestError


class Rules(RunnerPlugin):
    api_version = 1

    def on_logits(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for own, each in zip(logits, rows, strict=True):
            args = each.row.args
            if (size := args.get("no_repeat_ngram_size")) is not None:
                if not isinstance(size, int) or size < 1:
                    raise RequestError("invalid_request", "no_repeat_ngram_size must be a positive integer.")
                own[repeating(each.output_ids.tolist(), size)] = float("-inf")
            if (warm_up := args.get("warm_up")) is not None:
                own /= _temperature(warm_up, len(each.output_ids))


def repeating(ids: list[int], size: int) -> list[int]:
    """The tokens that would end a sequence of `size` tokens that `ids` have already."""
    tail = ids[len(ids) - size + 1 :]
    return [ids[i + size - 1] for i in range(len(ids) - size + 1) if ids[i : i + size - 1] == tail]


def _temperature(warm_up: object, num_output: int) -> float:
    match warm_up:
        case [int() | float() as first, int() as tokens] if first > 0 and tokens > 0:
            return 1 + (first - 1) * max(0.0, 1 - num_output / tokens)
    raise RequestError("invalid_request", "warm_up must be a list of a temperature and a number of tokens.")

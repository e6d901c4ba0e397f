"""The attention window that each mask function of transformers describes."""

import pytest
import torch
from transformers import masking_utils

from pagewire.engine.executors.masks import REACH, UNKNOWN, describe_mask, reach_of

LEFT_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("sees", "local_size", "reach"),
    [
        (masking_utils.causal_mask_function, None, None),
        (masking_utils.sliding_window_causal_mask_function(24), 24, 24),
        (masking_utils.sliding_window_causal_mask_function(131072), 131072, 131072),
        (masking_utils.sliding_window_causal_mask_function(24), 23, UNKNOWN),
        (masking_utils.chunked_causal_mask_function(24, LEFT_PADDING), 24, UNKNOWN),
        (masking_utils.chunked_causal_mask_function(8192, LEFT_PADDING), 8192, UNKNOWN),
        (masking_utils.chunked_causal_mask_function(24, LEFT_PADDING.to("meta")), 24, UNKNOWN),
        (masking_utils.bidirectional_mask_function, None, UNKNOWN),
        (masking_utils.sliding_window_bidirectional_mask_function(24), 24, UNKNOWN),
        (masking_utils.packed_sequence_mask_function(torch.zeros(1, 7)), None, UNKNOWN),
    ],
)
def test_the_reach_of_a_mask_function(sees: object, local_size: int | None, reach: int | None) -> None:
    assert reach_of(sees, local_size) == reach
    mask = describe_mask(1, 7, 7, mask_function=sees, device=torch.device("meta"), local_size=local_size)
    assert getattr(mask, REACH) == reach and mask.shape == (1, 1, 7, 7)

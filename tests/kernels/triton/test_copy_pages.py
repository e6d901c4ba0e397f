"""Pages that are copied, by the host's choice and by that of the device."""

import numpy as np
import torch

from pagewire.kernels.triton.copy_pages import copy_pages, fill_choices, fill_copies

PAGES, WORDS = 40, 1500


def _memory(device):
    return (torch.arange(PAGES * WORDS, dtype=torch.int64, device=device) * 3 + (1 << 40)).view(PAGES, WORDS)


def test_whole_pages_are_copied(device):
    memory, accepted = _memory(device), torch.zeros(4, dtype=torch.int32, device=device)
    expected = memory.clone()
    expected[[30, 31, 32]] = expected[[7, 9, 7]]
    pairs = np.array([[7, 30], [9, 31], [7, 32]], np.int32)
    copy_pages(memory, torch.from_numpy(fill_copies(pairs)).to(device), 3, accepted)
    assert torch.equal(memory, expected)


def test_the_state_behind_the_accepted_draft_tokens_is_copied(device):
    """States of two pages. Row 3 has accepted one of three draft tokens, row 0 all two, row 1 none of one."""
    memory = _memory(device)
    accepted = torch.tensor([2, 0, 77, 1], dtype=torch.int32, device=device)
    sources = np.arange(10, 22, dtype=np.int32).reshape(6, 2)
    targets = np.array([[30, 31], [32, 33], [34, 35]], np.int32)
    choices = fill_choices(np.array([3, 0, 1]), np.array([3, 2, 1]), sources, targets)
    expected = memory.clone()
    expected[[30, 31]] = expected[[12, 13]]
    expected[[34, 35]] = expected[[20, 21]]
    copy_pages(memory, torch.from_numpy(choices).to(device), 6, accepted, between=2)
    assert torch.equal(memory, expected)

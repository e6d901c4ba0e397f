"""Rows of tokens for training: chats packed whole, with targets on the answers only.

A row starts with a chat, as a request does; further chats follow after an
end-of-text token. Some rows get gaps in their positions between turns, so that
the distances of a long context are seen in a short row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .conversations import Chat
from .template import END_OF_TEXT, TURN_END, TURN_START, render
from .tokenizer import token_id

IGNORED = -100
"""The target of a token that does not count in the loss."""
POOL = 192
"""Encoded chats kept to fill rows from."""


@dataclass(frozen=True)
class Batch:
    """Each [rows, tokens] int64; targets are the next tokens or IGNORED."""

    ids: Tensor
    targets: Tensor
    positions: Tensor


class Packer:
    """Samples chats from `source` and packs them into batches."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, context: int) -> None:
        self._tokenizer, self._rng, self._context = tokenizer, rng, context
        self._end_of_text = token_id(tokenizer, END_OF_TEXT)
        self._turn_start = token_id(tokenizer, TURN_START)
        self._turn_end = token_id(tokenizer, TURN_END)
        self._head = tokenizer.encode(f"{TURN_START}assistant\n").ids
        self._pool: list[tuple[list[int], list[int]]] = []

    def encode(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Token ids of a chat and the same ids as targets, IGNORED outside the answers."""
        ids: list[int] = self._tokenizer.encode(render(chat.messages, chat.tools)).ids
        targets = [IGNORED] * len(ids)
        head, position = self._head, 0
        while position < len(ids):
            if ids[position : position + len(head)] != head:
                position += 1
                continue
            first = position + len(head)
            last = ids.index(self._turn_end, first)
            targets[first : last + 1] = ids[first : last + 1]
            position = last
        return ids, targets

    def _row(self, source: Callable[[], Chat], length: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        targets: list[int] = []
        while len(self._pool) < POOL:
            self._pool.append(self.encode(source()))
        for index, (more, _) in enumerate(self._pool):
            if not ids or len(ids) + 1 + len(more) <= length:
                chat_ids, chat_targets = self._pool[index]
                self._pool[index] = ([], [])
                if ids:
                    ids.append(self._end_of_text)
                    targets.append(IGNORED)
                ids += chat_ids
                targets += chat_targets
                if length - len(ids) < 12:
                    break
        self._pool = [pair for pair in self._pool if pair[0]]
        missing = length + 1 - len(ids)
        ids = (ids + [self._end_of_text] * missing)[: length + 1]
        targets = (targets + [IGNORED] * missing)[: length + 1]
        return ids, targets

    def _positions(self, ids: list[int], gap_share: float) -> list[int]:
        positions = list(range(len(ids)))
        spare = self._context - len(ids)
        if self._rng.random() >= gap_share:
            return positions
        starts = [index for index, token in enumerate(ids) if token == self._turn_start and index]
        left = self._rng.randint(0, spare)
        for start in self._rng.sample(starts, min(len(starts), self._rng.randint(1, 3))):
            gap = self._rng.randint(0, left)
            left -= gap
            for index in range(start, len(ids)):
                positions[index] += gap
        return positions

    def batch(self, source: Callable[[], Chat], rows: int, length: int, gap_share: float) -> Batch:
        packed = [self._row(source, length) for _ in range(rows)]
        ids = torch.tensor([row for row, _ in packed])
        targets = torch.tensor([row for _, row in packed])
        positions = torch.tensor([self._positions(row[:-1], gap_share) for row, _ in packed])
        return Batch(ids[:, :-1].contiguous(), targets[:, 1:].contiguous(), positions)

    def forget(self) -> None:
        """Drops the kept chats, when the source changes."""
        self._pool.clear()

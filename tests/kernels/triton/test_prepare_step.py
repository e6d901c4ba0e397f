"""Random sequences of steps against a plain model that keeps lists of ids and blocks."""

import numpy as np
import pytest
import torch

from pagewire.kernels.triton.prepare_step import (
    accept_drafts,
    fill_packet,
    packet_size,
    prepare_step,
    remember_sampled,
)

BIG = torch.cuda.is_available()
PAGE = 16
NUM_TABLES = 3
NUM_ROWS, MAX_ROWS, MAX_TOKENS, MAX_BLOCKS = (300, 256, 2048, 700) if BIG else (9, 6, 700, 60)


class Device:
    """The state, the buffers of a step, and the packet."""

    def __init__(self, device):
        def integers(*shape):
            return torch.full(shape, 12345, dtype=torch.int32, device=device)

        self.last_ids, self.last_positions = integers(NUM_ROWS), integers(NUM_ROWS)
        self.row_tables = integers(NUM_TABLES, NUM_ROWS, MAX_BLOCKS)
        self.tables = integers(NUM_TABLES, MAX_ROWS + 2, MAX_BLOCKS)[:, :MAX_ROWS]  # a graph may have fewer rows
        self.ids, self.positions, self.rotary_places = (integers(MAX_TOKENS) for _ in range(3))
        self.slots = integers(NUM_TABLES, MAX_TOKENS + 5)[:, :MAX_TOKENS]
        self.context_lens, self.decode_lens = integers(MAX_ROWS), integers(MAX_ROWS)
        self.sample_positions = integers(MAX_TOKENS)
        new_blocks = MAX_TOKENS // PAGE + MAX_ROWS
        size = packet_size(rows=MAX_ROWS, tokens=2 * MAX_TOKENS, new_blocks=new_blocks, tables=NUM_TABLES)
        self.packet = integers(size)

    def step(self, *, blocks, num_decode=0, **fields):
        """blocks: the new ones, row after row. Table t has page 1000 · t + block for a block."""
        packet = np.full(len(self.packet), 77, np.int32)
        pages = np.add.outer(1000 * np.arange(NUM_TABLES), np.array(blocks, np.int64))
        arrays = {name: np.array(values, np.int32) for name, values in fields.items()}
        fill_packet(packet, pages=pages, num_decode=num_decode, **arrays)
        self.packet.copy_(torch.from_numpy(packet))
        self.prepare()

    def prepare(self):
        prepare_step(
            self.packet, self.last_ids, self.last_positions, self.row_tables, self.ids, self.positions, self.slots,
            self.context_lens, self.decode_lens, self.sample_positions, self.tables, PAGE, self.rotary_places,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_the_model(device, seed):
    random = np.random.default_rng(seed)
    ours = Device(device)
    num_computed = np.zeros(NUM_ROWS, np.int64)
    blocks = [[] for _ in range(NUM_ROWS)]
    next_block = 0
    for _ in range(6):
        rows = random.permutation(NUM_ROWS)[: random.integers(1, MAX_ROWS + 1)]
        counts = np.where(random.random(len(rows)) < 0.6, 1, random.integers(1, MAX_TOKENS // MAX_ROWS, len(rows)))
        last_ids = random.integers(0, 1000, NUM_ROWS)
        ours.last_ids.copy_(torch.from_numpy(last_ids))
        ids = random.integers(-1, 1000, counts.sum())
        first_tokens = np.cumsum(counts) - counts
        ids[first_tokens] = -1
        places, num_new, new_blocks = [], [], []
        for row, count in zip(rows, counts, strict=True):
            places.append(len(blocks[row]))
            num_new.append(-(-(num_computed[row] + count) // PAGE) - len(blocks[row]))
            new_blocks += range(next_block, next_block + num_new[-1])
            blocks[row] += range(next_block, next_block + num_new[-1])
            next_block += num_new[-1]
        starts = num_computed[rows]
        ours.step(rows=rows, counts=counts, starts=starts, ids=ids, places=places, num_new=num_new, blocks=new_blocks)

        total = counts.sum()
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(total) + np.repeat(num_computed[rows] - first_tokens, counts)
        slots = np.array([blocks[r][p // PAGE] * PAGE + p % PAGE for r, p in zip(row_of_token, positions, strict=True)])
        num_computed[rows] += counts

        def padded(values, rest, size):
            return [*values, *[rest] * (size - len(values))]

        known = np.where(ids < 0, last_ids[row_of_token], ids)
        assert ours.ids.tolist() == padded(known, 0, MAX_TOKENS)
        assert ours.positions.tolist() == padded(positions, 0, MAX_TOKENS)
        for table in range(NUM_TABLES):
            assert ours.slots[table].tolist() == padded(slots + 1000 * table * PAGE, -1, MAX_TOKENS)
        assert ours.context_lens.tolist() == padded(num_computed[rows], 0, MAX_ROWS)
        for place, row in enumerate(rows):
            for table in range(NUM_TABLES):
                own = ours.tables[table, place, : len(blocks[row])] - 1000 * table
                assert own.tolist() == blocks[row]


def test_a_whole_prompt_then_one_token_a_step(device):
    ours = Device(device)
    prompt = np.arange(600)
    blocks = np.arange(38) * 3 + 1
    ours.step(rows=[4], counts=[600], starts=[0], ids=prompt, places=[0], num_new=[38], blocks=blocks)
    assert ours.ids[:600].tolist() == prompt.tolist() == ours.positions[:600].tolist()
    assert ours.slots[0, :600].tolist() == [int(blocks[p // PAGE]) * PAGE + p % PAGE for p in prompt]
    for position in range(600, 612):
        ours.last_ids[4] = 1000 + position
        new = [9] if position == 608 else []
        ours.step(rows=[4], counts=[1], starts=[position], ids=[-1], places=[38], num_new=[len(new)], blocks=new)
        block = 9 if position >= 608 else int(blocks[-1])
        assert ours.ids[:2].tolist() == [1000 + position, 0]
        assert ours.positions[:2].tolist() == [position, 0]
        assert ours.slots[0, :2].tolist() == [block * PAGE + position % PAGE, -1]
        assert ours.context_lens.tolist() == [position + 1] + [0] * (MAX_ROWS - 1)


def test_a_step_without_rows_writes_only_padding(device):
    ours = Device(device)
    ours.step(rows=[], counts=[], starts=[], ids=[], places=[], num_new=[], blocks=[])
    assert not ours.context_lens.any()
    assert (ours.slots == -1).all()


def test_a_model_without_attention_has_no_tables(device):
    ours = Device(device)
    ours.row_tables, ours.tables, ours.slots = ours.row_tables[:0], ours.tables[:0], ours.slots[:0]
    ours.last_ids[3] = 55
    pages = np.zeros((0, 1), np.int32)
    packet = np.zeros(len(ours.packet), np.int32)
    fill_packet(
        packet, rows=np.array([3, 5]), counts=np.array([1, 2]), starts=np.array([8, 0]), ids=np.array([-1, 6, 7]),
        places=np.array([0, 0]), num_new=np.array([1, 0]), pages=pages,
    )  # fmt: skip
    ours.packet.copy_(torch.from_numpy(packet))
    ours.prepare()
    assert ours.ids[:4].tolist() == [55, 6, 7, 0] and ours.positions[:4].tolist() == [8, 0, 1, 0]
    assert ours.context_lens[:3].tolist() == [9, 2, 0]


def test_sampled_ids_become_the_last_ids_of_their_rows(device):
    last_ids, last_positions = (torch.full((600,), 7, dtype=torch.int32, device=device) for _ in range(2))
    rows = torch.randperm(600, dtype=torch.int32, device=device)[:300]
    sampled = torch.arange(-1, 299, dtype=torch.int32, device=device)
    remember_sampled(last_ids, last_positions, sampled, sampled + 50, rows)
    expected = torch.full((600,), 7, dtype=torch.int32, device=device)
    expected[rows.long()] = sampled.clamp(min=0)
    assert last_ids.tolist() == expected.tolist()
    expected[rows.long()] = sampled + 50
    assert last_positions.tolist() == expected.tolist()


def test_decode_rows_have_lengths_and_samples_have_positions_in_the_output(device):
    ours = Device(device)
    ours.step(
        rows=[3, 1, 2], counts=[1, 1, 4], starts=[20, 7, 10], ids=[-1, -1, -1, 5, 6, 7], places=[0, 0, 0],
        num_new=[2, 1, 1], blocks=[1, 2, 3, 4], num_decode=2, num_samples=[1, 0, 4], num_prompt=[15, 7, 8],
        rotary_firsts=[0, 100, 200],
    )  # fmt: skip
    assert ours.rotary_places[:7].tolist() == [20, 107, 210, 211, 212, 213, 0]
    assert ours.context_lens.tolist() == [21, 8, 14, *[0] * (MAX_ROWS - 3)]
    assert ours.decode_lens.tolist() == [21, 8, *[0] * (MAX_ROWS - 2)]
    assert ours.sample_positions[:6].tolist() == [6, 3, 4, 5, 6, 12345]


def test_the_device_knows_where_a_row_goes_on_and_takes_the_ids_of_those_positions(device):
    """The host has sent ids for positions 30 to 38 of row 5, which begins at 32 instead of 34."""
    ours = Device(device)
    ours.last_ids[5], ours.last_positions[5] = 900, 2
    ids = [8, *range(130, 139)]
    ours.step(
        rows=[4, 5], counts=[1, 5], starts=[6, 34], ids=ids, places=[0, 0], num_new=[1, 3], blocks=[9, 1, 2, 3],
        num_decode=1, num_behind=[0, 4], num_samples=[1, 5], num_prompt=[6, 30],
    )  # fmt: skip
    assert ours.ids[:7].tolist() == [8, 900, 133, 134, 135, 136, 0]
    assert ours.positions[:7].tolist() == [6, 32, 33, 34, 35, 36, 0]
    assert ours.slots[0, 1:6].tolist() == [3 * PAGE + i for i in range(5)]
    assert ours.context_lens[:2].tolist() == [7, 37] and ours.decode_lens[:2].tolist() == [7, 0]
    assert ours.sample_positions[:6].tolist() == [1, 3, 4, 5, 6, 7]
    assert ours.tables[0, 1, :3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("num_right", range(5))
def test_draft_tokens_are_accepted_up_to_the_first_wrong_one(device, num_right):
    """Beside a row without draft tokens and a row in the midst of its prompt."""
    ours = Device(device)
    accepted = torch.full((NUM_ROWS,), 77, dtype=torch.int32, device=device)
    ours.last_ids[:], ours.last_positions[:] = 11, 22
    drafts = [50, 51, 52, 53]
    ours.step(
        rows=[1, 2, 3], counts=[1, 3, 5], starts=[9, 4, 20], ids=[40, 1, 2, 3, 49, *drafts], places=[0, 0, 0],
        num_new=[1, 1, 2], blocks=[1, 2, 3, 4], num_decode=1, num_samples=[1, 0, 5], num_prompt=[4, 30, 15],
    )  # fmt: skip
    own = [50, 51, 52, 53, 54]
    if num_right < 4:
        own[num_right] = -1 if num_right == 2 else 99
    sampled = torch.tensor([60, *own], dtype=torch.int32, device=device)
    accept_drafts(
        ours.packet, ours.ids, sampled, ours.sample_positions, ours.last_ids, ours.last_positions, accepted, rows=3,
        most=5,
    )  # fmt: skip
    assert accepted[3] == num_right and ours.last_ids[3] == max(0, own[num_right])
    assert ours.last_positions[3] == 20 + 1 + num_right - 15
    for column, before in ((accepted, 77), (ours.last_ids, 11), (ours.last_positions, 22)):
        assert column[:3].tolist() == [before] * 3 and set(column[4:].tolist()) == {before}, "other rows are unchanged"

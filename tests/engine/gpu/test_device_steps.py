"""What the steps ask of the device, seen by a recording queue: sizes, padding, graphs, the ring of packets."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from runner_driver import engine_config

from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.gpu.shapes import SampleShape, StepShape, at_least, decode_sizes, mixed_sizes, powers
from pagewire.engine.parallel.domains import Domain
from pagewire.ipc.messages import PassReads, RowOpen, Sampling, StepPlan, bytes_to_ids, ids_to_bytes
from pagewire.kernels.triton.copy_pages import copy_pages

GREEDY = Sampling(temperature=0)
launches = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are launched on a CPU's memory")


class Mark:
    """Reached when the queue's `num_done` says so."""

    def __init__(self, queue):
        self._queue, self.number = queue, queue.num_put

    def is_reached(self):
        return self.number <= self._queue.num_done

    def wait(self):
        self._queue.waits.append(self.number)
        self._queue.num_done = max(self._queue.num_done, self.number)

    def ms_since(self, earlier):
        return float(self.number - earlier.number)


class RecordingQueue(EagerQueue):
    """Records what it is asked to do, and finishes work only when waited for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.sent, self.asked, self.waits = [], [], []
        self.num_put = self.num_done = 0

    def host_memory(self, size, dtype):
        return torch.full((size,), -77 if dtype != torch.float32 else -77.0, dtype=dtype)  # like reused memory

    def record(self, work):
        self.asked.append("record")
        return lambda: (self.asked.append("replay"), work())  # type: ignore[func-returns-value]  # both run, in this order

    def send(self, source, target):
        self.sent.append((source.data_ptr(), len(source)))
        super().send(source, target)

    def fetch(self, pairs):
        self.num_put += 1
        super().fetch(pairs)
        return Mark(self)

    def mark(self):
        return Mark(self)

    def follow(self, mark):
        self.asked.append(("follow", mark.number))


@dataclass
class Decoder:
    """Records the shapes that it runs, and the step's part of the packet."""

    group = 2
    num_ranks = 1
    is_last = True
    shapes: list[Any] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)  # table of each step: rows, chunks and pages
    records: list[Any] = field(default_factory=list)  # of the rows of each step
    ids: Any = None  # in the last packet

    def open(self, cache):
        pass

    def run(self, packet, state, shape):
        self.shapes.append(shape)
        num_rows, num_tokens = packet.step[:2].tolist()
        tiles = packet.tiles[1 : 1 + packet.tiles[0, 0], 2].tolist() if shape.tile_rows else []
        self.steps.append((num_rows, num_tokens, int(packet.step[6]), tiles))
        self.ids = packet.step[int(packet.step[2]) : int(packet.step[3])].clone()
        records = packet.step[8 : int(packet.step[2])].view(-1, 13)
        self.records.append(records.tolist())
        state.begin(records)
        if packet.states is not None:
            table = packet.states[int(packet.states[0]) :]
            _, chunks_at, pages_at, num_chunks = table[:4].tolist()
            records = table[4:chunks_at].view(-1, 2)[:-1], table[chunks_at:pages_at].view(num_chunks, 3)
            self.states.append((*(part.tolist() for part in records), table[pages_at:].tolist()))

    def hidden(self, tokens):
        return tokens

    vocabulary = None

    def sampled_hidden(self, tokens):
        return tokens

    def sampled_logits(self, tokens):
        return tokens


class State:
    """Samples for each row a number that grows with each call, or chosen ones. Accepts draft tokens on the host."""

    def __init__(self, limits):
        self.limits = limits
        self.sampled = torch.zeros(limits.samples, dtype=torch.int32)
        self.best_ids = torch.zeros((limits.samples, 21), dtype=torch.int32)
        self.best_values = torch.zeros((limits.samples, 21))
        self.samples, self.opened, self.chosen = [], [], []
        self.accepted = torch.zeros(limits.rows, dtype=torch.int32)
        self.num = 100

    def open(self, records, num):
        self.opened += records.view(num, -1)[:, 0].tolist()

    def edit(self, edits, num):
        pass

    def begin(self, records):
        self.records = records.tolist()

    def sample(self, logits, packet, first, shape):
        own = packet.parts[first // self.limits.part]
        self.samples.append((first, shape, own.rows[: shape.samples].tolist(), own.places[: shape.samples].tolist()))
        self.num += 1
        self.sampled[first : first + shape.samples] = self.num
        if self.chosen:
            ids = self.chosen.pop(0)
            self.sampled[first : first + len(ids)] = torch.tensor(ids, dtype=torch.int32)

    def sample_of_parts(self, vocabulary, hidden, packet, first, shape):
        self.sample(hidden, packet, first, shape)

    def accept(self, packet, ids, *, rows, most):
        for row, _, _, _, _, _, _, first_id, _, first, num, _, _ in self.records:
            drafts = ids[first_id + 1 : first_id + num].tolist()
            own = self.sampled[first : first + num].tolist()
            wrong = [i for i, draft in enumerate(drafts) if own[i] != draft]
            self.accepted[row] = min(wrong, default=len(drafts))

    def copy(self, memory, copies, num, *, between=0):
        copy_pages(memory, copies, num, self.accepted, between=between)


@pytest.fixture
def steps(checkpoint):
    """flags → (steps, decoder, state, queue)."""
    from pagewire.engine.gpu.device_steps import DeviceModel, limits_of

    def make(*, num_states=0, attention=None, domain=None, **flags):
        """num_states: of a row, each in a page of its own. attention: a backend other than Triton. domain: of the
        rank."""
        config = engine_config(checkpoint("llama"), device="cpu", **flags)  # blocks of 16 positions
        states = (StateTile((1, config.block_size * 2)),) * num_states
        shape = KvShape(layers=(Tile(1, 1, 1),), dtype=torch.float32, states=states)
        assert shape.groups(config.block_size).state_pages == num_states
        limits = limits_of(config, group=2, draft_tokens=3, state_pages=num_states)
        cache = KvCache(
            shape=shape, num_pages=40, block_size=config.block_size, device=torch.device("cpu"), num_spares=3
        )
        decoder, state, queue = Decoder(), State(limits), RecordingQueue()
        model = DeviceModel(
            decoder=decoder,
            state=state,
            limits=limits,
            queue=queue,
            kv_shape=shape,
            weights=0,
            workspace=0,
            graphs=0,
            reads=PassReads(),
            temporary=0,
            note="",
            attention=attention,
            domain=domain,
        )
        return model.steps(config, cache), decoder, state, queue

    return make


def plan(step, rows, counts, *, open=(), sample=None, grow=()):
    return StepPlan(
        step=step,
        open=tuple(
            RowOpen(
                row=row,
                ids=ids_to_bytes(list(range(num))),
                num_prompt=num,
                num_computed=0,
                block_ids=ids_to_bytes(list(range(-(-(num + 1) // 16)))),
                sampling=sampling,
            )
            for row, num, sampling in open
        ),
        grow_rows=ids_to_bytes([row for row, _ in grow]),
        grow_blocks=ids_to_bytes([block for _, block in grow]),
        rows=ids_to_bytes(rows),
        counts=ids_to_bytes(counts),
        sample=bytes(sample or [1] * len(rows)),
    )


def test_shape_sizes_fit_every_request_with_little_padding():
    assert decode_sizes(1) == (1,)
    assert decode_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_sizes(256)[-3:] == (224, 240, 256)
    assert mixed_sizes(32) == (32,)
    for most in (64, 1000, 2048, 2100, 8192):
        sizes = mixed_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        assert {2**n for n in range(6, 14) if 2**n <= most} <= set(sizes)
        assert all(size % 16 == 0 for size in sizes[:-1])
        for wanted in range(1, most + 1, 7):
            size = at_least(sizes, wanted)
            assert wanted <= size <= max(sizes[0], 1.25 * wanted + 16)
    assert powers(mixed_sizes(1000)) == (64, 128, 256, 512, 1000)


def test_prompts_are_padded_by_a_few_percent_and_recorded_in_few_graphs():
    sizes = mixed_sizes(8192)
    padding = {wanted: at_least(sizes, wanted) / wanted - 1 for wanted in range(1, 8193)}
    assert padding[1024] == padding[2048] == padding[8192] == 0
    assert max(padding[wanted] for wanted in range(513, 8193)) <= 0.06
    assert sum(padding[wanted] for wanted in range(513, 8193)) / 7680 < 0.012
    assert sum(padding[wanted] for wanted in range(513, 2049)) / 1536 < 0.026
    assert sum(padding[wanted] for wanted in range(64, 513)) / 449 < 0.101
    assert sum(StepShape(size, 128).is_recorded for size in sizes) <= 48


def test_a_step_is_padded_up_to_its_shape(steps):
    ours, decoder, state, _ = steps(max_num_seqs=8, max_num_batched_tokens=128)
    ours.launch(
        plan(0, [5, 2, 7], [20, 30, 9], open=[(5, 20, GREEDY), (2, 30, GREEDY), (7, 9, GREEDY)], sample=[1, 0, 1])
    )
    assert decoder.shapes == [StepShape(64, 128)]
    num_rows, num_tokens, num_decode, tiles = decoder.steps[0]
    assert (num_rows, num_tokens, num_decode) == (3, 59, 0)
    assert tiles == [30, 20, 9], "padding has no tiles"
    first, shape, rows, places = state.samples[0]
    assert (first, shape) == (0, SampleShape(2, 0, False, False))
    assert rows == [5, 7] and places == [-1, -1]
    ours.launch(plan(1, [2, 5, 7], [1, 1, 1], open=[], sample=[0, 1, 1], grow=[]))
    assert decoder.shapes[1] == StepShape(4, 0)
    assert decoder.steps[1][2] == 3 and [record[3] for record in decoder.records[1]] == [30, 20, 9]
    assert [ours.collect().step for _ in range(2)] == [0, 1]


def test_decode_rows_come_first_beside_a_prompt(steps):
    ours, decoder, _, _ = steps(max_num_seqs=8, max_num_batched_tokens=128)
    ours.launch(plan(0, [1], [4], open=[(1, 4, GREEDY)]))
    ours.launch(plan(1, [3, 1], [40, 1], open=[(3, 40, GREEDY)]))
    assert decoder.shapes[1] == StepShape(64, 128)
    assert decoder.steps[1][2] == 1, "only rows with one token take the decode path"
    assert sum(decoder.steps[1][3]) == 40
    first, second = ours.collect(), ours.collect()
    assert bytes_to_ids(first.ids).tolist() == [101]
    assert bytes_to_ids(second.ids).tolist() == [102, 102], "results come in the order of the plan"


def test_sampling_parameters_choose_the_kind_of_sampling(steps):
    ours, _, state, _ = steps(max_num_seqs=8, max_num_batched_tokens=128)
    samplings = [
        GREEDY,
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_p=0.5),
        Sampling(temperature=0, presence_penalty=1.0),
        Sampling(temperature=0, top_k=5),
        Sampling(temperature=0, logprobs=2),
    ]
    for row, sampling in enumerate(samplings):
        ours.launch(plan(row, [row], [3], open=[(row, 3, sampling)]))
        ours.collect()
    shapes = [shape for _, shape, _, _ in state.samples]
    assert [(shape.kind, shape.edits, shape.logprobs) for shape in shapes] == [
        (0, False, False),
        (1, False, False),
        (2, False, False),
        (0, True, False),
        (0, False, False),
        (0, False, True),
    ]


def test_a_launch_does_not_wait_and_the_ring_keeps_packets_in_flight(steps):
    ours, _, _, queue = steps(max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=2)
    ours.launch(plan(0, [0], [4], open=[(0, 4, GREEDY)]))
    in_flight = []
    for step in range(1, 9):
        ours.launch(plan(step, [0], [1]))
        in_flight = [address for address, _ in queue.sent[-2:]]
        assert len(set(in_flight)) == 2, "a packet that the device may still read must not be overwritten"
        assert not ours.is_done() and not queue.waits
        result = ours.collect()
        assert result.step == step - 1
        assert queue.waits == [step]
        queue.waits.clear()
    follows = [asked[1] for asked in queue.asked if isinstance(asked, tuple)]
    assert follows == list(range(1, 9)), "a step's results are fetched before the next step overwrites them"
    assert len({address for address, _ in queue.sent[1:]}) <= 3


def test_only_the_used_part_of_a_packet_is_sent(steps):
    ours, _, _, queue = steps(max_num_seqs=64, max_num_batched_tokens=512)
    ours.launch(plan(0, [0], [301], open=[(0, 301, GREEDY)]))
    ours.launch(plan(1, [0], [1]))
    (_, prompt), (_, decode) = queue.sent
    samples, header, record, opened = 5 * 64, 8, 13, 11
    assert decode == samples + header + record + 1, "neither tiles nor blocks"
    assert prompt == 4 * (1 + ours._limits.tiles) + samples + header + record + 301 + 19 + 3 + opened, (
        "padded before `opened`"
    )


def test_draft_tokens_of_steps_in_flight_are_not_waited_for(steps):
    """The second step with draft tokens is launched before the host knows what the first one accepted."""
    ours, decoder, state, queue = steps(
        max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=2, speculative="ngram,tokens=3"
    )
    state.chosen = [[7], [8, 9, 50, 1], [8, 77, 2, 3]]
    opened = plan(0, [1], [12], open=[(1, 12, GREEDY)])
    ids = ids_to_bytes([7, 8, 9] * 4)
    ours.launch(structs.replace(opened, open=(structs.replace(opened.open[0], ids=ids),)))
    ours._rows.draft_level[1] = 0
    drafting = {"num_speculative": 1, "speculate": 3}
    ours.launch(structs.replace(plan(1, [1], [1], grow=[(1, 5)]), **drafting))
    assert decoder.records[1][0][2:4] == [4, 12] and decoder.ids.tolist() == [-1, 8, 9, 7]
    assert bytes_to_ids(ours.collect().ids).tolist() == [7] and queue.waits == [1]
    ours.launch(structs.replace(plan(2, [1], [1]), **drafting))
    assert decoder.records[2][0][2:4] == [4, -1], "only the device knows where it begins"
    assert decoder.ids.tolist() == [-1, 9, 7, 8, 9, 7, 8], "ids for positions 13 to 19"
    assert queue.waits == [1]
    first = ours.collect()
    assert (bytes_to_ids(first.ids).tolist(), bytes_to_ids(first.num_sampled).tolist()) == ([8, 9, 50], [3])
    assert ours._rows.num_computed[1] == 19, "15, and four positions of the step in flight"
    second = ours.collect()
    assert (bytes_to_ids(second.ids).tolist(), bytes_to_ids(second.num_sampled).tolist()) == ([8, 77], [2])
    assert ours._rows.num_computed[1] == 17 and not ours._num_unsure.any() and len(queue.waits) == 3
    ours.launch(structs.replace(plan(3, [1], [1]), **drafting))
    assert decoder.records[3][0][3] == 17, "the host knows it again"


def test_draft_tokens_do_not_depend_on_what_the_host_has_read(steps):
    """Ranks read results at different times, and must propose the same draft tokens."""

    def drafted(is_read_early):
        ours, decoder, state, _ = steps(
            max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=2, speculative="ngram,tokens=3"
        )
        state.chosen = [[7], [8, 9, 7, 30], [8]]
        opened = plan(0, [1], [12], open=[(1, 12, GREEDY)])
        ids = ids_to_bytes([7, 8, 9] * 4)
        ours.launch(structs.replace(opened, open=(structs.replace(opened.open[0], ids=ids),)))
        ours._rows.draft_level[1] = 0
        ours.launch(structs.replace(plan(1, [1], [1], grow=[(1, 5)]), num_speculative=1, speculate=3))
        ours.collect()
        if is_read_early:
            ours.collect()
        ours.launch(structs.replace(plan(2, [1], [1]), num_speculative=1, speculate=3))
        _, _, count, start, *_, ids_at, base, _, _, _, _ = decoder.records[2][0]
        return count, [int(decoder.ids[ids_at + position - base]) for position in range(17, 20)], start

    (count, tokens, start), (other_count, other_tokens, other_start) = drafted(False), drafted(True)
    assert (count, tokens) == (other_count, other_tokens) and count == 4
    assert (start, other_start) == (-1, 16)


def test_shapes_are_recorded_while_idle_and_used_ones_first(steps):
    ours, decoder, _, queue = steps(max_num_seqs=4, max_num_batched_tokens=64)
    ours.launch(plan(0, [0, 1, 2], [1, 1, 1], open=[(row, 1, GREEDY) for row in range(3)]))
    ours.launch(plan(1, [0, 1, 2], [1, 1, 1]))
    for _ in range(2):
        ours.collect()
    assert "record" not in queue.asked
    decoder.shapes.clear()
    assert ours.use_idle() and ours.use_idle() and ours.use_idle()
    assert decoder.shapes[0] == StepShape(4, 0), "the shape that was run comes first"
    assert (decoder.steps[-1][0], decoder.steps[-1][1]) == (0, 0), "it is recorded with a step without rows"
    while ours.use_idle():
        pass
    assert ours.num_recorded == len(decode_sizes(4)) * 4 + len(mixed_sizes(64))
    queue.asked.clear()
    ours.launch(plan(2, [0], [1]))
    assert [asked for asked in queue.asked if asked == "replay"] == ["replay", "replay"]
    assert not ours.use_idle()


def test_steps_of_most_tokens_are_not_recorded(steps):
    ours, decoder, _, queue = steps(max_num_seqs=4, max_num_batched_tokens=4096)
    for step in range(5):
        ours.launch(plan(step, [0, 1, 2], [1000] * 3, open=[(row, 1000, GREEDY) for row in range(3)]))
        ours.collect()
    assert decoder.shapes == [StepShape(3008, 128)] * 5
    assert queue.asked.count("record") == 1, "only the sampling"


def test_kernels_are_compiled_and_decode_steps_recorded_before_the_first_plan(steps):
    ours, decoder, state, queue = steps(max_num_seqs=100, max_num_batched_tokens=512)
    seconds = ours.warm_up()
    run = {shape for shape in decoder.shapes if shape.tile_rows == 128}
    assert run == {StepShape(size, 128) for size in (64, 128, 256, 512)}
    assert StepShape(64, 16) in decoder.shapes, "tiles of few rows, too"
    kinds = {(shape.kind, shape.edits, shape.logprobs) for _, shape, _, _ in state.samples}
    assert kinds == {(kind, extra, extra) for kind in range(3) for extra in (False, True)}
    assert ours.num_recorded == queue.asked.count("record") == len((1, 2, 4, 8, 16, 32, 64, 100)) * 4
    assert [*seconds] == [
        "kernels",
        f"32 of {len(decode_sizes(100)) * 4 + len(mixed_sizes(512))} graphs, the others while idle",
    ]
    queue.asked.clear()
    ours.launch(plan(0, [0, 1], [1, 1], open=[(0, 1, GREEDY), (1, 1, GREEDY)]))
    assert [asked for asked in queue.asked if asked == "replay"] == ["replay", "replay"], "the first step is recorded"


def test_ranks_record_all_decode_steps_before_the_first_plan_in_one_order(steps):
    orders = []
    for _ in range(2):
        ours, decoder, state, queue = steps(max_num_seqs=20, max_num_batched_tokens=64)
        decoder.num_ranks = 2
        ours.warm_up()
        assert ours.num_recorded == len(decode_sizes(20)) * 4
        orders.append((decoder.shapes, [shape for _, shape, _, _ in state.samples], queue.asked))
        assert not ours.use_idle(), "the ranks are not idle at the same time"
    assert orders[0] == orders[1]


def test_ranks_of_domains_run_a_step_in_one_shape_whoever_has_its_tokens(steps):
    """Also a rank without tokens, and one whose rows have a token each beside another one's prompt."""
    seen = []
    for number in range(2):
        ours, decoder, _, _ = steps(max_num_seqs=20, max_num_batched_tokens=256, domain=Domain(number))
        decoder.num_ranks = 2
        opened = [
            plan(0, [0, 1], [1, 1], open=[(0, 1, GREEDY), (1, 1, GREEDY)]),
            plan(0, [3], [9], open=[(3, 9, GREEDY)]),
        ]
        one, long = (
            [plan(1, [0, 1], [1, 1]), plan(1, [], [])],
            [plan(2, [], []), plan(2, [2], [70], open=[(2, 70, GREEDY)])],
        )
        for plans, nums, longest in ((opened, (2, 9), 9), (one, (2, 0), 1), (long, (0, 70), 70)):
            own = structs.replace(plans[number], domain_tokens=nums, domain_longest=longest)
            ours.launch(own)
            assert len(bytes_to_ids(ours.collect().ids)) == len(own.sample)
        seen.append(decoder.shapes)
        assert [tokens for _, tokens, _, _ in decoder.steps] == ([2, 2, 0], [9, 0, 70])[number]
    assert seen[0] == seen[1] == [StepShape(64, 16), StepShape(2, 0), StepShape(80, 128)]


def test_a_device_that_is_never_idle_records_frequent_shapes(steps):
    ours, _, _, queue = steps(max_num_seqs=4, max_num_batched_tokens=64)
    ours.launch(plan(0, [0], [4], open=[(0, 4, GREEDY)]))
    for step in range(1, 6):
        ours.launch(plan(step, [0], [1]))
        ours.collect()
    assert queue.asked.count("record") == 2, "the step and the sampling"
    assert queue.asked.count("replay") > 0


def test_results_of_an_aborted_request_do_not_change_the_new_request_in_its_row(steps):
    ours, _, _, _ = steps(max_num_seqs=4, max_num_batched_tokens=64)
    ours.launch(plan(0, [0], [4], open=[(0, 4, GREEDY)]))
    ours.launch(plan(1, [0], [9], open=[(0, 9, GREEDY)]))  # the first request was aborted
    before = ours._rows.ids[0, :9].copy()
    ours.collect()
    assert np.array_equal(ours._rows.ids[0, :9], before)
    assert ours._rows.num_ids[0] == 10


def with_states(opened, *sources):
    """The plan whose rows have states in the pages 20 + row and 30 + row, and begin with those in these pages."""
    found = [
        structs.replace(row, state=ids_to_bytes([20 + row.row, 30 + row.row]), state_from=ids_to_bytes(list(source)))
        for row, source in zip(opened.open, sources, strict=True)
    ]
    return structs.replace(opened, open=tuple(found))


def test_a_packet_says_which_states_rows_read_write_and_keep(steps):
    ours, decoder, _, queue = steps(num_states=2, max_num_seqs=8, max_num_batched_tokens=128)
    opened = with_states(plan(0, [5, 2], [20, 30], open=[(5, 20, GREEDY), (2, 30, GREEDY)]), (), (8, 9))
    kept = {"keep_rows": [2, 5, 2], "keep_positions": [30, 7, 16], "keep_pages": [10, 11, 12, 13, 14, 15]}
    ours.launch(structs.replace(opened, **{name: ids_to_bytes(numbers) for name, numbers in kept.items()}))
    ours.launch(plan(1, [2, 5], [1, 1]))
    first, second = decoder.states
    rows, chunks, pages = first
    assert rows == [[0, -1], [2, 5]], "the first row begins with zeros"
    assert chunks == [[0, 7, 2], [7, 20, 0], [20, 36, 3], [36, 50, 4], [50, 50, 1]]
    states = [pages[i : i + 2] for i in range(0, 12, 2)]
    assert states == [[25, 35], [22, 32], [12, 13], [14, 15], [10, 11], [8, 9]]
    rows, chunks, pages = second
    assert (rows, chunks, pages[:4]) == ([[0, 0], [1, 1]], [[0, 1, 0], [1, 2, 1]], [22, 32, 25, 35])
    assert not queue.waits


@launches
def test_the_state_of_accepted_draft_tokens_is_copied_without_waiting(steps):
    ours, decoder, _, queue = steps(
        num_states=2, max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=1, speculative="ngram,tokens=3"
    )
    opened = with_states(plan(0, [1], [6], open=[(1, 6, GREEDY)]), ())
    ids = ids_to_bytes([5, 101, 102, 102, 9, 5])  # 101 is sampled next, and then 102 for ever
    ours.launch(structs.replace(opened, open=(structs.replace(opened.open[0], ids=ids),)))
    ours.collect()
    ours._rows.draft_level[1] = 0
    cache = ours._cache
    cache.storage.copy_(torch.arange(len(cache.storage))[:, None].expand_as(cache.storage))
    ours.launch(structs.replace(plan(1, [1], [1]), num_speculative=1, speculate=3))
    rows, chunks, pages = decoder.states[1]
    spares = cache.spare_states.tolist()
    assert spares == [[40, 41], [42, 43], [44, 45]] and rows == [[0, 0]]
    assert chunks == [[0, 1, 1], [1, 2, 2], [2, 3, 3], [3, 4, 0]]
    assert pages[:8] == [21, 31, *spares[0], *spares[1], *spares[2]]
    queue.waits.clear()
    result = ours.collect()
    assert bytes_to_ids(result.ids).tolist() == [102, 102, 102], "two of three draft tokens are accepted"
    assert len(queue.waits) == 1, "for the sampled ids alone"
    assert cache.storage[[21, 31], 0].tolist() == spares[2], "the state after 101, 102 and 102"
    changed = (cache.storage != torch.arange(len(cache.storage))[:, None]).any(dim=1)
    assert changed.nonzero()[:, 0].tolist() == [21, 31]


@launches
def test_pages_are_copied_in_queue_order(steps):
    ours, _, _, queue = steps(max_num_seqs=4, max_num_batched_tokens=64)
    cache = ours._cache
    cache.storage.copy_(torch.arange(len(cache.storage))[:, None].expand_as(cache.storage))
    ours.launch(structs.replace(plan(0, [1], [6], open=[(1, 6, GREEDY)]), copies=ids_to_bytes([7, 30, 9, 31, 7, 32])))
    assert cache.storage[[30, 31, 32], 0].tolist() == [7, 9, 7] and not queue.waits


def test_steps_whose_attention_is_planned_on_the_host_are_not_recorded(steps):
    """FlashAttention serves steps with prompts. Decode steps are recorded as ever."""
    from pagewire.engine.gpu.attention import FlashAttention, HostAttention

    dtypes = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    attention = HostAttention("flash-attn", FlashAttention(), **dtypes)
    ours, decoder, _, _ = steps(max_num_seqs=4, max_num_batched_tokens=64, attention=attention)
    seen = []
    decoder.run = lambda packet, state, shape: seen.append((shape, attention.rows))
    for row in range(4):
        ours.launch(plan(2 * row, [row], [20], open=[(row, 20, GREEDY)]))
        ours.launch(plan(2 * row + 1, [row], [1]))
        ours.collect(), ours.collect()
    prompts, decodes = seen[::2], seen[1::2]
    assert all(shape == StepShape(64, 128) for shape, _ in prompts) and attention.rows is None
    assert [(rows.query_lens.tolist(), rows.context_lens.tolist(), rows.num_decode) for _, rows in prompts] == [
        ([20], [20], 0)
    ] * 4
    assert all(rows is None and shape == StepShape(1, 0) for shape, rows in decodes)
    while ours.use_idle():
        pass
    assert ours.num_recorded == len(decode_sizes(4)) * 4

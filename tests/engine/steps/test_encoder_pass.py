"""The encoder's pass stores the same of a prompt wherever its pages are, whoever had them, and beside other prompts."""

import pytest
import torch
from decoders import of_checkpoint

from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.executors.reference import Reference, ReferenceModel
from pagewire.engine.executors.vocabulary import Vocabulary
from pagewire.engine.models.lower import lower
from pagewire.engine.parallel.collectives import Alone
from pagewire.engine.runner.served import shape_of
from pagewire.engine.steps.encoder_pass import EncoderPass
from pagewire.engine.steps.rows import Rows
from pagewire.engine.steps.trial import fill_random, packing_for
from pagewire.ipc.messages import GroupTable, RowOpen, Sampling, StepPlan, ids_to_bytes
from pagewire.kernels.ops import reference_ops

SIZE, CPU, FLOAT32 = 4, torch.device("cpu"), torch.float32
PROMPTS = ([5, 6, 7, 8, 9], [11], [3, 4, 5, 6])


class Encoding:
    """A small model, and a cache in which nothing is a number before it is stored."""

    def __init__(self, kind: str) -> None:
        decoder = of_checkpoint(kind)
        assert decoder is not None and decoder.encoder is not None
        program = lower(decoder)
        assert program.encoder is not None
        packing, shape = packing_for(FLOAT32, CPU), shape_of(program, FLOAT32)
        fill_random(program, [packing])
        model = Reference(
            program.encoder, packing.weights, max_len=32, dtype=FLOAT32, weight_dtype=FLOAT32, device=CPU, group=Alone()
        )
        self.cache = KvCache(shape=shape, num_pages=40, block_size=SIZE, device=CPU)
        self.cache.storage.view(FLOAT32)[: self.cache.num_pages] = float("nan")
        self.rows = Rows(num_rows=4, max_len=32, block_size=SIZE, vocab_size=320, groups=self.cache.groups)
        vocabulary = Vocabulary(program, packing.weights, Alone())
        self._pass = EncoderPass(ReferenceModel(model, vocabulary, shape), self.cache, reference_ops())
        self._tiles = [tile for tile, place in enumerate(shape.layers) if place.lifetime.kind == "cross"]
        self._pages = len(self.cache.groups.tables(1))  # of a block

    def read(self, opened: dict[int, list[int]], first_page: int) -> dict[int, torch.Tensor]:
        """Row → prompt; their pages follow each other. Returns what is stored of each: keys and values of all layers,
        from the first to the last position of their blocks."""
        rows, own = [], {}
        for row, prompt in opened.items():
            own[row] = list(range(first_page, first_page + self._pages * -(-len(prompt) // SIZE)))
            first_page += len(own[row])
            rows.append(
                RowOpen(
                    row,
                    ids_to_bytes([0]),
                    1,
                    0,
                    b"",
                    Sampling(),
                    tables=(GroupTable(0, ids_to_bytes([39])),),
                    cross=ids_to_bytes(own[row]),
                    num_encoded=len(prompt),
                    encoder_ids=ids_to_bytes(prompt),
                )
            )
        for each in rows:
            self.rows.open(each)
        self._pass.run(StepPlan(1, tuple(rows), b"", b"", b"", b"", b""), self.rows)
        found = {}
        first_table = self.cache.groups.tables(1).start
        for row, pages in own.items():
            parts = []
            for tile in self._tiles:
                shelf = self.cache.tables[tile] - first_table
                parts += [part[pages[shelf :: self._pages]].flatten(0, 1) for part in self.cache.pages[tile]]
            found[row] = torch.cat([part.flatten(1) for part in parts], dim=1)
        return found


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_what_is_stored_of_a_prompt(kind: str) -> None:
    both = Encoding(kind)
    together = both.read(dict(enumerate(PROMPTS)), 7)
    again = both.read({3: PROMPTS[0]}, 7 + both._pages)  # over pages that others had
    torch.testing.assert_close(again[3][:5], together[0][:5])
    for row, prompt in enumerate(PROMPTS):
        alone = Encoding(kind).read({0: prompt}, 0)[0]
        assert alone.isfinite().all(), "what is behind the prompt in its last page is no number"
        torch.testing.assert_close(alone[: len(prompt)], together[row][: len(prompt)])
        assert len({tuple(position) for position in alone[: len(prompt)].tolist()}) == len(prompt)
    other = Encoding(kind).read({0: [*PROMPTS[0][:-1], 2]}, 0)[0]
    assert not torch.allclose(other[0], together[0][0]), "the first position sees the last"

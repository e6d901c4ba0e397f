"""The grammar process of a simulated engine: what may follow an output is a hash of all of it."""

from array import array
from collections.abc import Sequence

from fakes import allowed_after, bits_of

from pagewire.ipc.messages import Masks, Sampled, bytes_to_ids


class FakeGrammar:
    """Answers as the process does. A sequence that stumbles fails once its output is so long."""

    def __init__(self, stumbles: dict[int, int]) -> None:
        self.outputs: dict[int, list[int]] = {}  # of the sequences that have not ended
        self._stumbles = stumbles

    def open(self, rids: Sequence[int], output: Sequence[int]) -> Masks:
        """These sequences follow a grammar from here on."""
        for rid in rids:
            self.outputs[rid] = list(output)
        return self._masks(rids)

    def hear(self, sampled: Sampled) -> Masks:
        """What the core tells."""
        for rid in memoryview(sampled.ended).cast("q"):
            self.outputs.pop(rid, None)
        rids = memoryview(sampled.rids).cast("q").tolist()
        for rid, token in zip(rids, bytes_to_ids(sampled.ids), strict=True):
            if rid in self.outputs:
                self.outputs[rid].append(token)
        return self._masks([rid for rid in rids if rid in self.outputs])

    def _masks(self, rids: Sequence[int]) -> Masks:
        masked, free, complete = array("q"), array("q"), array("q")
        bits, failed = b"", []
        for rid in rids:
            output = self.outputs[rid]
            allowed = allowed_after(rid, output)
            if len(output) >= self._stumbles.get(rid, 1000):
                failed.append((rid, "internal", "It stumbled."))
            elif allowed is None:
                free.append(rid)
            elif allowed:
                masked.append(rid)
                bits += bits_of(allowed)
            else:
                complete.append(rid)
        return Masks(masked.tobytes(), bits, free.tobytes(), complete.tobytes(), tuple(failed))

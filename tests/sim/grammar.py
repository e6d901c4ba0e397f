"""The grammar process of a simulated engine: the allowed tokens are a hash of the whole output."""

from array import array
from collections.abc import Sequence

from fakes import allowed_after, bits_of

from pagewire.ipc.messages import Masks, Sampled, bytes_to_ids


class FakeGrammar:
    """Answers as the process does. `fails_at`: rid → output length at which its grammar fails."""

    def __init__(self, fails_at: dict[int, int]) -> None:
        self.outputs: dict[int, list[int]] = {}  # of the sequences that have not ended
        self._fails_at = fails_at

    def open(self, rids: Sequence[int], output: Sequence[int]) -> Masks:
        """Starts a grammar for each of these sequences. Returns their first masks."""
        for rid in rids:
            self.outputs[rid] = list(output)
        return self._masks(rids)

    def hear(self, sampled: Sampled) -> Masks:
        """Takes the tokens that the core has sampled. Returns the next masks."""
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
            if len(output) >= self._fails_at.get(rid, 1000):
                failed.append((rid, "internal", "The grammar failed."))
            elif allowed is None:
                free.append(rid)
            elif allowed:
                masked.append(rid)
                bits += bits_of(allowed)
            else:
                complete.append(rid)
        return Masks(masked.tobytes(), bits, free.tobytes(), complete.tobytes(), tuple(failed))

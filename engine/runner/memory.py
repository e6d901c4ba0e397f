"""How the device's memory is shared: weights, workspace, KV cache. Plain arithmetic, and the lines for the operator."""

from msgspec import Struct

_GATHER_BYTES = 64 << 20  # expected limit of the buffers that attention keeps


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """All values but the last three are bytes of one device."""

    weights: int
    workspace: int  # what a step may take, estimated
    graphs: int = 0  # what recorded steps may take on a GPU, estimated
    block: int  # one KV block of all layers
    block_size: int  # positions
    max_model_len: int
    num_sharers: int = 1  # engines of this launch that share the weights

    def num_blocks(self, budget: int) -> int:
        """Blocks that fit into `budget` bytes, at least one. Only for a model with KV."""
        return max(1, budget // self.block)

    def lines(self, num_blocks: int) -> tuple[str, ...]:
        shared = f" (one copy for {self.num_sharers} engines)" if self.num_sharers > 1 else ""
        if not self.block:
            return (f"weights {size(self.weights)}{shared} | workspace {size(self.workspace)} | no KV cache",)
        whole = num_blocks // -(-self.max_model_len // self.block_size)
        requests = (
            f"{whole:,} request{'' if whole == 1 else 's'} of {self.max_model_len:,} tokens"
            if whole
            else f"less than one request of {self.max_model_len:,} tokens"
        )
        graphs = f" | graphs {size(self.graphs)}" if self.graphs else ""
        return (
            f"weights {size(self.weights)}{shared} | workspace {size(self.workspace)}{graphs} | KV cache "
            f"{size(num_blocks * self.block)} = {num_blocks:,} blocks of {self.block_size} tokens, {requests}",
        )


def workspace_bytes(
    *,
    tokens: int,
    rows: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_per_tok: int,
    vocab_size: int,
    itemsize: int,
    cache_bytes: int,
) -> int:
    """The estimated memory of a step: activations of its tokens, logits of its rows, and attention's gathered keys."""
    widths = 8 * hidden_size + 3 * intermediate_size + 2 * num_experts_per_tok * hidden_size
    activations = tokens * widths * itemsize
    logits = min(rows, tokens) * vocab_size * (itemsize + 2 * 4)
    return activations + logits + min(_GATHER_BYTES, cache_bytes)


def size(num_bytes: int) -> str:
    """3.9 MB, 2.0 GB: powers of 1024, as in the flags."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"

"""How the device's memory is shared: weights, workspace, KV cache. Plain arithmetic, and the lines for the operator."""

from msgspec import Struct

from ..attention.cache_groups import CacheGroup, CacheGroups

_GATHER_BYTES = 64 << 20  # expected limit of the buffers that attention keeps


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes of one device, unless another unit is given."""

    weights: int
    workspace: int  # what a step may take, estimated
    graphs: int = 0  # what recorded steps may take on a GPU, estimated
    groups: CacheGroups  # of the KV cache
    block_size: int  # positions
    max_model_len: int  # positions
    num_sharers: int = 1  # engines of this launch that share the weights

    @property
    def page_bytes(self) -> int:
        """Of the KV cache; 0: a model without one."""
        return self.groups.page_bytes

    def num_pages(self, budget: int) -> int:
        """Pages that fit into `budget` bytes, at least one. Only for a model with KV."""
        return max(1, budget // self.page_bytes)

    def lines(self, num_pages: int, num_spares: int = 0) -> tuple[str, ...]:
        """num_spares: recurrent states for draft tokens, beside the pages."""
        shared = f" (one copy for {self.num_sharers} engines)" if self.num_sharers > 1 else ""
        if not self.page_bytes:
            return (f"weights {size(self.weights)}{shared} | workspace {size(self.workspace)} | no KV cache",)
        whole = num_pages // self.groups.pages(self.max_model_len, block_size=self.block_size)
        requests = (
            f"{whole:,} request{'' if whole == 1 else 's'} of {self.max_model_len:,} tokens"
            if whole
            else f"less than one request of {self.max_model_len:,} tokens"
        )
        graphs = f" | graphs {size(self.graphs)}" if self.graphs else ""
        spares = num_spares * self.groups.state_pages * self.page_bytes
        drafts = f" | {num_spares:,} states for draft tokens {size(spares)}" if num_spares else ""
        return (
            f"weights {size(self.weights)}{shared} | workspace {size(self.workspace)}{graphs} | KV cache "
            f"{size(num_pages * self.page_bytes)} = {num_pages:,} {self._unit()}, {requests}{drafts}",
        )

    def _unit(self) -> str:
        groups = self.groups.groups
        if len(groups) == 1 and groups[0].lifetime.kind != "state":
            return f"blocks of {self.block_size} tokens"
        return f"pages of {size(self.page_bytes)} ({'; '.join(self._described(group) for group in groups)})"

    def _described(self, group: CacheGroup) -> str:
        pages, span = f"{group.pages} page{'' if group.pages == 1 else 's'}", group.lifetime.span
        if group.lifetime.kind == "state":
            return f"state: {pages} a request"
        name = {"full": "full attention", "window": f"windows of {span:,}", "chunk": f"chunks of {span:,}",
                "cross": "what the encoder has read"}  # fmt: skip
        return f"{name[group.lifetime.kind]}: {pages} for {self.block_size} tokens"


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

"""Which rank of a tensor-parallel group holds which part of a model. Pure arithmetic on sizes.

QKV and gate/up projections are split by output columns, output and down projections by input rows, so a layer needs one
all-reduce after attention and one after the feed-forward part (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section
3). Each expert is split in the same way, and every rank has the whole router. The vocabulary rows of embedding and head
are divided in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from ...errors import ConfigError
from ..checkpoint.spec import ModelSpec


@dataclass(frozen=True)
class Cut:
    """The part [first, last) of dimension `dim`, which has length `whole`, of a checkpoint's matrix. A bias is cut like
    the rows; where columns are cut, only the first rank adds the bias."""

    dim: int
    first: int
    last: int
    whole: int


Cuts = Mapping[str, Cut]
"""Name of a module in the checkpoint, or our name of a stack of expert matrices → the part that a rank takes of it, or
of each matrix in the stack. Modules without an entry are taken whole."""


def part(num: int, rank: int, size: int) -> tuple[int, int]:
    """[first, last) of `num` items divided among `size` ranks, in order; the last ranks may have fewer."""
    each = -(-num // size)
    return min(rank * each, num), min((rank + 1) * each, num)


def check(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError if the model cannot be divided among `size` ranks."""
    flag = f"--tensor-parallel-size {size}"
    columns = [spec.intermediate_size] if spec.moe is None else [spec.intermediate_size, spec.moe.intermediate_size]
    for num, what in ((spec.num_heads, "attention heads"), *((num, "feed-forward columns") for num in columns)):
        if num % size:
            raise ConfigError(f"{flag}: the model's {num} {what} cannot be divided evenly; choose a divisor.")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(f"{flag} and the model's {spec.num_kv_heads} key/value heads: one must divide the other.")
    first, last = part(spec.vocab_size, size - 1, size)
    if first == last:
        raise ConfigError(f"{flag}: the last of {size} ranks would get none of the model's {spec.vocab_size} tokens.")


def local(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The sizes of this rank's part; the vocabulary stays whole."""
    first, last = _kv_heads(spec, rank, size)
    moe = spec.moe
    if moe is not None:
        moe = structs.replace(moe, intermediate_size=moe.intermediate_size // size)
    return structs.replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=last - first,
        intermediate_size=spec.intermediate_size // size,
        moe=moe,
    )


def cuts(spec: ModelSpec, rank: int, size: int) -> Cuts:
    """The parts of the checkpoint that this rank reads."""
    dim = spec.head_dim
    heads = part(spec.num_heads, rank, size)
    kv_heads = _kv_heads(spec, rank, size)
    inner = part(spec.intermediate_size, rank, size)
    whole = 0 if spec.moe is None else spec.moe.intermediate_size
    experts = *part(whole, rank, size), whole
    queries = heads[0] * dim, heads[1] * dim, spec.num_heads * dim
    keys = kv_heads[0] * dim, kv_heads[1] * dim, spec.num_kv_heads * dim
    columns = *inner, spec.intermediate_size
    words = *part(spec.vocab_size, rank, size), spec.vocab_size
    return {
        "q_proj": Cut(0, *queries),
        "k_proj": Cut(0, *keys),
        "v_proj": Cut(0, *keys),
        "o_proj": Cut(1, *queries),
        "gate_proj": Cut(0, *columns),
        "up_proj": Cut(0, *columns),
        "down_proj": Cut(1, *columns),
        "gate_up": Cut(0, *experts),
        "down": Cut(1, *experts),
        "embed_tokens": Cut(0, *words),
        "lm_head": Cut(0, *words),
    }


def _kv_heads(spec: ModelSpec, rank: int, size: int) -> tuple[int, int]:
    """The key/value heads of a rank. With more ranks than heads, several ranks hold the same head."""
    if spec.num_kv_heads >= size:
        return part(spec.num_kv_heads, rank, size)
    head = rank * spec.num_kv_heads // size
    return head, head + 1

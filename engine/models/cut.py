"""The part of a decoder that one rank of a tensor-parallel group holds: a description with fewer heads and columns, or
whole experts.

Projections into heads and feed-forward columns are cut by rows, those back to the hidden size by columns, so a sublayer
needs one all-reduce (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3), and a second one in Mamba 1 and for
norms over the heads of several ranks. Each expert is cut in the same way, or with `--enable-expert-parallel` belongs
to one rank as a whole; the same all-reduce adds the experts of all ranks. Every rank has the whole router. The rows of
embedding and head are divided in order.

With KV domains (`--kv-domains`) only feed-forward layers are divided: each rank has requests of its own, and for them
all heads, the embedding and the head. Where such ranks send each other tokens, a mixture's experts are divided, and not
what all tokens pass: the router, shared experts, and the projections around the experts.
"""

from dataclasses import replace

from ...errors import ConfigError
from ..core.expert_placement import deal, room
from .cut_mixers import cut_delta_net, cut_lightning, cut_mamba1, cut_mamba2, cut_short_conv
from .description import (
    Attention,
    Block,
    Body,
    Branch,
    Decoder,
    DeltaNet,
    LatentAttention,
    Lightning,
    LowRank,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    ShortConv,
    Sublayer,
    Weight,
)
from .expert_places import places
from .parts import columns, part_rows, rows


def share(num: int, rank: int, size: int) -> tuple[int, int]:
    """[first, last) of `num` items divided among `size` ranks, in order; the last ranks may have fewer."""
    each = -(-num // size)
    return min(rank * each, num), min((rank + 1) * each, num)


def cut(
    decoder: Decoder, rank: int, size: int, *, deals_experts: bool = False, num_replicas: int = 0,
    has_domains: bool = False, exchanges: bool = False,
) -> Decoder:  # fmt: skip
    """deals_experts: a rank has whole experts, and not a part of each, and room for so many replicas. has_domains: each
    rank is a KV domain. exchanges: domains send each other the tokens that their experts compute. Raises ConfigError if
    the model cannot be divided among `size` ranks."""
    if size == 1:
        return decoder
    if decoder.encoder is not None:
        raise ConfigError(f"--tensor-parallel-size {size}: a model with an encoder cannot be divided among ranks.")
    if deals_experts and not any(isinstance(body, Moe) for body in decoder.bodies):
        raise ConfigError("--enable-expert-parallel is for models with experts, and this one has none; leave it out.")
    ranks = _Ranks(
        rank, size, deals_experts=deals_experts, num_replicas=num_replicas, has_domains=has_domains, exchanges=exchanges
    )
    if has_domains:
        return replace(decoder, blocks=tuple(ranks.block(block) for block in decoder.blocks))
    first, last = share(decoder.vocab, size - 1, size)
    if first == last:
        raise ConfigError(
            f"{ranks.flag}: the last of {size} ranks would get none of the model's {decoder.vocab} tokens."
        )
    words = share(decoder.vocab, rank, size)
    embedding, head = decoder.embedding, decoder.head
    return replace(
        decoder,
        embedding=replace(embedding, table=rows(embedding.table, *words)),
        head=replace(
            head,
            weight=None if head.weight is None else rows(head.weight, *words),
            bias=None if head.bias is None else rows(head.bias, *words),
        ),
        blocks=tuple(ranks.block(block) for block in decoder.blocks),
    )


class _Ranks:
    def __init__(
        self, rank: int, size: int, *, deals_experts: bool, num_replicas: int, has_domains: bool, exchanges: bool
    ) -> None:
        self._rank, self._size, self._deals_experts = rank, size, deals_experts
        self._num_replicas, self._has_domains, self._exchanges = num_replicas, has_domains, exchanges
        self.flag = f"--tensor-parallel-size {size}"

    def block(self, block: Block) -> Block:
        return replace(block, sublayers=tuple(self._sublayer(sublayer) for sublayer in block.sublayers))

    def _sublayer(self, sublayer: Sublayer) -> Sublayer:
        aside = sublayer.aside
        if aside is not None:
            aside = replace(aside, branches=tuple(self._branch(branch) for branch in aside.branches))
        return replace(sublayer, branches=tuple(self._branch(branch) for branch in sublayer.branches), aside=aside)

    def _branch(self, branch: Branch) -> Branch:
        return replace(branch, body=self._body(branch.body))

    def _body(self, body: Body) -> Body:
        if self._has_domains and not isinstance(body, Mlp | Moe):
            return body
        match body:
            case Attention():
                return self._attention(body)
            case LatentAttention():
                return self._latent_attention(body)
            case Mlp():
                return self._mlp(body)
            case Moe() if self._exchanges:
                return replace(self._dealt(body), is_exchanged=True)
            case Moe():
                shared = None if body.shared is None else self._mlp(body.shared)
                latent = body.latent
                if latent is not None:  # each rank multiplies its part of the sum
                    up = columns(latent.up, 0, latent.up.columns, is_first=self._rank == 0)
                    latent = replace(latent, up=up)
                router = replace(body.router, zero_scale=0.0 if self._rank else 1.0)
                body = replace(body, shared=shared, latent=latent, router=router)
                return self._dealt(body) if self._deals_experts else replace(body, experts=self._mlp(body.experts))
            case LowRank():
                return body
            case DeltaNet():
                return cut_delta_net(body, self._evenly, is_first=self._rank == 0)
            case Mamba1():
                return cut_mamba1(body, self._evenly, is_first=self._rank == 0)
            case Mamba2():
                return cut_mamba2(body, self._evenly, self._rank, self._size)
            case ShortConv():
                return cut_short_conv(body, self._evenly, is_first=self._rank == 0)
            case Lightning():
                return cut_lightning(body, self._evenly, self._rank, self._size)

    def _evenly(self, num: int, what: str) -> tuple[int, int]:
        if num % self._size:
            raise ConfigError(f"{self.flag}: the model's {num} {what} cannot be divided evenly; choose a divisor.")
        return share(num, self._rank, self._size)

    def _attention(self, a: Attention) -> Attention:
        first, last = self._evenly(a.heads, "attention heads")
        kv_first, kv_last = self._kv_heads(a.kv_heads)
        alibi = a.alibi
        if alibi is not None:
            alibi = replace(alibi, slopes=alibi.slopes[first:last])
        return replace(
            a,
            heads=last - first,
            kv_heads=kv_last - kv_first,
            q=rows(a.q, first * a.head_dim, last * a.head_dim),
            k=rows(a.k, kv_first * a.head_dim, kv_last * a.head_dim),
            v=rows(a.v, kv_first * a.value_dim, kv_last * a.value_dim),
            o=columns(a.o, first * a.value_dim, last * a.value_dim, is_first=self._rank == 0),
            q_norm=self._norm(a.q_norm, a.head_dim, first, last),
            k_norm=self._norm(a.k_norm, a.head_dim, kv_first, kv_last),
            v_norm=self._norm(a.v_norm, a.value_dim, kv_first, kv_last),
            gate=rows(a.gate, first * a.value_dim, last * a.value_dim),
            low=None if a.low is None else self._low(a, a.low, (first, last), (kv_first, kv_last)),
            sinks=None if a.sinks is None else part_rows((a.sinks,), first, last)[0],
            alibi=alibi,
        )

    def _low(
        self, a: Attention, low: tuple[LowRank, LowRank, LowRank], own: tuple[int, int], kv: tuple[int, int]
    ) -> tuple[LowRank, LowRank, LowRank]:
        """own, kv: [first, last) of the query heads, and of the key/value heads."""
        q, k, v = low
        return (
            replace(q, up=rows(q.up, *(head * a.head_dim for head in own))),
            replace(k, up=rows(k.up, *(head * a.head_dim for head in kv))),
            replace(v, up=rows(v.up, *(head * a.value_dim for head in kv))),
        )

    def _latent_attention(self, a: LatentAttention) -> LatentAttention:
        """Every rank has the whole latent and its cache."""
        first, last = self._evenly(a.heads, "attention heads")
        of_query, of_both = a.nope_dim + a.rope_dim, a.nope_dim + a.value_dim
        query = first * of_query, last * of_query
        return replace(
            a,
            heads=last - first,
            q=replace(a.q, up=rows(a.q.up, *query)) if isinstance(a.q, LowRank) else rows(a.q, *query),
            kv_b=rows(a.kv_b, first * of_both, last * of_both),
            o=columns(a.o, first * a.value_dim, last * a.value_dim, is_first=self._rank == 0),
        )

    def _kv_heads(self, num: int) -> tuple[int, int]:
        """The key/value heads of this rank. With more ranks than heads, several ranks hold the same head."""
        if num % self._size and self._size % num:
            raise ConfigError(f"{self.flag} and the model's {num} key/value heads: one must divide the other.")
        if num >= self._size:
            return share(num, self._rank, self._size)
        head = self._rank * num // self._size
        return head, head + 1

    def _mlp(self, mlp: Mlp) -> Mlp:
        first, last = self._evenly(mlp.width, "feed-forward columns")
        low = mlp.low
        if low is not None:
            gate, up = (replace(each, up=rows(each.up, first, last)) for each in low)
            low = gate, up
        return replace(
            mlp,
            width=last - first,
            low=low,
            ranks=self._size if mlp.sparsity else 1,
            gate=rows(mlp.gate, first, last),
            up=rows(mlp.up, first, last),
            down=columns(mlp.down, first, last, is_first=self._rank == 0),
        )

    def _dealt(self, moe: Moe) -> Moe:
        """This rank's experts, whole."""
        if moe.num_experts < self._size:
            raise ConfigError(
                f"--enable-expert-parallel: {self._size} ranks cannot share the {moe.num_experts} experts of a layer, "
                "of which each needs one; choose fewer ranks."
            )
        slots = deal(moe.num_experts, self._size)
        own, mlp = slots[self._rank], moe.experts

        def some(weight: Weight) -> Weight:
            other = None if weight.other is None else some(weight.other)
            return replace(weight, experts=len(own), only=own, other=other)

        gate = None if mlp.gate is None else some(mlp.gate)
        experts = replace(mlp, gate=gate, up=some(mlp.up), down=some(mlp.down))
        where = places(moe.num_experts, slots, self._rank)
        num_replicas = room(moe.num_experts, own, self._num_replicas)
        return replace(moe, experts=experts, places=where, num_replicas=num_replicas)

    def _norm(self, norm: Norm | None, dim: int, first: int, last: int) -> Norm | None:
        """Of the heads [first, last), which have `dim` elements each. A norm over all heads becomes one over these and
        those of the other ranks (`Norm.ranks`)."""
        if norm is None:
            return norm
        part = first * dim, last * dim
        if norm.size != dim:
            if norm.kind != "rms":
                raise ConfigError(f"{self.flag}: the model's layer norms over all heads cannot be divided among ranks.")
            norm = replace(norm, size=(last - first) * dim, ranks=self._size)
        elif norm.weight is None or norm.weight.rows == dim:
            return norm
        weight = None if norm.weight is None else rows(norm.weight, *part)
        return replace(norm, weight=weight, bias=rows(norm.bias, *part))

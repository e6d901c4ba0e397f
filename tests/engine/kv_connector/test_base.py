"""What a connector gets to know of an engine with several ranks or KV domains."""

from typing import Any

from pagewire.config.config import MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.ipc.messages import GroupShape

MODEL = ModelFacts(path="", name="m", max_position=100, vocab_size=50, eos_token_ids=(1,), checkpoint_dtype="float32")


def facts(num: int, rank: int = 0, groups: tuple[GroupShape, ...] = (), **flags: Any) -> ConnectorFacts:
    config = resolve(make_config(tensor_parallel_size=num, **flags), MODEL, MachineFacts(num_cores=1))
    return ConnectorFacts.of(config, (100,) * num, groups, rank=rank)


def test_a_domain_is_an_engine_of_one_rank_with_keys_of_its_own() -> None:
    """All domains have one key: the parts of a token's sums are added in the order of the ranks, wherever it is.
    Another number of ranks groups them otherwise, and so do experts that send their results."""
    first, second = (facts(2, rank, kv_domains=2) for rank in range(2))
    assert first == second
    assert (first.num_ranks, first.rank, first.share_of(1000), first.of_engine(100)) == (1, 0, 1000, 100)
    ranks = facts(2, 1)
    assert (ranks.num_ranks, ranks.rank, ranks.share_of(1000), ranks.of_engine(100)) == (2, 1, 500, 200)
    groups = (GroupShape("full", 0, 1), GroupShape("window", 8, 2))
    others = [
        facts(1), ranks, facts(4, kv_domains=4), facts(2, kv_domains=2, enable_expert_parallel=True),
        facts(2, kv_domains=2, enable_expert_parallel=True, all2all_backend="allgather_reducescatter"),
        facts(2, groups=groups, kv_domains=2),
    ]  # fmt: skip
    assert len({each.model_key for each in (first, *others)}) == 1 + len(others)

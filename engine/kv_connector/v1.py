"""`KVConnectorBase_V1`: the names with which vLLM's connectors are written, so that one of them runs here after a
change of imports.

A subclass is itself a connector: `--kv-connector module:Class,option=value`. Its two roles are the two halves. The core
half is called by `v1_core.py`, the worker half by `v1_worker.py`, which show it pagewire's plans as steps of vLLM's
scheduler: the head of `v1_core.py` says how. `v1_meta.py` carries its metadata from one to the other.

The names and the meanings of fields are vLLM's; fields that nothing here can fill are left out, so that a connector
that needs one of them fails at once and not silently. docs/extending.md lists what differs.
"""

from ..core.kv_connector import CoreConnector
from .base import ConnectorFacts, Options, WorkerConnector
from .v1_names import (
    AttentionLayer,
    AttentionMetadata,
    CacheConfig,
    CachedRequestData,
    ForwardContext,
    KVCacheBlocks,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVTransferConfig,
    MultiModalFeature,
    NewRequestData,
    ParallelConfig,
    Request,
    SchedulerOutput,
    V1Connector,
    VllmConfig,
)

__all__ = [
    "AttentionLayer",
    "AttentionMetadata",
    "CacheConfig",
    "CachedRequestData",
    "ForwardContext",
    "KVCacheBlocks",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVTransferConfig",
    "MultiModalFeature",
    "NewRequestData",
    "ParallelConfig",
    "Request",
    "SchedulerOutput",
    "VllmConfig",
]


class KVConnectorBase_V1(V1Connector):
    """A connector for models with one group of full attention."""

    @classmethod
    def core(cls, options: Options, facts: ConnectorFacts) -> CoreConnector:
        from .v1_core import V1Core

        return V1Core(cls(_config(cls.__name__, options, facts), KVConnectorRole.SCHEDULER, None), facts)

    @classmethod
    def worker(cls, options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .v1_worker import V1Worker  # needs torch

        return V1Worker(cls(_config(cls.__name__, options, facts), KVConnectorRole.WORKER, None))


def _config(name: str, options: Options, facts: ConnectorFacts) -> VllmConfig:
    return VllmConfig(
        kv_transfer_config=KVTransferConfig(kv_connector=name, kv_connector_extra_config=dict(options)),
        cache_config=CacheConfig(facts.block_size),
        parallel_config=ParallelConfig(rank=facts.rank, world_size=facts.num_ranks),
    )

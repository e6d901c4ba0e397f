"""The interface of vLLM's connectors: what `v1_core.py` and `v1_worker.py` call, and what is handed to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ..core.kv_connector import KvRequest

if TYPE_CHECKING:
    from torch import Tensor


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 (vLLM's has no methods either)
    """What the scheduler's half tells the worker's about a step. Subclasses are dataclasses with annotated fields, of
    plain values, dataclasses and tensors."""


class KVTransferConfig(Struct, frozen=True, kw_only=True):
    kv_connector: str  # name of the class
    kv_connector_extra_config: dict[str, str]  # the options of the command line
    kv_role: str = "kv_both"
    is_kv_producer: bool = True
    is_kv_consumer: bool = True

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)


class CacheConfig(Struct, frozen=True):
    block_size: int  # positions


class ParallelConfig(Struct, frozen=True, kw_only=True):
    rank: int  # of a worker's half; 0 of the scheduler's
    world_size: int


class VllmConfig(Struct, frozen=True, kw_only=True):
    kv_transfer_config: KVTransferConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig


class MultiModalFeature(Struct, frozen=True):
    """What else than its tokens the KV of a request depends on."""

    identifier: str


class Request:
    """A request. Its values are those of the moment."""

    def __init__(self, request: KvRequest, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self.request_id = str(request.rid)
        self.kv_transfer_params: dict[str, Any] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.ids[: self.num_prompt_tokens].tolist()

    @property
    def all_token_ids(self) -> list[int]:
        """The prompt, and output that is known."""
        return self._request.ids.tolist()

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self._request.ids)

    @property
    def num_computed_tokens(self) -> int:
        return self._request.num_computed

    @property
    def block_hashes(self) -> list[bytes]:
        """Keys of its full blocks: 32 bytes each, for the model, the owner's salt and all tokens before."""
        return list(self._request.block_keys(len(self._request.ids) // self._block_size, self._block_size))

    @property
    def cache_salt(self) -> str:
        """Stands for the model and the owner of the request. Requests share KV only if theirs are equal."""
        return self._request.root.hex()

    @property
    def mm_features(self) -> list[MultiModalFeature]:
        """One, which stands for the model and the owner: what a connector derives from tokens and these is safe."""
        return [MultiModalFeature(self.cache_salt)]


class KVCacheBlocks:
    """The block table of a request."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._block_ids = list(block_ids)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._block_ids,)


class NewRequestData(Struct, frozen=True, kw_only=True):
    req_id: str
    prompt_token_ids: list[int]
    mm_features: list[MultiModalFeature]
    block_ids: tuple[list[int], ...]  # of the only group
    num_computed_tokens: int  # before this step


class CachedRequestData(Struct, frozen=True, kw_only=True):
    """Columns of requests that an earlier step has shown."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]  # before this step


class SchedulerOutput(Struct, frozen=True, kw_only=True):
    """A step. After it, the KV of `num_computed_tokens` and `num_scheduled_tokens` positions of a request is there."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]  # since the step before


class KVConnectorOutput(Struct, frozen=True, kw_only=True):
    """What the worker's half has reported."""

    finished_sending: set[str]
    finished_recving: set[str]
    invalid_block_ids: set[int]


class AttentionMetadata(Struct, frozen=True):
    """Of a layer. It says nothing: no connector of one group needs it."""


class AttentionLayer(Struct, frozen=True):
    kv_cache: Tensor  # see `V1Connector.register_kv_caches`


class ForwardContext(Struct, frozen=True, kw_only=True):
    no_compile_layers: dict[str, AttentionLayer]
    attn_metadata: dict[str, AttentionMetadata]


class V1Connector(ABC):
    """One of the two halves; which one is its role."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: object = None) -> None:
        """kv_cache_config: always None."""
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    # ── both halves ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    def shutdown(self) -> None:  # noqa: B027 (an optional part of the interface, as two more)
        """The engine ends."""

    # ── the worker's half ────────────────────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Called once. kv_caches: by layer, [blocks, heads, positions, 2, head_dim] with keys and values in the fourth
        dimension; for MLA [blocks, 1, positions, dim]. They are views of shared memory: index blocks, because
        `reshape` would write to a copy, and is refused."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "metadata is bound only during a step"
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins the loads of the step."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for the loads of a layer that are not asynchronous."""

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Begins to save what the step has computed of a layer."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Waits until the blocks of the step may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(ended requests whose blocks are no longer needed, requests whose asynchronous load is over)."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be filled, each named once."""
        return set()

    # ── the scheduler's half ─────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond `num_computed_tokens` that it could load, whether asynchronously). None: ask again."""

    @abstractmethod
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has these blocks, of which the last hold what is to be loaded."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker's half is to do in this step."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """What the worker's half has reported."""

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks stay until `get_finished` names it, parameters for the answer, which are dropped)."""
        return False, None

    def take_events(self) -> Iterable[object]:
        """Not asked for: routers are told nothing of such a connector's KV."""
        return ()

    def reset_cache(self) -> bool | None:
        """The worker was replaced: what only its memory held is lost."""
        return None

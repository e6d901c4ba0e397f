"""A connector with vLLM's names: the KV of whole prompts in a folder, a file for each layer.

    PYTHONPATH=docs/examples pagewire serve MODEL --kv-connector v1_folder:FolderConnector,shared_storage_path=FOLDER

It has the shape of vLLM's example of a shared storage. The scheduler's half looks for a folder that stands for the
prompt; the worker's half writes layers into it and reads them into slots. A longer prompt with the same beginning finds
nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.engine.kv_connector.v1 import (
    AttentionMetadata,
    ForwardContext,
    KVCacheBlocks,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    MultiModalFeature,
    Request,
    SchedulerOutput,
    VllmConfig,
)


@dataclass
class Transfer:
    """The KV of one prompt."""

    folder: str
    slots: torch.Tensor  # int64 [positions]: block · block_size + offset
    is_store: bool


@dataclass
class FolderMetadata(KVConnectorMetadata):
    transfers: list[Transfer] = field(default_factory=list)


class FolderConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: object = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._rank = vllm_config.parallel_config.rank
        self._root = Path(self._kv_transfer_config.get_from_extra_config("shared_storage_path", tempfile.gettempdir()))
        self._to_load: dict[str, Request] = {}
        self._unfinished: dict[Path, Path] = {}  # folder that is being written → its place

    # ── the scheduler's half ─────────────────────────────────────────────────────────────────────────────────────────

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        prompt = request.prompt_token_ids
        if not (self._folder(prompt, request.mm_features) / "0").exists():
            return 0, False
        return self._num_kept(prompt) - num_computed_tokens, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._to_load[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FolderMetadata:
        metadata = FolderMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            is_store = self._to_load.pop(new.req_id, None) is None
            folder = self._folder(new.prompt_token_ids, new.mm_features)
            if self._num_kept(new.prompt_token_ids) and not (is_store and (folder / "0").exists()):
                slots = self._slots(new.block_ids[0], self._num_kept(new.prompt_token_ids))
                metadata.transfers.append(Transfer(str(folder), slots, is_store))
        assert not self._to_load, "every load is of a request that the step shows"
        return metadata

    def _num_kept(self, prompt: Sequence[int]) -> int:
        """Whole blocks of a prompt, which leave a position to compute."""
        return (len(prompt) - 1) // self._block_size * self._block_size

    def _slots(self, block_ids: Sequence[int], num: int) -> Tensor:
        offsets = torch.arange(self._block_size)
        return (torch.tensor(block_ids)[:, None] * self._block_size + offsets).flatten()[:num]

    def _folder(self, prompt: Sequence[int], features: Iterable[MultiModalFeature]) -> Path:
        ids = torch.tensor(prompt[: self._num_kept(prompt)], dtype=torch.int64).numpy().tobytes()
        digest = hashlib.sha256(ids + "|".join(feature.identifier for feature in features).encode())
        return self._root / digest.hexdigest()

    # ── the worker's half ────────────────────────────────────────────────────────────────────────────────────────────

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for transfer in self._transfers():
            if transfer.is_store:
                continue
            for name, layer in forward_context.no_compile_layers.items():
                kv = load_file(Path(transfer.folder, str(self._rank), f"{name}.safetensors"))["kv"]
                blocks, offsets = transfer.slots // self._block_size, transfer.slots % self._block_size
                layer.kv_cache[blocks, :, offsets] = kv.to(layer.kv_cache.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: every layer is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        for transfer in self._transfers():
            if not transfer.is_store:
                continue
            part = Path(f"{transfer.folder}.{os.getpid()}.part")
            part.mkdir(parents=True, exist_ok=True)
            self._unfinished[part] = Path(transfer.folder, str(self._rank))
            blocks, offsets = transfer.slots // self._block_size, transfer.slots % self._block_size
            save_file({"kv": kv_layer[blocks, :, offsets].cpu().contiguous()}, part / f"{layer_name}.safetensors")

    def wait_for_save(self) -> None:
        """Gives folders the names under which they are found; a folder for each rank."""
        for part, whole in self._unfinished.items():
            whole.parent.mkdir(exist_ok=True)
            try:
                part.rename(whole)
            except OSError:  # another engine was first
                shutil.rmtree(part)
        self._unfinished.clear()

    def _transfers(self) -> list[Transfer]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FolderMetadata)
        return metadata.transfers

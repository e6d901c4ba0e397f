"""Each rank loads the shards of the checkpoint that it computes with."""

from itertools import pairwise

import checkpoints
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.models import registry
from pagewire.engine.parallel import shard
from pagewire.engine.weights.loader import load_weights
from pagewire.engine.weights.mapping import checkpoint_targets
from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import ConfigError
from pagewire.kernels.ops import reference_ops


class Rank:
    """A rank that never communicates: enough to build and load its part of a model."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _load(folder, rank, size):
    spec, ops = read_spec(folder), reference_ops()
    float32, cpu = torch.float32, torch.device("cpu")
    model = registry.build_native(
        spec, max_len=8, dtype=float32, weight_dtype=float32, device=cpu, group=Rank(rank, size), ops=ops
    )
    registry.allocate(model, cpu)
    parameters = dict(model.named_parameters())
    with CheckpointReader(folder) as reader:
        targets = checkpoint_targets(parameters, model.fused, model.cuts, model.renamed)
        load_weights(reader, parameters, targets, redundant=model.redundant)
    return parameters, targets


@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_shards_of_all_ranks_make_the_whole_checkpoint(kind, size, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    tensors = load_file(folder / "model.safetensors")
    loaded = [_load(folder, rank, size) for rank in range(size)]
    for name, tensor in tensors.items():
        if name not in loaded[0][1]:
            continue
        parts = []
        for parameters, targets in loaded:
            target = targets[name]
            parameter = parameters[target.parameter]
            if target.rows is not None:
                rows = parameter.flatten(0, 1) if parameter.dim() == 3 else parameter
                parameter = rows[slice(*target.rows)]
            parts.append((parameter, target.cut))
        cut = parts[0][1]
        if cut is None:
            assert all(torch.equal(part, tensor) for part, _ in parts), name
        elif cut.dim >= tensor.dim():
            assert torch.equal(torch.stack([part for part, _ in parts]).sum(0), tensor), "the bias is added once"
        else:
            shards = {}
            for part, cut in parts:
                shards[cut.first] = part  # with more ranks than key/value heads, several hold the same head
            assert torch.equal(torch.cat([shards[first] for first in sorted(shards)], cut.dim), tensor), name


def test_parts_are_in_order_and_complete():
    for num, size in ((320, 4), (5, 2), (7, 3), (151936, 8)):
        parts = [shard.part(num, rank, size) for rank in range(size)]
        assert parts[0][0] == 0 and parts[-1][1] == num
        assert all(a[1] == b[0] for a, b in pairwise(parts))


def test_models_that_cannot_be_divided_evenly_are_refused(tmp_path):
    spec = read_spec(checkpoints.make_checkpoint(tmp_path, "qwen3"))
    for size in (1, 2, 4):
        shard.check(spec, size)
    for size, changes, why in (
        (3, {}, "4 attention heads"),
        (8, {}, "4 attention heads"),
        (4, {"intermediate_size": 94}, "94 feed-forward columns"),
        (4, {"num_heads": 12, "num_kv_heads": 3}, "3 key/value heads: one must divide the other"),
        (4, {"vocab_size": 6}, "the last of 4 ranks would get none of the model's 6 tokens"),
    ):
        with pytest.raises(ConfigError, match=why):
            shard.check(structs.replace(spec, **changes), size)
    spec = read_spec(checkpoints.make_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=46))
    shard.check(spec, 2)
    with pytest.raises(ConfigError, match="46 feed-forward columns cannot be divided evenly"):
        shard.check(spec, 4)

"""Which parameter a checkpoint's tensor is loaded into."""

from pagewire.engine.parallel.shard import Cut
from pagewire.engine.weights.mapping import Target, checkpoint_targets


def test_targets_of_fused_parameters():
    fused = {"ab_proj": (("a_proj", 2), ("b_proj", 3))}
    assert checkpoint_targets(["x.ab_proj.weight", "x.ab_proj.bias", "y.weight"], fused, {}) == {
        "x.a_proj.weight": Target("x.ab_proj.weight", (0, 2)),
        "x.b_proj.weight": Target("x.ab_proj.weight", (2, 5)),
        "x.a_proj.bias": Target("x.ab_proj.bias", (0, 2)),
        "x.b_proj.bias": Target("x.ab_proj.bias", (2, 5)),
        "y.weight": Target("y.weight"),
    }


def test_targets_of_experts_are_renamed_and_cut():
    fused = {"up": (("experts.0.w", 2), ("experts.1.w", 2))}
    parameters, cut = ["x.mlp.up", "x.mlp.gate.weight"], Cut(0, 2, 4, 4)
    assert checkpoint_targets(parameters, fused, {"up": cut}, {"mlp": "moe"}) == {
        "x.moe.experts.0.w.weight": Target("x.mlp.up", (0, 2), cut),
        "x.moe.experts.1.w.weight": Target("x.mlp.up", (2, 4), cut),
        "x.moe.gate.weight": Target("x.mlp.gate.weight"),
    }

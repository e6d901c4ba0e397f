"""The reference of recurrent mixers against transformers' modules, with sequences that are cut into several steps."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from mixer_cases import CASES
from state_pages import StatePages

from pagewire.kernels import reference_scans as scans
from pagewire.kernels.states import StateRows, grouped

TOKENS = 75  # more than a chunk of transformers' scans
CUTS = [[], [1, 2, 40], [64], [7, 71]]


class Steps:
    """The states of a sequence from step to step."""

    def __init__(self):
        self.pages = {}
        self.count = 0
        self.is_first = True

    def at(self, name, *shape):
        """Rows and tiles of the step for one of a layer's states, whose first dimension counts units."""
        if name not in self.pages:
            pages = StatePages(shape[0], 4 * torch.Size(shape[1:]).numel(), k=min(2, shape[0]))
            self.pages[name] = pages, pages.take()
        pages, own = self.pages[name]
        return StateRows.of(pages.memory, [self.count], [pages.none if self.is_first else own], [own]), pages.tiles


def module(path, name, config, **fields):
    """A module of transformers with random weights, layer 0 of a tiny model."""
    family = import_module(f"transformers.models.{path}.modeling_{path}")
    configs = import_module(f"transformers.models.{path}.configuration_{path}")
    made = getattr(family, name)(getattr(configs, config)(**fields), 0).float().eval()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            weight.copy_(torch.randn(weight.shape) * (0.5 if weight.dim() < 2 else weight.shape[-1] ** -0.5))
            if "norm" in key:
                weight.add_(1)
    return made


def convolved(mixer, x, steps, act="silu"):
    conv = mixer.conv1d if hasattr(mixer, "conv1d") else mixer.conv
    weight = conv.weight[:, 0].t().contiguous()
    return scans.conv(x, weight, conv.bias, act, *steps.at("conv", 1, weight.shape[0] - 1, weight.shape[1]))


def gated_delta(mixer, x, steps, q, k, v, z, b, a):
    heads, key_heads, dim, values = mixer.num_v_heads, mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim
    mixed = convolved(mixer, torch.cat((q, k, v), -1), steps)
    q, k, v = mixed.split((key_heads * dim, key_heads * dim, heads * values), -1)
    y = scans.scan_delta(
        q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)), v.unflatten(1, (-1, values)), b, a,
        -mixer.A_log.exp(), mixer.dt_bias, *steps.at("scan", heads, dim, values),
    )  # fmt: skip
    norm = mixer.norm
    return mixer.out_proj(
        scans.gated_norm(y.flatten(1), z, norm.weight, values, norm.variance_epsilon, "silu", gate_first=False)
    )


def qwen3_next(mixer, x, steps):
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x[None]), mixer.in_proj_ba(x[None]))
    q, k, v, z, b, a = (part[0].flatten(1) for part in parts)
    return gated_delta(mixer, x, steps, q, k, v, z, b, a)


def qwen3_5(mixer, x, steps):
    q, k, v = mixer.in_proj_qkv(x).split((mixer.key_dim, mixer.key_dim, mixer.value_dim), -1)
    return gated_delta(mixer, x, steps, q, k, v, mixer.in_proj_z(x), mixer.in_proj_b(x), mixer.in_proj_a(x))


def kimi(mixer, x, steps):
    heads, dim = mixer.num_heads, mixer.head_dim
    mixed = convolved(mixer, torch.cat((mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)), -1), steps)
    q, k, v = (part.unflatten(1, (heads, dim)) for part in mixed.chunk(3, -1))
    gate = mixer.forget_gate
    y = scans.scan_delta(
        q, k, v, mixer.b_proj(x), gate.f_b_proj(gate.f_a_proj(x)).unflatten(1, (heads, dim)),
        -gate.A_log.flatten().exp(), gate.dt_bias.view(heads, dim), *steps.at("scan", heads, dim, dim),
    )  # fmt: skip
    z, norm = mixer.g_b_proj(mixer.g_a_proj(x)), mixer.o_norm
    return mixer.o_proj(
        scans.gated_norm(y.flatten(1), z, norm.weight, dim, norm.variance_epsilon, "sigmoid", gate_first=False)
    )


def mamba1(mixer, x, steps):
    n, rank = mixer.ssm_state_size, mixer.time_step_rank
    x, z = mixer.in_proj(x).chunk(2, -1)
    x = convolved(mixer, x, steps)
    dt, b, c = mixer.x_proj(x).split((rank, n, n), -1)
    if hasattr(mixer, "dt_layernorm"):
        dt, b, c = mixer.dt_layernorm(dt), mixer.b_layernorm(b), mixer.c_layernorm(c)
    a = grouped(-mixer.A_log.exp())
    dt, bias = F.linear(dt, mixer.dt_proj.weight), mixer.dt_proj.bias
    y = scans.scan_mamba1(x, dt, b, c, a, bias, mixer.D, *steps.at("scan", *a.shape))
    return mixer.out_proj(scans.gated_norm(y, z, None, 0, 0.0, "silu", gate_first=True))


def mamba2(mixer, x, steps):
    heads, dim, n, groups = mixer.num_heads, mixer.head_dim, mixer.ssm_state_size, mixer.n_groups
    if hasattr(mixer, "mup_vector"):
        x = x * mixer.ssm_in_multiplier
    mixed = mixer.in_proj(x) * getattr(mixer, "mup_vector", torch.ones(1))[..., :].flatten()
    z, xbc, dt = mixed.split((heads * dim, mixer.conv_dim, heads), -1)
    x, b, c = convolved(mixer, xbc, steps).split((heads * dim, groups * n, groups * n), -1)
    y = scans.scan_mamba2(
        x.unflatten(1, (heads, dim)), b.unflatten(1, (groups, n)), c.unflatten(1, (groups, n)), dt,
        -mixer.A_log.exp(), mixer.dt_bias, mixer.D, mixer.time_step_limit, *steps.at("scan", heads, n, dim),
    ).flatten(1)  # fmt: skip
    norm = mixer.norm
    if isinstance(norm, torch.nn.Identity):
        return mixer.out_proj(scans.gated_norm(y, z, None, 0, 0.0, "silu", gate_first=True))
    first = not getattr(norm, "norm_before_gate", False)
    return mixer.out_proj(
        scans.gated_norm(y, z, norm.weight, heads * dim // groups, norm.variance_epsilon, "silu", gate_first=first)
    )


def short_conv(mixer, x, steps):
    b, c, x = mixer.in_proj(x).chunk(3, -1)
    return mixer.out_proj(c * convolved(mixer, b * x, steps, act="none"))


def lightning(mixer, x, steps):
    heads, dim = mixer.num_attention_heads, mixer.head_dim
    q, k, v = F.silu(mixer.qkv_proj(x)).unflatten(1, (heads, 3 * dim)).chunk(3, -1)
    y = scans.scan_lightning(q, k, v, torch.exp(-mixer.slope_rate.flatten()), *steps.at("scan", heads, dim, dim))
    norm, z = mixer.norm, mixer.output_gate(x)
    return mixer.out_proj(
        scans.gated_norm(y.flatten(1), z, norm.weight, heads * dim, norm.variance_epsilon, "sigmoid", gate_first=False)
    )


DELTA = {
    "hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention"], "num_hidden_layers": 1,
}  # fmt: skip
MAMBA2 = {
    "hidden_size": 24, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 10, "mamba_n_groups": 2,
    "mamba_chunk_size": 16, "num_hidden_layers": 1, "mamba_expand": 2,
}  # fmt: skip
FALCON = MAMBA2 | {"mamba_d_ssm": 48, "ssm_in_multiplier": 0.7}
MODULES = {
    "Qwen3-Next": (qwen3_next, "qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", DELTA),
    "Qwen3.5": (qwen3_5, "qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", DELTA),
    "Kimi-Linear": (
        kimi, "kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig",
        {"hidden_size": 24, "linear_num_heads": 3, "linear_head_dim": 10, "num_hidden_layers": 1,
         "layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]},
    ),
    "Mamba": (
        mamba1, "mamba", "MambaMixer", "MambaConfig",
        {"hidden_size": 20, "state_size": 6, "num_hidden_layers": 1, "time_step_rank": 3},
    ),
    "Jamba": (
        mamba1, "jamba", "JambaMambaMixer", "JambaConfig",
        {"hidden_size": 16, "mamba_d_state": 16, "num_hidden_layers": 1, "mamba_dt_rank": 4},
    ),
    "Mamba 2": (
        mamba2, "mamba2", "Mamba2Mixer", "Mamba2Config",
        {"hidden_size": 24, "num_heads": 6, "head_dim": 8, "state_size": 10, "n_groups": 2, "chunk_size": 16,
         "num_hidden_layers": 1, "time_step_limit": (0.2, 1.1)},
    ),
    "Granite-H": (mamba2, "granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridConfig", MAMBA2),
    "Bamba": (mamba2, "bamba", "BambaMixer", "BambaConfig", MAMBA2),
    "Nemotron-H": (
        mamba2, "nemotron_h", "NemotronHMamba2Mixer", "NemotronHConfig",
        {"hidden_size": 24, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 10, "n_groups": 3,
         "chunk_size": 16, "layers_block_type": ["mamba"], "time_step_min": 0.4},
    ),
    "Falcon-H1": (mamba2, "falcon_h1", "FalconH1Mixer", "FalconH1Config", FALCON),
    "Falcon-H1, normed": (
        mamba2, "falcon_h1", "FalconH1Mixer", "FalconH1Config", FALCON | {"mamba_rms_norm": True},
    ),
    "Falcon-H1, gate first": (
        mamba2, "falcon_h1", "FalconH1Mixer", "FalconH1Config",
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "LFM2": (
        short_conv, "lfm2", "Lfm2ShortConv", "Lfm2Config",
        {"hidden_size": 20, "conv_bias": True, "num_hidden_layers": 1, "layer_types": ["conv"]},
    ),
    "MiniMax-01": (
        lightning, "minimax", "MiniMaxLightningAttention", "MiniMaxConfig",
        {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 6, "num_hidden_layers": 3, "block_size": 16,
         "layer_types": ["linear_attention"] * 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MODULES)
def test_a_mixer_equals_that_of_transformers(family):
    torch.manual_seed(0)
    run, path, name, config, fields = MODULES[family]
    mixer = module(path, name, config, **fields)
    if path == "falcon_h1":
        mixer.mup_vector = torch.rand(1, 1, mixer.in_proj.out_features) + 0.5
    x = torch.randn(TOKENS, fields["hidden_size"])
    with torch.inference_mode():
        extra = (None, None) if path == "minimax" else ()
        expected = mixer(x[None], *extra)
        expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
        results = []
        for cuts in CUTS:
            steps, parts = Steps(), []
            for part in x.tensor_split(cuts):
                steps.count = len(part)
                parts.append(run(mixer, part, steps))
                steps.is_first = False
            results.append(torch.cat(parts))
    assert expected.abs().max() > 0.1
    for result in results:
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)


def test_the_reference_has_the_same_bits_for_any_cut():
    for name, make in CASES.items():
        torch.manual_seed(0)
        case = make()
        x, outs = torch.randn(20, case.width), []
        for cuts in ([], [1, 2, 9]):
            steps, parts = Steps(), []
            for part in x.tensor_split(cuts):
                steps.count = len(part)
                parts.append(case.run(scans, part, *steps.at("state", case.units, *case.unit_shape)))
                steps.is_first = False
            outs.append(torch.cat(parts))
        assert torch.equal(*outs), name

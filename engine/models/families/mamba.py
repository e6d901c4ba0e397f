"""Mamba (arXiv 2312.00752), Falcon Mamba, and Mamba 2 (arXiv 2405.21060): one mixer a layer, and no attention."""

from collections.abc import Callable

from ..description import Block, Branch, Decoder, Mamba1, Mamba2, Norm, Sublayer
from ..fields import Fields
from ..pieces import decoder, limits, mamba1, mamba2, mixer_activation, rms
from ..registry import family


@family("MambaForCausalLM")
def mamba(c: Fields) -> Decoder:
    return _mamba1(c, None)


@family("FalconMambaForCausalLM")
def falcon_mamba(c: Fields) -> Decoder:
    """Time steps, B and C are normed, without weights."""
    return _mamba1(c, c.number("mixer_rms_eps", 1e-6))


@family("Mamba2ForCausalLM")
def mamba_2(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("layer_norm_epsilon", 1e-5)
    heads, dim, groups = c.size("num_heads", default=128), c.size("head_dim", default=64), c.size("n_groups", default=8)
    c.divided("heads", heads, "groups", groups)
    sizes = heads, dim, c.size("state_size", default=128), groups, c.size("conv_kernel", default=4)

    def mixer(at: str) -> Mamba2:
        norm = rms(at + "norm", heads * dim // groups, eps, total=heads * dim)
        bias, conv_bias = c.flag("use_bias", False), c.flag("use_conv_bias", True)
        return mamba2(at, h, *sizes, norm=norm, bias=bias, conv_bias=conv_bias, limits=limits(c))

    return _decoder(c, mixer, tied=False)


def _mamba1(c: Fields, norm_eps: float | None) -> Decoder:
    """norm_eps: of time steps, B and C; None: they are not normed."""
    h, n = c.size("hidden_size"), c.size("state_size", default=16)
    rank = c.size("time_step_rank") if c.raw.get("time_step_rank") not in (None, "auto") else -(-h // 16)
    channels, taps = c.size("expand", default=2) * h, c.size("conv_kernel", default=4)
    bias, conv_bias = c.flag("use_bias", False), c.flag("use_conv_bias", True)
    norms = (None, None, None) if norm_eps is None else tuple(Norm(size, eps=norm_eps) for size in (rank, n, n))

    def mixer(at: str) -> Mamba1:
        return mamba1(at, h, channels, n, rank, taps, norms=norms, bias=bias, conv_bias=conv_bias)

    return _decoder(c, mixer, tied=True)


def _decoder(c: Fields, mixer: Callable[[str], Mamba1 | Mamba2], *, tied: bool) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("layer_norm_epsilon", 1e-5)
    mixer_activation(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return Block((Sublayer((Branch(mixer(at + "mixer.")),), rms(at + "norm", h, eps)),))

    prefixes = "backbone.", "model.", ""
    return decoder(c, block, rms("norm_f", h, eps), tied=tied, name="embeddings", prefixes=prefixes)

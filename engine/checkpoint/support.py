"""Models that pagewire cannot serve, as far as config.json shows it: rejected before any process starts or weight is
read.

What config.json does not show is found by running the model (`rehearsal.py`). Imports without torch.
"""

from collections.abc import Iterator, Mapping

from ...errors import UnsupportedModel
from ..models.families import pages

Config = Mapping[str, object]

_MODALITIES = {"vision": "images", "image": "images", "audio": "audio", "speech": "audio", "video": "video"}

ENCODER_DECODER = "it is an encoder-decoder model, and pagewire serves decoder-only models"
_UNKNOWN = "and pagewire has no description of this family"
_RECURRENT = f"it has layers with a recurrent state ({{}}), {_UNKNOWN}"
_CHUNKED = f"it uses chunked attention, {_UNKNOWN}"
_SINKS = f"it uses attention sinks, {_UNKNOWN}"
_ALIBI = f"it adds position biases (ALiBi) to its attention scores, {_UNKNOWN}"
_MLA = f"it uses multi-head latent attention (MLA), {_UNKNOWN}"
_SIZES = f"its keys have {{}} numbers per head and its values {{}}, {_UNKNOWN}"
_SPARSE = "it uses sparse attention (an indexer chooses which keys a token reads), which pagewire does not compute"
_SHARED = f"its last {{}} layers share the keys and values of earlier ones, {_UNKNOWN}"
_TWO_SIZES = f"its layers have heads of different sizes ({{}} and {{}}), {_UNKNOWN}"

# model_type → the reason, where the config does not show it or has fields of its own for it.
_BY_TYPE = {
    "gpt_oss": _SINKS,
    "flint": _SINKS,
    "granitemoe_swa": _SINKS,
    "deepseek_v4": _SPARSE,
    **{
        kind: _RECURRENT.format(what)
        for what, kinds in {
            "Mamba": (
                "zamba",
            ),
            "linear attention": ("bailing_hybrid", "olmo_hybrid"),
            "RWKV": ("rwkv",),
            "xLSTM": ("xlstm",),
            "RG-LRU": ("recurrent_gemma",),
        }.items()
        for kind in kinds
    },
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5",
            "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
            "switch_transformers", "t5", "t5gemma", "t5gemma2", "trocr", "udop", "umt5", "whisper",
        ),
        ENCODER_DECODER,
    ),
}  # fmt: skip

# Values in layer_types, besides full_attention and sliding_attention → the reason.
_BY_LAYER = {
    "chunked_attention": _CHUNKED,
    "minimax_m3_sparse": _SPARSE,
    "linear_attention": _RECURRENT.format("linear attention"),
    "mamba": _RECURRENT.format("Mamba"),
    "mamba2": _RECURRENT.format("Mamba"),
    "conv": _RECURRENT.format("short convolutions"),
    "recurrent": _RECURRENT.format("RG-LRU"),
}


def check_architecture(config: Config, architecture: str, *, generates: bool) -> None:
    """config: config.json. generates: the model is to generate text with paged attention. Raises UnsupportedModel."""
    if architecture in pages():
        return
    if (modalities := _modalities(config)) is not None:
        reason = f"it is a multimodal model ({modalities}), and pagewire serves checkpoints of text models only"
        raise UnsupportedModel(architecture, reason)
    reasons = list(dict.fromkeys(_reasons(config))) if generates else []
    if reasons:
        raise UnsupportedModel(architecture, "; ".join(reasons))


def _modalities(config: Config) -> str | None:
    """The inputs that a multimodal wrapper takes; None: it is no wrapper."""
    parts = {name.removesuffix("_config") for name, value in config.items() if isinstance(value, dict)}
    words = {word for part in parts for word in part.split("_")}
    if not words & _MODALITIES.keys() and not parts & {"text", "thinker", "llm"}:
        return None
    words |= {name.split("_")[0] for name in config if name.endswith(("_token_id", "_token_index"))}
    found = sorted({_MODALITIES[word] for word in words & _MODALITIES.keys()}) or ["more"]
    return ", ".join(["text", *found[:-1]]) + f" and {found[-1]}"


def _reasons(config: Config) -> Iterator[str]:
    kind = str(config.get("model_type"))
    if config.get("is_encoder_decoder") is True:
        yield ENCODER_DECODER
    if kind in _BY_TYPE:
        yield _BY_TYPE[kind]
    layers = config.get("layer_types")
    for layer in layers if isinstance(layers, list) else ():
        if layer in _BY_LAYER:
            yield _BY_LAYER[layer]
    if config.get("kv_lora_rank"):
        yield _MLA
    else:
        keys, values = config.get("head_dim"), config.get("v_head_dim")
        if keys and values and keys != values:
            yield _SIZES.format(keys, values)
    if config.get("index_topk"):
        yield _SPARSE
    if config.get("num_kv_shared_layers"):
        yield _SHARED.format(config["num_kv_shared_layers"])
    sizes = {config.get("head_dim"), config.get("global_head_dim")}
    layers = config.get("per_layer_config")
    sizes |= {layer.get("head_dim") for layer in layers.values()} if isinstance(layers, dict) else set()
    if len(sizes - {None}) > 1:
        yield _TWO_SIZES.format(*sorted(map(str, sizes - {None})))
    if config.get("alibi") is True:
        yield _ALIBI

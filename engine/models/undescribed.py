"""What only a description can serve: transformers' model cannot compute it with pagewire's attention.

Read from the fields of a config, in the field's words, before any process starts. What fields do not show is found by
running the model (`executors/rehearsal.py`)."""

from collections.abc import Iterator

from .fields import Fields

_INPUTS = {"vision": "images", "image": "images", "audio": "audio", "speech": "audio", "video": "video"}
_TEXTS = {"text", "thinker", "llm"}  # parts of a config with the text model's fields

_STATE = "layers with a recurrent state ({})"
_SPARSE = "sparse attention (an indexer chooses which keys a token reads)"

_ORDINARY = frozenset({"full_attention", "sliding_attention", "attention"})
_LAYERS = {
    "chunked_attention": "chunked attention",
    "minimax_m3_sparse": _SPARSE,
    "linear_attention": _STATE.format("linear attention"),
    "mamba": _STATE.format("Mamba"),
    "mamba2": _STATE.format("Mamba"),
    "conv": _STATE.format("short convolutions"),
    "recurrent": _STATE.format("RG-LRU"),
}


def needs_description(c: Fields, *, generates: bool = True) -> str:
    """In words that follow "it has"; empty: nothing. c: of the whole config. generates: with paged attention; other
    models are encoders, which run as they are."""
    found = list(dict.fromkeys(_mechanisms(c, generates)))
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def _mechanisms(c: Fields, generates: bool) -> Iterator[str]:
    if inputs := _inputs(c):
        yield f"inputs other than text ({inputs})"
    if c.raw.get("is_encoder_decoder") is True:
        yield "an encoder beside its decoder (encoder-decoder model)"
    if not generates:
        return
    kinds = c.raw.get("layer_types")
    for kind in map(str, kinds if isinstance(kinds, list) else ()):
        if kind not in _ORDINARY:
            yield _LAYERS.get(kind, f"layers of the kind {kind!r}")
    keys, values = c.raw.get("head_dim"), c.raw.get("v_head_dim")
    if c.raw.get("kv_lora_rank"):
        yield "multi-head latent attention (MLA)"
    elif keys and values and keys != values:
        yield f"keys of {keys} numbers per head and values of {values}"
    if c.raw.get("index_topk"):
        yield _SPARSE
    if c.raw.get("num_kv_shared_layers"):
        yield f"keys and values of earlier layers in its last {c.raw['num_kv_shared_layers']} (shared KV)"
    layers = c.raw.get("per_layer_config")
    each = [x.get("head_dim") for x in layers.values() if isinstance(x, dict)] if isinstance(layers, dict) else []
    if len(sizes := {str(size) for size in (keys, c.raw.get("global_head_dim"), *each) if size}) > 1:
        yield f"heads of different sizes ({' and '.join(sorted(sizes))})"
    if c.raw.get("alibi") is True:
        yield "position biases in its attention scores (ALiBi)"


def _inputs(c: Fields) -> str:
    """What a wrapper takes beside texts; empty: it is no wrapper."""
    parts = {name.removesuffix("_config") for name, value in c.raw.items() if isinstance(value, dict)}
    words = {word for part in parts for word in part.split("_")}
    if not words & _INPUTS.keys() and not parts & _TEXTS:
        return ""
    words |= {name.split("_")[0] for name in c.raw if name.endswith(("_token_id", "_token_index"))}
    return " and ".join(sorted({_INPUTS[word] for word in words & _INPUTS.keys()})) or "of unknown kinds"

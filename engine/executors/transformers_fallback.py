"""Decoder-only architectures that transformers supports, with our paged attention in place of its own.

The model is built from transformers' own classes (never from code in the checkpoint's folder). All rows of a step form
one sequence with explicit positions; the attention keeps them apart. transformers lets us supply it: every attention
layer calls `_attention`, which gets the step's backend as a keyword of the forward call.

What the paged attention cannot do is rejected at start with one sentence instead of computed wrongly later. `outline`
rehearses the model without weights (`rehearsal.py`), which shows how each layer calls attention and gives the shape of
the KV cache, and evaluates how far its masks reach (`masks.py`). After loading, the log-probabilities of two short
requests are compared with those of transformers' own attention. Undetected remains what a model does only with longer
contexts, in code of its own that its calls and masks do not show.

Imported only when such a model is loaded: transformers takes seconds to import.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from ...errors import CheckpointError, ConfigError, PagewireError, UnsupportedModel
from ...kernels import reference
from ..attention.base import AttentionBackend, AttentionParameters
from ..attention.kv_cache import KvShape
from ..checkpoint.purpose import refuse_own_code
from ..checkpoint.spec import ModelSpec
from ..models.fields import Fields
from ..models.undescribed import needs_description
from .encoder import first_line
from .masks import REACH, UNKNOWN, describe_mask
from .rehearsal import NUM_TOKENS, Call, Step, compare, rehearse

_NAME = "pagewire"
_ENCODER_DECODERS = {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
# Keywords that transformers passes to attention and that change nothing in a causal forward pass without dropout. Any
# other keyword may be a term that we do not compute.
_IDLE_KEYWORDS = {
    "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
}  # fmt: skip


def load_fallback(
    spec: ModelSpec, folder: Path, *, max_len: int, dtype: torch.dtype, device: torch.device, is_certain: bool
) -> tuple["TransformersModel", int]:
    """(the model with its weights, their bytes). Call `outline` first. is_certain: it has shown the shape of the KV.
    Raises ConfigError, CheckpointError."""
    # transformers is only partly typed.
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            folder,
            config=_config(spec, folder, max_len),
            dtype=dtype,
            attn_implementation=_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported in `info` like the rest
        )
    except PagewireError:
        raise
    except Exception as e:  # a wrong config can raise anything in transformers' model classes
        raise CheckpointError(f"{folder} cannot be loaded as {spec.architecture}: {first_line(e)}") from e
    for name, found, wanted in info["mismatched_keys"]:
        raise CheckpointError(
            f"{name} has the shape {list(found)} in the checkpoint, but config.json calls for {list(wanted)}."
        )
    for verb, keys in (("lacks", info["missing_keys"]), ("does not know", info["unexpected_keys"])):
        if keys:
            whose = "The checkpoint" if verb == "lacks" else spec.architecture
            shown = ", ".join(sorted(keys)[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise CheckpointError(f"{whose} {verb} {len(keys)} of the tensors of {folder}: {shown}.")
    model = model.to(device).eval().requires_grad_(False)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    prompts = _prompts(model.config)
    expected = _own_logits(model, prompts, "eager", spec.architecture)
    again = _own_logits(model, prompts, "sdpa", spec.architecture)
    served = TransformersModel(model, name=spec.architecture, dtype=dtype, device=device)
    steps = served.rehearse(prompts)
    if not is_certain:
        served.check_masks(max_len)
    num_layers = len(served.kv_shape.layers)
    compare(spec.architecture, steps, expected, again, dtype=dtype, num_layers=num_layers, max_len=max_len)
    return served, weights


def outline(spec: ModelSpec, folder: Path, *, num_numbers: int, max_len: int, dtype: torch.dtype) -> KvShape | None:
    """What is known of a model before memory is allocated and weights are read: that it can be served, and the shape of
    its KV. None: the layers read values, so only the weights can show it. num_numbers: values in the checkpoint's
    tensors. Raises ConfigError, CheckpointError."""
    transformers.AttentionInterface.register(_NAME, _attention)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its warnings are errors here, raised by `load_fallback`
    name = spec.architecture
    config = _config(spec, folder, max_len)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            # Of transformers' ways to compute experts, this one reads no values.
            model = auto.from_config(config, attn_implementation=_NAME, experts_implementation="batched_mm").eval()
    except Exception as e:  # a wrong config can raise anything in transformers' model classes
        raise CheckpointError(f"{folder} cannot be loaded as {name}: {first_line(e)}") from e
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 2 * num_numbers:  # tied weights may be stored once
        raise CheckpointError(
            f"The checkpoint holds {num_numbers:,} numbers, but config.json calls for {wanted:,} in {name}."
        )
    # Some models search the ids for padding, only to warn.
    model.base_model.warn_if_padding_and_no_attention_mask = lambda *_: None
    served = TransformersModel(model, name=name, dtype=dtype, device=torch.device("meta"))
    try:
        served.rehearse(_prompts(config))
        served.check_masks(max_len)
    except _NeedsNumbers:
        return None
    return served.kv_shape


class _NeedsNumbers(Exception):
    """A model without weights cannot run, because its layers read values."""


def _prompts(config: Any) -> Tensor:
    """Random token ids for a rehearsal, the same at every start."""
    most = int(config.get_text_config().vocab_size)
    return torch.randint(most, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(0))


def _own_logits(model: Any, prompts: Tensor, attention: str, name: str) -> Tensor:
    """The logits of one of transformers' own attention implementations: [2, NUM_TOKENS, vocab] float32."""
    model.set_attn_implementation(attention if attention == "eager" or model._supports_sdpa else "eager")
    try:
        with torch.inference_mode():
            output = model(input_ids=prompts.to(model.device), use_cache=False)
        return cast(Tensor, output.logits.float())
    except Exception as e:
        raise ConfigError(f"{name} does not run in transformers {transformers.__version__}: {first_line(e)}") from e
    finally:
        model.set_attn_implementation(_NAME)


class TransformersModel:
    """A `Model` computed by transformers with our paged attention."""

    def __init__(
        self, model: transformers.PreTrainedModel, *, name: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._body = model.base_model
        # With its body replaced, calling the whole model runs only what follows the body: scaling, head, softcap.
        self._replay = _Replay()
        setattr(model, model.base_model_prefix, self._replay)
        self._whole = model
        self._config = model.config
        self._name, self._dtype, self._device = name, dtype, device
        self.kv_shape = KvShape(layers=(), dtype=dtype)

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None
    ) -> Tensor:
        output = self._body(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{_KEYWORD: attention})
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._replay.hidden = hidden[None]
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._whole(input_ids=ids, use_cache=False).logits[0].float()
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return reference.greedy(self.logits(hidden))

    def rehearse(self, prompts: Tensor) -> list[Step]:
        """Runs the rehearsal and sets `kv_shape` from it."""
        num_layers = self._config.get_text_config().num_hidden_layers
        with self._trying():
            calls, steps = rehearse(self._name, num_layers, self._device, prompts, self._run)
        self.kv_shape = self._shape(calls)
        return steps

    def check_masks(self, max_len: int) -> None:
        """Compares the windows that are passed to attention with the masks that transformers' own attention would get,
        which show them for any length. Raises UnsupportedModel."""
        transformers.AttentionInterface.register(_MASKS, _note_mask)
        transformers.AttentionMaskInterface.register(_MASKS, describe_mask)
        ids = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device=self._device)
        found: list[tuple[int | None, int | None]] = []
        self._whole.set_attn_implementation(_MASKS)
        try:
            with self._trying():
                # With a padding mask, transformers does not look for several sequences packed into one.
                self._body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **{_KEYWORD: found})
        finally:
            self._whole.set_attn_implementation(_NAME)
        kinds = getattr(self._config, "layer_types", None) or ()
        for layer, (window, mask) in enumerate(found):
            if window is None and mask is None and "sliding_attention" in kinds[layer : layer + 1]:
                raise UnsupportedModel(self._name, f"its layer {layer} does not pass its window to its attention")
            if window != mask and min(window or max_len, mask or max_len) < max_len:
                has = "no window" if mask is None else f"a window of {mask} tokens"
                passed = "none" if window is None else f"one of {window} tokens"
                least = min(window or max_len, mask or max_len)
                raise UnsupportedModel(
                    self._name,
                    f"the mask of its layer {layer} has {has}, but attention gets {passed}; up to --max-model-len "
                    f"{least} that makes no difference",
                )

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Turns every error of a model under our attention into one sentence."""
        try:
            with torch.inference_mode():
                yield
        except ConfigError:
            raise
        except Exception as e:
            if self._device.type == "meta" and ("meta" in str(e) or isinstance(e, NotImplementedError)):
                raise _NeedsNumbers from e
            why = first_line(e).rstrip(".")
            raise UnsupportedModel(
                self._name, f"it does not run with another attention than transformers' own ({why})"
            ) from e

    def _run(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        return self.logits(self.hidden(ids, positions, attention))

    def _shape(self, calls: dict[int, Call]) -> KvShape:
        sizes = sorted({(call.num_kv_heads, call.head_dim) for call in calls.values()})
        if len(sizes) != 1:
            found = " and ".join(f"{heads} x {dim}" for heads, dim in sizes)
            raise UnsupportedModel(
                self._name,
                f"its layers have keys and values of different sizes ({found}), and pagewire's KV cache has one size "
                "for all layers",
            )
        ((num_kv_heads, head_dim),) = sizes
        return KvShape.uniform(num_layers=len(calls), kv_heads=num_kv_heads, head_dim=head_dim, dtype=self._dtype)


_KEYWORD = "pagewire_attention"
_MASKS = "pagewire-masks"


def _note_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Records the window that is passed to this layer's attention, and that of its mask."""
    found = cast(list[tuple[int | None, int | None]], kwargs[_KEYWORD])
    reach = None if attention_mask is None else getattr(attention_mask, REACH, UNKNOWN)
    if reach == UNKNOWN:
        raise UnsupportedModel(
            _architecture(module),
            "its attention masks are neither causal nor sliding windows, and pagewire knows no others",
        )
    found.append((sliding_window, reach))
    return torch.zeros_like(query).transpose(1, 2), None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface. query: [1, heads, tokens, dim] → [1, tokens, heads, dim]."""
    backend = cast(AttentionBackend | None, kwargs.get(_KEYWORD))
    if backend is None:
        raise UnsupportedModel(
            _architecture(module),
            f"it does not pass keywords on to its attention in transformers {transformers.__version__}, so pagewire's "
            "paged attention cannot be reached",
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedModel(
            _architecture(module),
            "its tokens see those that follow them (bidirectional attention), and pagewire generates with causal "
            "attention",
        )
    terms = sorted(term for term, value in kwargs.items() if value is not None and term not in _IDLE_KEYWORDS)
    terms = ["attention_mask"] * (attention_mask is not None) + [term for term in terms if term != _KEYWORD]
    if terms:
        what = "attention sinks" if terms == ["s_aux"] else f"terms that pagewire does not support ({', '.join(terms)})"
        raise UnsupportedModel(_architecture(module), f"it computes its attention scores with {what}")
    if key.shape != value.shape:
        raise UnsupportedModel(
            _architecture(module),
            f"its keys have {key.shape[-1]} numbers per head and its values {value.shape[-1]}, and pagewire's KV cache "
            "has one size for both",
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None or query.shape[0] != 1:
        raise UnsupportedModel(_architecture(module), "its calls of attention do not name the layer")
    out = backend.forward(
        cast(int, layer),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _parameters(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap),
    )
    return out[None], None


@cache
def _parameters(scale: float, window: int | None, softcap: float | None) -> AttentionParameters:
    """The same object for equal values, as backends expect of a layer."""
    return AttentionParameters(scale=scale, window=window, softcap=softcap)


def _architecture(module: nn.Module) -> str:
    """The architecture of the model that this attention belongs to."""
    names = getattr(getattr(module, "config", None), "architectures", None)
    return str(names[0]) if names else type(module).__name__


class _Hidden(MoeModelOutputWithPast):
    """Hidden states, and None for every other attribute of a body's output."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Replay(nn.Module):
    """Replaces a model's body and returns hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> "_Replay":
        """OPT and similar models call the decoder within the body."""
        return self

    def forward(self, *args: object, **kwargs: object) -> _Hidden:
        return _Hidden(last_hidden_state=self.hidden)


def _config(spec: ModelSpec, folder: Path, max_len: int) -> Any:
    """transformers' config of a model that can be served. Raises ConfigError with the reason if it cannot."""
    name = spec.architecture
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as e:
        refuse_own_code(folder, name)
        raise ConfigError(
            f"{name} is neither an architecture that pagewire describes nor one that the installed "
            f"transformers {transformers.__version__} knows."
        ) from e
    except Exception as e:  # transformers' config classes raise exceptions of many kinds
        raise ConfigError(f"transformers does not accept {folder / 'config.json'}: {first_line(e)}") from e
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    known = classes.get(type(config), None)
    layers = list(getattr(config, "layer_types", None) or ())  # of older files, transformers derives them
    has = needs_description(Fields({**config.to_dict(), "layer_types": layers}, folder / "config.json"))
    if not has and config.model_type in _ENCODER_DECODERS:
        has = "the decoder of an encoder-decoder model"
    elif not has and known is not None and known._is_stateful and not layers:
        has = "layers with a recurrent state"
    if has:
        raise UnsupportedModel(name, f"it has {has}, and {spec.why_not_described}")
    if known is None or known.__name__ != name:
        raise UnsupportedModel(name, "it is not a decoder-only language model; pagewire generates text only with those")
    if not known._supports_attention_backend:
        raise UnsupportedModel(
            name,
            f"it computes attention in code of its own in transformers {transformers.__version__}, which pagewire's "
            "paged attention cannot replace",
        )
    if spec.rope_kind == "longrope" and max_len > spec.original_max_position:
        raise ConfigError(
            f"{name} changes its rotary frequencies for requests of more than {spec.original_max_position} "
            f"tokens, which would change other requests' tokens; set --max-model-len {spec.original_max_position}."
        )
    return config

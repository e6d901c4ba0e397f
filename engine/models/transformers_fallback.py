"""Any decoder-only architecture that transformers knows, with our paged attention in place of its own.

The model is transformers' own, built from its own classes (never from code in the checkpoint's folder). All rows of a
step form one sequence with explicit positions; what keeps them apart is the attention, which transformers lets us
supply: every attention layer calls `_attention`, and the step's backend reaches it as a keyword of the forward call.

A trial pass over two tokens right after loading shows how each layer calls attention. That gives the shape of the KV
cache, and whatever the paged attention cannot do is refused then, in one sentence, and not computed wrongly later.

Imported only when such a model is loaded: transformers takes seconds to import.
"""

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...errors import CheckpointError, ConfigError, PagewireError
from ...kernels import reference
from ..attention.base import AttentionBackend, AttentionStep
from ..cache.kv_cache import KvShape
from .purpose import NATIVE, refuse_own_code
from .spec import ModelSpec

_NAME = "pagewire"
_ORDINARY_LAYERS = {"full_attention", "sliding_attention"}
# Terms that some models add to the scores through these keywords.
_UNKNOWN_TERMS = ("s_aux", "position_bias", "cu_seq_lens_q", "block_table")


def load_fallback(
    spec: ModelSpec, folder: Path, *, num_numbers: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> tuple["TransformersModel", int]:
    """(the model with its weights, their bytes). num_numbers: that the checkpoint's tensors hold. Raises ConfigError,
    CheckpointError."""
    config = _config(spec, folder, max_len)
    transformers.AttentionInterface.register(_NAME, _attention)
    # Their functions are only partly typed.
    auto: Any = transformers.AutoModelForCausalLM
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what it would warn of is an error here, and raised below
    try:
        _check_size(auto, config, num_numbers, spec.architecture)
        model, info = auto.from_pretrained(
            folder,
            config=config,
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
    except Exception as e:  # whatever a model of theirs makes of a config that lies, the answer is the same
        raise CheckpointError(f"{folder} cannot be loaded as {spec.architecture}: {_first_line(e)}") from e
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
    return TransformersModel(model, name=spec.architecture, dtype=dtype, device=device), weights


def _check_size(auto: Any, config: Any, num_numbers: int, name: str) -> None:
    """Before any memory is taken: transformers makes what the config asks for, and then looks whether it is there."""
    with torch.device("meta"):
        model = auto.from_config(config)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 2 * num_numbers:  # tied weights may be there once
        raise CheckpointError(
            f"The checkpoint holds {num_numbers:,} numbers, but config.json calls for {wanted:,} of them in {name}."
        )


class TransformersModel:
    """See `Model`."""

    def __init__(
        self, model: transformers.PreTrainedModel, *, name: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._body = model.base_model
        # With its body replaced, calling the whole model does what comes after the body: scaling, head, softcap.
        self._replay = _Replay()
        setattr(model, model.base_model_prefix, self._replay)
        self._whole = model
        self.kv_shape = self._trial(model.config, name, dtype, device)

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
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

    def _trial(self, config: Any, name: str, dtype: torch.dtype, device: torch.device) -> KvShape:
        trial = _Trial()
        tokens = torch.arange(2, device=device)
        with torch.inference_mode():
            try:
                logits = self.logits(self.hidden(tokens, tokens, trial))
            except ConfigError:
                raise
            except Exception as e:  # whatever a model of theirs makes of our attention, the answer is the same
                raise ConfigError(f"{name} does not run with pagewire's attention: {_first_line(e)}") from e
        num_layers = config.get_text_config().num_hidden_layers
        if sorted(trial.shapes) != list(range(num_layers)) or logits.shape[0] != 2:
            raise ConfigError(f"{name} has {num_layers} layers, but only {len(trial.shapes)} of them use attention.")
        if len(set(trial.shapes.values())) != 1:
            raise ConfigError(f"{name} has layers with different key/value shapes, which pagewire cannot cache.")
        for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
            if kind == "sliding_attention" and trial.windows[layer] is None:
                raise ConfigError(f"{name} does not tell its attention about sliding windows, so it cannot be served.")
        num_kv_heads, head_dim = trial.shapes[0]
        return KvShape(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


_KEYWORD = "pagewire_attention"


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
    """transformers' attention interface. query: [1, heads, tokens, dim] → [1, tokens, heads, dim]."""
    backend = cast(AttentionBackend | None, kwargs.get(_KEYWORD))
    name = type(module).__name__
    if backend is None:
        raise ConfigError(f"{name} does not pass keywords on to its attention, so it cannot be served.")
    if attention_mask is not None or any(kwargs.get(term) is not None for term in _UNKNOWN_TERMS):
        raise ConfigError(f"{name} adds terms to its attention scores that pagewire does not compute.")
    if key.shape != value.shape:
        raise ConfigError(f"{name} has keys and values of different shapes, which pagewire cannot cache.")
    out = backend.forward(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


class _Trial:
    """An attention backend that only notes how it is called."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}  # layer → (key heads, dim)
        self.windows: dict[int, int | None] = {}

    def begin(self, step: AttentionStep) -> None:
        raise AssertionError("the trial pass has no step")

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self.shapes[layer] = (key.shape[1], key.shape[2])
        self.windows[layer] = window
        return torch.zeros_like(query)


class _Replay(nn.Module):
    """Stands where a model's body was and gives back hidden states computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def _config(spec: ModelSpec, folder: Path, max_len: int) -> Any:
    """transformers' config of a model that can be served, or a ConfigError that says why it cannot."""
    name = spec.architecture
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as e:
        refuse_own_code(folder, name)
        raise ConfigError(
            f"{name} is neither one of pagewire's own architectures ({', '.join(NATIVE)}) nor one that the installed "
            f"transformers {transformers.__version__} knows."
        ) from e
    except Exception as e:  # their config classes check values with exceptions of many kinds
        raise ConfigError(f"transformers does not accept {folder / 'config.json'}: {_first_line(e)}") from e
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    known = classes.get(type(config), None)
    if config.is_encoder_decoder or known is None or known.__name__ != name:
        raise ConfigError(f"{name} is not a decoder-only language model, and pagewire serves no others.")
    if known._is_stateful:
        raise ConfigError(f"{name} keeps a recurrent state, which pagewire cannot page yet.")
    if not known._supports_attention_backend:
        raise ConfigError(f"{name} does not let its attention be replaced, so pagewire cannot serve it.")
    strange = set(getattr(config, "layer_types", None) or ()) - _ORDINARY_LAYERS
    if strange:
        raise ConfigError(f"{name} has layers of a kind that pagewire does not know: {', '.join(sorted(strange))}.")
    if spec.rope.kind == "longrope" and max_len > spec.rope.original_max_position:
        raise ConfigError(
            f"{name} changes its rotary frequencies for requests of more than {spec.rope.original_max_position} "
            f"tokens, which would disturb those beside them; set --max-model-len {spec.rope.original_max_position}."
        )
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") + "."

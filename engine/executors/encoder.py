"""Models that see a whole text at once: BERT and similar encoders, cross-encoders, and other models without a native
implementation. They are built from transformers' own classes, never from code in the checkpoint's folder.

The texts of a forward pass are padded to one length, so they are sorted into batches of nearly equal length.

Imported only when such a model is loaded: transformers takes seconds to import.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...errors import CheckpointError, ConfigError, UnsupportedModel
from ..checkpoint.purpose import Activation, activation, refuse_own_code
from ..checkpoint.spec import ModelSpec
from ..models.fields import Fields
from ..models.undescribed import needs_description

_MAX_PADDING = 0.1  # limit of the share of padding in a batch
_PASS_TOKENS = 64  # padding tokens that cost about as much as another forward pass
# Parts of a checkpoint without use here: other heads, and tables that newer versions compute.
_UNUSED = ("pooler.", "cls.", "lm_head.", "classifier.", "vocab_", "predictions.", "position_ids")


class Encoder:
    """A loaded encoder or cross-encoder."""

    def __init__(self, model: Any, *, activation: Activation | None, device: torch.device) -> None:
        """`activation`: of the classification head; None: there is none."""
        self._model = model
        self._device = device
        self._activation = activation
        config = model.config.get_text_config()
        pad = getattr(config, "pad_token_id", None)
        self._pad = 0 if pad is None else int(pad)
        # Classifiers built from decoders find the end of a text by its padding token.
        self._pads = pad is not None or activation is None
        takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._num_types = getattr(config, "type_vocab_size", 0) if takes_types else 0
        self.weights = sum(parameter.nbytes for parameter in model.parameters())

    def states(self, texts: Sequence[Tensor], types: Sequence[Tensor]) -> list[Tensor]:
        """texts: token ids, int64; types: parallel to them, the index of each token's text in a pair. Returns for each
        text the last hidden states [tokens, hidden_size], or the scores of a classification head [num_labels]."""
        found: list[Tensor | None] = [None] * len(texts)
        for batch in batches([len(text) for text in texts], pads=self._pads):
            lengths = [len(texts[i]) for i in batch]
            ids = self._padded([texts[i] for i in batch], self._pad)
            inputs = {"input_ids": ids}
            if min(lengths) < max(lengths):
                inputs["attention_mask"] = self._padded([torch.ones_like(texts[i]) for i in batch], 0)
            if self._num_types:
                inputs["token_type_ids"] = self._padded([types[i] for i in batch], 0).clamp_(max=self._num_types - 1)
            output = self._model(**inputs)
            if self._activation is not None:
                scores = _activated(output.logits.float(), self._activation)
                for i, score in zip(batch, scores, strict=True):
                    found[i] = score
            else:
                for i, length, hidden in zip(batch, lengths, output.last_hidden_state, strict=True):
                    found[i] = hidden[:length]
        return [states for states in found if states is not None]

    def _padded(self, columns: list[Tensor], value: int) -> Tensor:
        return pad_sequence(columns, batch_first=True, padding_value=value).to(self._device)


def batches(lengths: Sequence[int], *, pads: bool) -> list[list[int]]:
    """Sorts texts into batches of nearly equal length, the longest first. pads: False: of exactly equal length."""
    result: list[list[int]] = []
    padding = total = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[result[-1][0]] if result else 0
        padding, total = padding + longest - lengths[i], total + longest
        if result and padding <= (max(_MAX_PADDING * total, _PASS_TOKENS) if pads else 0):
            result[-1].append(i)
        else:
            result.append([i])
            padding, total = 0, lengths[i]
    return result


def encoder_config(spec: ModelSpec, folder: Path) -> Any:
    """transformers' config of a model that can run as an encoder. Raises ConfigError."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' config classes raise exceptions of many kinds
        refuse_own_code(folder, spec.architecture)
        raise ConfigError(f"transformers does not accept {folder / 'config.json'}: {first_line(error)}") from error
    if has := needs_description(Fields(config.to_dict(), folder / "config.json"), generates=False):
        raise UnsupportedModel(spec.architecture, f"it has {has}, and {spec.why_not_described}")
    return config


def load_encoder(spec: ModelSpec, folder: Path, *, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Raises ConfigError, CheckpointError."""
    is_scoring = "embed" not in spec.purpose.tasks
    # transformers is only partly typed.
    auto: Any = transformers.AutoModelForSequenceClassification if is_scoring else transformers.AutoModel
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its warnings are errors here, raised below
    config = encoder_config(spec, folder)
    try:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a wrong config can raise anything in transformers' model classes
        raise CheckpointError(f"{folder} cannot be loaded as {spec.architecture}: {first_line(error)}") from error
    missing = sorted(key for key in info["missing_keys"] if is_scoring or not key.startswith("pooler."))
    unused = _UNUSED[-1:] if is_scoring else _UNUSED
    unknown = sorted(key for key in info["unexpected_keys"] if not any(part in key for part in unused))
    for verb, keys in (("lacks", missing), ("holds", unknown)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            what = "tensors that the model needs" if verb == "lacks" else "tensors that the model does not use"
            raise CheckpointError(f"{folder} {verb} {what}: {', '.join(keys[:3])}{more}.")
    model = model.to(device).eval().requires_grad_(False)
    model.config.use_cache = False  # decoders among them would keep keys and values
    return Encoder(model, activation=activation(folder, spec.purpose.size) if is_scoring else None, device=device)


def _activated(logits: Tensor, activation: Activation) -> Tensor:
    """logits: float32 [texts, num_labels]; the scores have the same shape."""
    match activation:
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(dim=-1)
        case "identity":
            return logits


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") + "."

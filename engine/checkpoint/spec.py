"""The model that a checkpoint's config files describe. All reading of config.json and generation_config.json is here
and in `purpose`; `gguf_config` puts a GGUF file's metadata into their terms.

Imports without torch, because the command line reads it before any process is started, and runs no code from the
checkpoint. Every error is one sentence in a ConfigError.
"""

import math
import os
from hashlib import sha256
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ...config.config import ModelFacts, Purpose, SamplingDefaults
from ...config.model_files import open_file, read_file, read_object
from ...errors import ConfigError, UnsupportedModel
from ..models.description import Decoder
from ..models.families import describe, describe_body, text_fields
from ..models.fields import MAX_LAYERS, MAX_POSITIONS, Fields, NotDescribedError
from ..models.in_c import attends_in_c
from ..models.lower import lower
from ..models.undescribed import needs_description
from .files_digest import MAX_HEADER_BYTES, files_digest, weight_files
from .gguf import PLAIN, Gguf, is_gguf, read_gguf
from .gguf_config import config_of, generation_of, rope_divisors
from .purpose import causal_name, generates, max_length, read_purpose
from .quantization import GgufScheme, Scheme, read_scheme
from .source import ADAPTER_CONFIG

_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A model's shape. For architectures that only transformers supports, unused fields may be 0."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # declared context, tokens
    rope_kind: str
    original_max_position: int  # context length before rotary frequencies were scaled
    dtype: str  # of the checkpoint: float32, bfloat16, float16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    decoder: Decoder | None  # None: it runs in transformers,
    why_not_described: str = ""  # a clause: because of this
    purpose: Purpose = Purpose()
    decoder_start_ids: tuple[int, ...] = ()  # of a model with an encoder: what its decoder's text begins with
    scheme: Scheme | None = None  # of a quantized checkpoint


def is_native(spec: ModelSpec) -> bool:
    """Whether our own executors run it. If not, transformers computes the architecture or this variant of it."""
    return spec.decoder is not None and not spec.purpose.is_encoder


def check_options(
    spec: ModelSpec,
    *,
    tensor_parallel_size: int,
    is_dummy: bool,
    quantization: str | None,
    pipeline_parallel_size: int = 1,
) -> None:
    """Raises ConfigError for options that need our own layers, if transformers computes the model."""
    if is_native(spec) or spec.purpose.is_encoder:
        return
    for what, is_asked in (
        ("--tensor-parallel-size", tensor_parallel_size > 1),
        ("--pipeline-parallel-size", pipeline_parallel_size > 1),
        ("--load-format dummy", is_dummy),
        ("--quantization", quantization is not None),
        ("A quantized checkpoint", spec.scheme is not None),
    ):
        if is_asked:
            raise ConfigError(f"{what} needs a model that pagewire describes; transformers runs {spec.architecture}.")


def read_spec(folder: Path) -> ModelSpec:
    """Reads config.json, and generation_config.json if there is one, or the metadata of a GGUF file. folder: of the
    model, or the file. Raises ConfigError, and CheckpointError for a GGUF file that is damaged."""
    if is_gguf(folder):
        return _read_gguf_spec(read_gguf(folder))
    if not folder.is_dir():
        raise ConfigError(f"There is no model folder {folder}.")
    read = read_object(folder / "config.json")
    if read is None:
        if any(folder.glob("*.gguf")):
            raise ConfigError(f"{folder} holds GGUF files and no config.json; name the file to serve, not its folder.")
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder.")
    config = Fields(read, folder / "config.json")
    generation = Fields(read_object(folder / "generation_config.json") or {}, folder / "generation_config.json")
    return _read_spec(config, generation, folder)


def _read_gguf_spec(gguf: Gguf) -> ModelSpec:
    config = Fields(config_of(gguf), gguf.path)
    head_dim = config.size("head_dim")
    if divisors := rope_divisors(gguf, head_dim):
        config.raw["rope_divisors"] = list(divisors)
    spec = _read_spec(config, Fields(generation_of(gguf), gguf.path), None)
    types = sorted({tensor.type for tensor in gguf.tensors.values()} - {*PLAIN})
    return replace(spec, scheme=GgufScheme(tuple(types)) if types else None)


_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length",
)  # fmt: skip
_MOST_RECURRENT = 1 << 17  # positions of a model without attention, whose config sets no limit


def _read_spec(whole: Fields, generation: Fields, folder: Path | None) -> ModelSpec:
    """folder: with more files that say what the model is for; None: it generates text."""
    architectures = whole.raw.get("architectures")
    if not (isinstance(architectures, list) and architectures and all(isinstance(a, str) for a in architectures)):
        raise ConfigError(f"{whole.file} names no architecture, so this is not a model that can be served.")
    quantization = whole.part("quantization_config")
    architecture = causal_name(own := str(architectures[0]))
    decoder, why = _describe(whole, architecture, generates=folder is None or generates(folder, own), folder=folder)

    config = whole if decoder is None else text_fields(whole)
    hidden_size = config.size("hidden_size", "n_embd", "n_embed", "d_model", "dim", "emb_dim")
    names = "num_hidden_layers", "n_layer", "n_layers", "num_layers"
    num_layers = config.size(*names, default=1, most=MAX_LAYERS) if decoder is None else len(decoder.blocks)
    heads = "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"
    # Models without such a field are recurrent, or have it under another name: the numbers only serve estimates.
    num_heads = config.size(*heads, default=max(1, hidden_size // 64))
    num_kv_heads = config.size("num_key_value_heads", "num_kv_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{config.file} has {num_heads} attention heads, no multiple of its {num_kv_heads} key/value heads."
        )
    head_dim = config.size("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{config.file} has a head_dim of {head_dim}, which is odd.")
    max_position = config.size(*_POSITIONS, default=2048, most=MAX_POSITIONS)
    rope_kind, original = _rope(config, max_position)
    if folder is None:
        purpose = Purpose(size=hidden_size)
    else:
        purpose = read_purpose(folder, whole.raw, hidden_size=hidden_size, is_described=decoder is not None)
        max_position = max_length(folder, max_position, config.raw)
    if decoder is not None and decoder.encoder is not None:
        purpose = replace(purpose, tasks=("generate",))  # its text is not the prompt
    if decoder is not None and decoder.is_recurrent and not any(name in config for name in _POSITIONS):
        max_position = _MOST_RECURRENT
    if decoder is not None and decoder.most_positions is not None:
        max_position = min(max_position, decoder.most_positions)
    return ModelSpec(
        architecture=own if decoder is None else architecture,
        model_type=config.text("model_type", ""),
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config, 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rope_kind=rope_kind,
        original_max_position=original,
        dtype=_dtype(config),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        sampling=_sampling_defaults(generation),
        purpose=purpose,
        eos_token_ids=tuple(dict.fromkeys([*generation.ids("eos_token_id"), *config.ids("eos_token_id")])),
        decoder=decoder,
        why_not_described=why,
        decoder_start_ids=() if decoder is None or decoder.encoder is None else _start_ids(config, generation),
        scheme=None if quantization is None else read_scheme(quantization.raw, config.file),
    )


def _start_ids(config: Fields, generation: Fields) -> tuple[int, ...]:
    """The ids that a decoder beside an encoder begins with, by the rules of transformers' `generate`: its start token,
    or else `bos_token_id`, and then the token that is forced to be the first."""
    both = generation, config
    start = [*both[0].ids("decoder_start_token_id"), *both[1].ids("decoder_start_token_id")]
    start = start or [*both[0].ids("bos_token_id"), *both[1].ids("bos_token_id")]
    if not start:
        raise ConfigError(f"{config.file} has no decoder_start_token_id, with which the decoder of this model begins.")
    forced = [*both[0].ids("forced_bos_token_id"), *both[1].ids("forced_bos_token_id")]
    return start[0], *forced[:1]


def _intermediate_size(config: Fields, default: int) -> int:
    """The widest, if there is one for each layer (Gemma 3n)."""
    if isinstance(config.raw.get("intermediate_size"), list):
        return max(config.integers("intermediate_size") or (default,))
    return config.size("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", default=default)


def _describe(whole: Fields, architecture: str, *, generates: bool, folder: Path | None) -> tuple[Decoder | None, str]:
    """(the description, why there is none). Raises UnsupportedModel if only a description could serve the model."""
    try:
        return describe(architecture, whole) if generates else describe_body(architecture, whole), ""
    except NotDescribedError as error:
        what = needs_description(whole, generates=generates) or ("" if folder else "weights in a GGUF file")
        if what:
            raise UnsupportedModel(architecture, f"it has {what}, and {error.why}") from None
        return None, error.why


def _rope(config: Fields, max_position: int) -> tuple[str, int]:
    """(kind, positions before scaling)"""
    scaling = config.part("rope_parameters") or config.part("rope_scaling") or Fields({}, config.file)
    name = "original_max_position_embeddings"
    default = scaling.size(name, default=max_position, most=MAX_POSITIONS)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    return kind, config.size(name, default=default, most=MAX_POSITIONS)


def model_facts(spec: ModelSpec, folder: Path, name: str, adapter: Path | None = None) -> ModelFacts:
    """The part of a spec that the configuration depends on, with the checkpoint's fingerprint. adapter: the folder of a
    LoRA adapter. Raises ConfigError."""
    key = fingerprint(folder, adapter)  # first: raises ConfigError for files that cannot be read
    weight_bytes, wide_bytes = _weight_bytes(spec, folder)
    program = None if spec.decoder is None else lower(spec.decoder)
    return ModelFacts(
        path=str(folder),
        name=name,
        adapter="" if adapter is None else str(adapter),
        max_position=spec.max_position,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        checkpoint_dtype=spec.dtype,
        weight_bytes=weight_bytes,
        wide_bytes=wide_bytes,
        fingerprint=key,
        files_digest=files_digest(folder, adapter),
        is_native=is_native(spec),
        attends_in_c=program is None or attends_in_c(program),
        has_states=program is not None and bool(program.states),
        sampling=spec.sampling,
        purpose=spec.purpose,
        regime_limit=None if spec.decoder is None else spec.decoder.regime_limit,
        decoder_start_ids=spec.decoder_start_ids,
    )


def _weight_bytes(spec: ModelSpec, folder: Path) -> tuple[int, int]:
    """What the weights take as they are stored, and about what they take unquantized."""
    if is_gguf(folder):
        itemsize = 4 if spec.dtype == "float32" else 2
        gguf = read_gguf(folder, has_vocabulary=False)
        num_weights = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
        return sum(tensor.num_bytes for tensor in gguf.tensors.values()), itemsize * num_weights
    narrower = 1 if spec.scheme is None or isinstance(spec.scheme, GgufScheme) else spec.scheme.narrower
    stored = sum(_tensor_bytes(path) for path in folder.glob("*.safetensors"))
    return stored, narrower * stored


def _tensor_bytes(path: Path) -> int:
    """What follows the header of a safetensors file."""
    with open(open_file(path), "rb") as file:
        return max(0, os.fstat(file.fileno()).st_size - 8 - int.from_bytes(file.read(8), "little"))


def fingerprint(folder: Path, adapter: Path | None = None) -> str:
    """A hex SHA-256 that identifies a checkpoint without reading its weights: over config.json, and each safetensors
    or GGUF file's name, size, modification time and header; and the same of its adapter. Raises ConfigError."""
    digest = sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    try:
        if not is_gguf(folder):
            add(read_file(folder / "config.json"))
        if adapter is not None:
            add(read_file(adapter / ADAPTER_CONFIG))
        for path, header_bytes in weight_files(folder, adapter):
            with open(open_file(path), "rb") as file:
                status = os.fstat(file.fileno())
                add(os.fsencode(path.name))
                add(f"{status.st_size} {status.st_mtime_ns}".encode())
                length = header_bytes or int.from_bytes(file.read(8), "little")
                add(file.read(min(length, MAX_HEADER_BYTES)))
    except OSError as e:
        raise ConfigError(f"{e.filename} cannot be read: {e.strerror}.") from None
    return digest.hexdigest()


def _sampling_defaults(generation: Fields) -> SamplingDefaults:
    """The recommendations of generation_config.json. As in transformers, do_sample = false means greedy."""
    if not generation.flag("do_sample", True) or generation.raw.get("temperature") == 0:
        return SamplingDefaults(temperature=0.0, repetition_penalty=generation.number("repetition_penalty", 1.0))
    return SamplingDefaults(
        temperature=generation.number("temperature", 1.0),
        top_k=generation.size("top_k") if generation.raw.get("top_k") else 0,
        top_p=min(1.0, generation.number("top_p", 1.0)),
        min_p=min(1.0, generation.number("min_p", 0.0)) if generation.raw.get("min_p") else 0.0,
        repetition_penalty=generation.number("repetition_penalty", 1.0),
    )


def _dtype(config: Fields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"{config.file} has dtype = {name!r}; pagewire reads float32, bfloat16 and float16.")
    return _DTYPES[name]

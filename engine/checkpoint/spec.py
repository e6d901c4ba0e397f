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
from ...errors import ConfigError
from .gguf import PLAIN, Gguf, is_gguf, read_gguf
from .gguf_config import config_of, generation_of, rope_divisors
from .purpose import NATIVE, causal_name, generates, max_length, read_purpose
from .quantization import GgufScheme, Scheme, read_scheme
from .support import check_architecture

_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


# Limits beyond any real model. Larger values would take hours or all memory before they failed.
_MAX_SIZE = 2**24
_MAX_LAYERS = 2**10
_MAX_EXPERTS = 2**17  # in all layers together
_MAX_POSITIONS = 2**27
_MAX_NUMBER = 1e12


class Rope(Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Fields that a kind does not use keep their defaults."""

    kind: str = "default"  # default, linear, dynamic, llama3, yarn; others are for transformers only
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: context length before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    truncate: bool = True  # yarn: round the ramp's bounds to whole dimensions
    divisors: tuple[float, ...] = ()  # of the frequency of each pair, for any kind; (): none


class Moe(Struct, frozen=True, kw_only=True):
    """A mixture of experts, which replaces the feed-forward part in some layers."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of each expert
    norm_topk_prob: bool  # a token's expert weights are scaled to a sum of 1
    rounds_weights: bool  # expert weights are rounded to the activations' type; False: they stay float32
    layers: tuple[bool, ...]  # by layer: whether it has experts


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
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    windows: tuple[int | None, ...]  # by layer: how many positions a token sees, itself included; None: all
    moe: Moe | None  # None: no layer has experts; only read for native architectures
    dtype: str  # of the checkpoint: float32, bfloat16, float16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    purpose: Purpose = Purpose()
    scheme: Scheme | None = None  # of a quantized checkpoint


_NATIVE_ACTIVATIONS = ("silu", "swish")
_NATIVE_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # those of `layers.rotary`


def is_native(spec: ModelSpec) -> bool:
    """Whether our own layers can run it. If not, transformers computes the architecture or this variant of it."""
    return (
        spec.architecture in NATIVE
        and spec.hidden_act in _NATIVE_ACTIVATIONS
        and spec.rope.kind in _NATIVE_ROPES
        and not spec.purpose.is_encoder
    )


def check_options(spec: ModelSpec, *, tensor_parallel_size: int, is_dummy: bool, quantization: str | None) -> None:
    """Raises ConfigError for options that need our own layers, if transformers computes the model."""
    if is_native(spec) or spec.purpose.is_encoder:
        return
    for what, is_asked in (
        ("--tensor-parallel-size", tensor_parallel_size > 1),
        ("--load-format dummy", is_dummy),
        ("--quantization", quantization is not None),
        ("A quantized checkpoint", spec.scheme is not None),
    ):
        if is_asked:
            raise ConfigError(f"{what} needs one of {', '.join(NATIVE)}; this is {spec.architecture}.")


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
    config = _Fields(read, folder / "config.json")
    generation = _Fields(read_object(folder / "generation_config.json") or {}, folder / "generation_config.json")
    return _read_spec(config, generation, folder)


def _read_gguf_spec(gguf: Gguf) -> ModelSpec:
    spec = _read_spec(_Fields(config_of(gguf), gguf.path), _Fields(generation_of(gguf), gguf.path), None)
    if not is_native(spec):
        raise ConfigError(f"{gguf.path} has {spec.rope.kind} position embeddings, which pagewire does not compute.")
    types = sorted({tensor.type for tensor in gguf.tensors.values()} - {*PLAIN})
    return replace(
        spec,
        rope=replace(spec.rope, divisors=rope_divisors(gguf, spec.head_dim)),
        scheme=GgufScheme(tuple(types)) if types else None,
    )


def _read_spec(config: "_Fields", generation: "_Fields", folder: Path | None) -> ModelSpec:
    """folder: with more files that say what the model is for; None: it generates text."""
    architectures = config.raw.get("architectures")
    if not (isinstance(architectures, list) and architectures and all(isinstance(a, str) for a in architectures)):
        raise ConfigError(f"{config.file} names no architecture, so this is not a model that can be served.")
    quantization = config.part("quantization_config")
    architecture = causal_name(str(architectures[0]))
    model_type = config.text("model_type", "")
    check_architecture(config.raw, architecture, generates=folder is None or generates(folder, architecture))

    hidden_size = config.size("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
    num_layers = config.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=_MAX_LAYERS)
    num_heads = config.size("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    num_kv_heads = config.size("num_key_value_heads", "num_kv_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{config.file} has {num_heads} attention heads, no multiple of its {num_kv_heads} key/value heads."
        )
    # Qwen3's files may omit head_dim; its heads are 128 wide for any hidden size.
    head_dim = config.size("head_dim", default=128 if model_type == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{config.file} has a head_dim of {head_dim}, which is odd.")
    max_position = config.size(
        "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length",
        default=2048, most=_MAX_POSITIONS,
    )  # fmt: skip
    rope = _rope(config, max_position)
    if folder is None:
        purpose = Purpose(size=hidden_size)
    else:
        purpose = read_purpose(folder, config.raw, hidden_size=hidden_size)
        max_position = max_length(folder, max_position, config.raw)
    return ModelSpec(
        architecture=architecture,
        model_type=model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        # A model that does not generate needs no head, and its checkpoint may have none.
        tie_word_embeddings=config.flag("tie_word_embeddings", False) or "generate" not in purpose.tasks,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        hidden_act=config.text("hidden_act", "silu"),
        windows=_windows(config, model_type, num_layers),
        moe=_moe(config, architecture, num_layers),
        dtype=_dtype(config),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        sampling=_sampling_defaults(generation),
        purpose=purpose,
        eos_token_ids=tuple(dict.fromkeys([*generation.ids("eos_token_id"), *config.ids("eos_token_id")])),
        scheme=None if quantization is None else read_scheme(quantization.raw, config.file),
    )


def model_facts(spec: ModelSpec, folder: Path, name: str) -> ModelFacts:
    """The part of a spec that the configuration depends on, with the checkpoint's fingerprint. Raises ConfigError."""
    key = fingerprint(folder)  # first: raises ConfigError for files that cannot be read
    weight_bytes, wide_bytes = _weight_bytes(spec, folder)
    return ModelFacts(
        path=str(folder),
        name=name,
        max_position=spec.max_position,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        checkpoint_dtype=spec.dtype,
        weight_bytes=weight_bytes,
        wide_bytes=wide_bytes,
        fingerprint=key,
        is_native=is_native(spec),
        head_dim=spec.head_dim,
        sampling=spec.sampling,
        purpose=spec.purpose,
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


MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format


def fingerprint(folder: Path) -> str:
    """A hex SHA-256 that identifies a checkpoint without reading its weights: over config.json, and each safetensors
    or GGUF file's name, size, modification time and header. Raises ConfigError."""
    digest = sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    try:
        if is_gguf(folder):
            gguf = read_gguf(folder, has_vocabulary=False)
            files = [*zip(gguf.parts, gguf.header_bytes, strict=True)]
        else:
            add(read_file(folder / "config.json"))
            files = [(path, 0) for path in sorted(folder.glob("*.safetensors"))]
        for path, header_bytes in files:
            with open(open_file(path), "rb") as file:
                status = os.fstat(file.fileno())
                add(os.fsencode(path.name))
                add(f"{status.st_size} {status.st_mtime_ns}".encode())
                length = header_bytes or int.from_bytes(file.read(8), "little")
                add(file.read(min(length, MAX_HEADER_BYTES)))
    except OSError as e:
        raise ConfigError(f"{e.filename} cannot be read: {e.strerror}.") from None
    return digest.hexdigest()


def _sampling_defaults(generation: "_Fields") -> SamplingDefaults:
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


class _Fields:
    """Typed access to a JSON object; errors name the file and the field. null counts as absent."""

    def __init__(self, raw: dict[str, object], file: Path) -> None:
        self.raw = raw
        self.file = file

    def size(self, *names: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """The positive integer under the first of `names` that is present. The default limit is for widths and
        counts."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a positive whole number.")
            if value > most:
                raise ConfigError(f"{self.file} has {name} = {value}; the limit is {most}.")
            return value
        if default is None:
            raise ConfigError(f"{self.file} has no {names[0]}.")
        if default < 1:
            raise ConfigError(f"{self.file} has no {names[0]}, and its other sizes give {default}.")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a positive number.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be true or false.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a text.")
        return value

    def ids(self, name: str) -> list[int]:
        """Token ids: a number, a list of numbers, or nothing."""
        value = self.raw.get(name)
        entries: list[object] = [] if value is None else value if isinstance(value, list) else [value]
        ids = [i for i in entries if isinstance(i, int) and not isinstance(i, bool)]
        if len(ids) < len(entries):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a token id or a list of them.")
        return [i for i in ids if i >= 0]  # -1 means "none" in some files

    def part(self, name: str) -> "_Fields | None":
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be an object.")
        return _Fields(value, self.file)


def _rope(config: _Fields, max_position: int) -> Rope:
    """transformers 5 writes all fields into `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    scaling = config.part("rope_parameters") or config.part("rope_scaling") or _Fields({}, config.file)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    name = "original_max_position_embeddings"
    default = scaling.size(name, default=max_position, most=_MAX_POSITIONS)
    original = config.size(name, default=default, most=_MAX_POSITIONS)
    factor = scaling.number("factor", max_position / original if kind == "yarn" else 1.0)
    if any(isinstance(value, dict) for value in scaling.raw.values()):
        kind = "by layer"  # one set of parameters per kind of layer: for transformers only
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    low, high = scaling.number("low_freq_factor", 1.0), scaling.number("high_freq_factor", 4.0)
    for name, value, least in (("rope_theta", theta, 1.0), ("high_freq_factor", high, low)):
        if value <= least:
            raise ConfigError(f"{config.file} has {name} = {value:g}, which should be more than {least:g}.")
    return Rope(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=scaling.flag("truncate", True),
    )


def _yarn_attention_factor(scaling: _Fields, factor: float) -> float:
    """How much yarn sharpens attention (arXiv 2309.00071, section 3.4; mscale is DeepSeek's refinement)."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.raw.get("mscale") and scaling.raw.get("mscale_all_dim"):
        derived = mscale(scaling.number("mscale", 1.0)) / mscale(scaling.number("mscale_all_dim", 1.0))
    else:
        derived = mscale(1.0)
    return scaling.number("attention_factor", derived)


_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def _windows(config: _Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. Only read for native architectures; transformers' models handle it
    themselves."""
    unlimited: tuple[int | None, ...] = (None,) * num_layers
    if config.raw.get("sliding_window") is None or model_type not in _WINDOWED:
        return unlimited
    window = config.size("sliding_window", most=2**31 - 1)
    if model_type in ("mistral", "mixtral"):
        return (window,) * num_layers
    if not config.flag("use_sliding_window", False):
        return unlimited
    if model_type == "qwen3_moe":
        return (window,) * num_layers
    types = config.raw.get("layer_types")
    if isinstance(types, list):
        if len(types) != num_layers:
            raise ConfigError(f"{config.file} has {num_layers} layers but {len(types)} layer_types.")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = config.size("max_window_layers", default=28)  # the config class's default
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _moe(config: _Fields, architecture: str, num_layers: int) -> Moe | None:
    """Defaults are those of transformers' config classes."""
    match architecture:
        case "MixtralForCausalLM":
            num_experts = config.size("num_local_experts", "num_experts", default=8)
            top_k = config.size("num_experts_per_tok", default=2)
            intermediate_size, renormalized, rounded = config.size("intermediate_size"), True, False
            layers = (True,) * num_layers
        case "Qwen3MoeForCausalLM":
            num_experts = config.size("num_experts", "num_local_experts", default=128)
            top_k = config.size("num_experts_per_tok", default=8)
            intermediate_size = config.size("moe_intermediate_size", default=768)
            renormalized, rounded = config.flag("norm_topk_prob", False), True
            step, dense = config.size("decoder_sparse_step", default=1), config.raw.get("mlp_only_layers") or []
            if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
                raise ConfigError(f"{config.file} has mlp_only_layers = {dense!r}, which should be a list of numbers.")
            layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
        case _:
            return None
    if num_experts * num_layers > _MAX_EXPERTS:
        raise ConfigError(
            f"{config.file} has {num_experts} experts in each of {num_layers} layers; the limit is {_MAX_EXPERTS}."
        )
    if top_k > num_experts:
        raise ConfigError(f"{config.file} has num_experts_per_tok = {top_k}, but there are {num_experts} experts.")
    if not any(layers):
        return None
    return Moe(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        intermediate_size=intermediate_size,
        norm_topk_prob=renormalized,
        rounds_weights=rounded,
        layers=layers,
    )


def _dtype(config: _Fields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"{config.file} has dtype = {name!r}; pagewire reads float32, bfloat16 and float16.")
    return _DTYPES[name]

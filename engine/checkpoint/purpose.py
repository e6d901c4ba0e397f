"""What a checkpoint is for: text, embeddings or scores, and how a prompt is pooled into one vector.

Reads the files that sentence-transformers stores with a model: modules.json, which lists the parts in order,
1_Pooling/config.json, and config_sentence_transformers.json with the prompts. Imports without torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from ...config.config import Purpose, Task
from ...config.model_files import read_json, read_object
from ...errors import ConfigError
from ..models.families import pages

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"  # with the prompts
SENTENCE_LENGTH = "sentence_bert_config.json"
_CLASSIFIER = "ForSequenceClassification"
_BARE = ("Model", "ForMaskedLM")  # endings of architectures without a head, or without one for generating
# Parts of names of architectures that generate although they end in "Model".
_LM_HEADS = ("LMHead", "DoubleHeads", "Causal", "EncoderDecoder", "MTModel", "SeamlessM4T", "Bark")
_BODIES = ("TextModel", "Model")  # endings of the classes of bodies without a head,
_WITH_HEADS = ("ForCausalLM", "LMHeadModel")  # and of the classes that have one
_POOLINGS: dict[str, Literal["last", "mean", "cls"]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_Fields = Mapping[str, object]
Activation = Literal["sigmoid", "softmax", "identity"]
_OF_PROBLEM: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def causal_name(architecture: str) -> str:
    """The described architecture whose body this one is, or the architecture itself."""
    if architecture in pages() or is_generative(architecture):
        return architecture
    bodies = [architecture.removesuffix(end) for end in _BODIES if architecture.endswith(end)]
    names = (body + head for body in bodies for head in _WITH_HEADS)
    return next((name for name in names if name in pages()), architecture)


def is_generative(architecture: str) -> bool:
    """Whether the checkpoint's class predicts the next token. Decided by its name: transformers' table of causal models
    would take seconds to import."""
    return any(head in architecture for head in _LM_HEADS) or not architecture.endswith((*_BARE, _CLASSIFIER))


def generates(folder: Path, architecture: str) -> bool:
    """Whether the checkpoint is for text: its class is generative, and it is not saved as an embedding model."""
    return is_generative(architecture) and not (folder / MODULES).exists()


def read_purpose(folder: Path, config: _Fields, *, hidden_size: int, is_described: bool) -> Purpose:
    """config: config.json, whose first architecture decides. is_described: pagewire's executors have the layers. Raises
    ConfigError."""
    architecture = str(config["architectures"][0])  # type: ignore[index]  # `read_spec` has checked it
    if architecture.endswith(_CLASSIFIER):
        return _classifier(folder, config)
    parts = _modules(folder)
    if parts is None and is_generative(architecture):
        return Purpose(size=hidden_size)
    tasks: tuple[Task, ...] = ("embed",)
    is_encoder = not is_described
    if parts is None:  # nothing is declared: mean as in sentence-transformers, or the last token, which sees all others
        how: Literal["last", "mean"] = "mean" if is_encoder else "last"
        return Purpose(tasks=tasks, is_encoder=is_encoder, pooling=how, size=hidden_size)
    prompts, default = _prompts(folder)
    return Purpose(
        tasks=tasks,
        is_encoder=is_encoder,
        pooling=_pooling(folder, parts),
        is_normalized="Normalize" in parts,
        size=hidden_size,
        prompts=prompts,
        default_prompt=default,
    )


def max_length(folder: Path, declared: int, config: _Fields) -> int:
    """The longest prompt in tokens. declared: positions that the model has."""
    if config.get("model_type") in _OFFSET_POSITIONS:
        pad = config.get("pad_token_id", 1)
        declared -= (pad if isinstance(pad, int) else 1) + 1
    file = folder / SENTENCE_LENGTH
    longest = (read_object(file) or {}).get("max_seq_length")
    if longest is None:
        return declared
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise ConfigError(f"{file} has max_seq_length = {longest!r}, which should be a positive whole number.")
    return min(declared, longest)


# Model types whose first position is the padding token's id + 1.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text"})


def refuse_own_code(folder: Path, architecture: str) -> None:
    """Raises ConfigError if the model needs Python code from its folder, which pagewire never runs."""
    if "auto_map" in _object(folder / "config.json"):
        raise ConfigError(
            f"{architecture} needs code from {folder} (auto_map in config.json), and pagewire never runs code that "
            "comes with a model."
        )


def activation(folder: Path, num_labels: int) -> Activation:
    """What maps the outputs of a classification head to scores. config.json names it, for sentence-transformers or by
    transformers' problem_type; without that it is a sigmoid for one label, and a softmax over several. Raises
    ConfigError."""
    config = _object(folder / "config.json")
    newer = config.get("sentence_transformers")
    said = newer.get("activation_fn") if isinstance(newer, dict) else None
    said = said or config.get("sbert_ce_default_activation_function")
    if said:
        name = str(said).rpartition(".")[2].lower()
        if name not in get_args(Activation):
            names = "Sigmoid, Softmax and Identity"
            raise ConfigError(f"{folder / 'config.json'} has the activation {said!r}; pagewire has {names}.")
        return cast(Activation, name)
    if num_labels == 1:
        return "sigmoid"
    return _OF_PROBLEM.get(str(config.get("problem_type")), "softmax")


def _classifier(folder: Path, config: _Fields) -> Purpose:
    """A cross-encoder has one label; what has several classifies texts."""
    names = config.get("id2label")
    num = len(names) if isinstance(names, dict) else config.get("num_labels", 2)  # transformers' default
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ConfigError(f"{folder / 'config.json'} has {num!r} labels; a classifier has at least one.")
    activation(folder, num)
    if num == 1:
        return Purpose(tasks=("score",), is_encoder=True, is_normalized=False, size=1)
    by_number = names if isinstance(names, dict) else {}
    labels = tuple(str(by_number.get(str(i), f"LABEL_{i}")) for i in range(num))
    return Purpose(tasks=("classify",), is_encoder=True, is_normalized=False, size=num, labels=labels)


def part_configs(folder: Path) -> list[Path]:
    """The configs of the parts in modules.json, such as that of pooling. They may not exist. Raises ConfigError."""
    return [folder / module.path / "config.json" for module in _listed(folder) or ()]


def _listed(folder: Path) -> list[_Module] | None:
    try:
        return read_json(folder / MODULES, list[_Module])
    except FileNotFoundError:
        return None


def _modules(folder: Path) -> dict[str, str] | None:
    """Kind of module → its folder; None if sentence-transformers did not write the checkpoint."""
    file = folder / MODULES
    modules = _listed(folder)
    if modules is None:
        return None
    parts = {module.type.rpartition(".")[2]: module.path for module in modules}
    known = ["Transformer", "Pooling", "Normalize"]
    if [*parts] not in (known[:2], known):
        raise ConfigError(
            f"{file} lists the modules {', '.join(parts)}; pagewire supports Transformer, Pooling and then, "
            "optionally, Normalize."
        )
    return parts


def _pooling(folder: Path, parts: Mapping[str, str]) -> Literal["last", "mean", "cls"]:
    file = folder / parts["Pooling"] / "config.json"
    config = _object(file)
    modes = [_FLAGS.get(name, name) for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if isinstance(named := config.get("pooling_mode"), str):
        modes = [named]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigError(f"{file} asks for pooling by {' and '.join(modes) or 'nothing'}; pagewire supports cls, mean "
                          "and lasttoken, one at a time.")  # fmt: skip
    if config.get("include_prompt") is False and modes[0] != "lasttoken":
        raise ConfigError(f"{file} excludes the prompt (include_prompt: false), which pagewire does not support.")
    return _POOLINGS[modes[0]]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    file = folder / SENTENCE_CONFIG
    config = read_object(file) or {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{file} has prompts = {prompts!r}, which should map names to texts.")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ConfigError(f"{file} has default_prompt_name = {default!r}, which is not among its prompts.")
    return prompts, default


def _object(file: Path) -> dict[str, object]:
    config = read_object(file)
    if config is None:
        raise ConfigError(f"{file} is missing.")
    return config

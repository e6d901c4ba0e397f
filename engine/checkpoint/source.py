"""Finds a model's files: a demo model in this package, a local folder or GGUF file, or the Hub's cache."""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from ...config.model_files import read_json
from ...errors import ConfigError
from .gguf import SUFFIX, is_gguf, parts_of, split_stem

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
HYBRID_MODEL = Path(__file__).parents[2] / "demo_hybrid"
_DEMOS = {
    "": (DEMO_MODEL, "pagewire-demo"),
    "demo": (DEMO_MODEL, "pagewire-demo"),
    "demo-hybrid": (HYBRID_MODEL, "pagewire-demo-hybrid"),
}


class _Adapter(Struct, frozen=True):
    base_model_name_or_path: str


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]*")
_WEIGHTS = "*.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_FILES = ("*.json", _WEIGHTS, "*.jinja", "*.model", "*.txt", "tiktoken*")
_FILES_BELOW = ("*.json", "*.jinja")  # in folders of the folder: how vectors are pooled, more chat templates


def locate(model: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
    """The path and the name of `model`: an empty one or `demo` is the demo model, `demo-hybrid` the one with recurrent
    layers, unless there are such folders. Raises ConfigError with what to do.

    The path is that of a folder, or of a GGUF file, of several parts the first. A name that is no path is looked up on
    the Hub, with a progress bar; huggingface_hub itself reads HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Only configs,
    tokenizers and, with `weights`, safetensors are fetched. `NAME:QUANT`, where NAME is a folder or a name on the Hub,
    is the GGUF file in it whose name ends in QUANT, such as Q4_K_M, and only that is fetched.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve(), path.resolve().name
    if model in _DEMOS:
        return _DEMOS[model]
    if path.exists():
        if not is_gguf(path):
            raise ConfigError(
                f"{model} is a file; a model is a folder with config.json and safetensors, or a GGUF file."
            )
        first = parts_of(Path(os.path.abspath(path)))[0]  # links stay: in the Hub's cache they have the names
        return first, split_stem(first)[0]
    name, colon, quant = model.rpartition(":")
    if colon and quant and (folder := Path(name).expanduser()).is_dir():
        return _choose(folder.resolve(), quant, model), f"{folder.resolve().name}:{quant}"
    repository, quant = _hub_name(model)
    if quant:
        return _choose(_download(repository, revision, _patterns(quant)), quant, model), model
    return _download(model, revision, [name for name in _FILES if weights or name != _WEIGHTS]), model


def fetch(model: str, tell: Callable[[str, int, int], None]) -> None:
    """Downloads a model of the Hub into its cache, where `locate` finds it. `tell`: called with a file's name, its
    bytes so far and in all. Raises ConfigError."""
    repository, quant = _hub_name(model)
    with _in_plain_words(repository, None):
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import DryRunError, HfHubHTTPError
        from huggingface_hub.utils.tqdm import tqdm

        class Bar(tqdm):
            def __init__(self, *arguments: object, **options: object) -> None:
                quiet = {**options, "disable": False, "file": io.StringIO(), "mininterval": 0}
                super().__init__(*arguments, **quiet)  # type: ignore[no-untyped-call]  # tqdm has no types

            def update(self, n: float | None = 1) -> bool | None:
                done: bool | None = super().update(n)
                tell(file.filename, int(self.n), file.file_size or int(self.n))
                return done

        try:
            wanted = _patterns(quant) if quant else list(_FILES)
            files = snapshot_download(repository, allow_patterns=wanted, dry_run=True)
        except DryRunError as error:  # which hides what the Hub said
            raise (error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error) from None
        for file in files:
            tell(file.filename, (file.file_size or 0) * file.is_cached, file.file_size or 0)
            if file.will_download:
                hf_hub_download(repository, file.filename, revision=file.commit_hash, tqdm_class=Bar)
    if quant:
        _choose(_download(repository, None, _patterns(quant)), quant, model)
    elif not any(file.filename in ("config.json", ADAPTER_CONFIG) for file in files):
        raise ConfigError(f"{model} has no config.json, so it is no model that can be served.")


def _hub_name(model: str) -> tuple[str, str]:
    """A repository and a quantization, which may be empty. Raises ConfigError for what is neither."""
    name, colon, quant = model.rpartition(":")
    repository = name if colon else model
    is_path = model.startswith((".", "/", "~")) or model.endswith(SUFFIX) or repository.count("/") > 1
    if is_path or not _HUB_NAME.fullmatch(repository) or (colon and not _QUANT.fullmatch(quant)):
        raise ConfigError(f"There is no {'file' if model.endswith(SUFFIX) else 'folder'} {model}.")
    return repository, quant if colon else ""


def files_of(path: Path) -> list[Path]:
    """The files of a model or an adapter that `locate` has found, without others that may be beside them."""
    if is_gguf(path):
        return list(parts_of(path))
    found = {file for pattern in _FILES for file in path.glob(pattern)}
    found |= {file for pattern in _FILES_BELOW for file in path.glob(f"[!.]*/{pattern}")}
    return sorted(file for file in found if file.is_file())


def base_of(folder: Path) -> str | None:
    """The model that a folder with a LoRA adapter changes: a path, or a name on the Hub. None: the folder has a model
    of its own. Raises ConfigError."""
    if is_gguf(folder) or (folder / "config.json").exists():
        return None
    try:
        return read_json(folder / ADAPTER_CONFIG, _Adapter).base_model_name_or_path
    except FileNotFoundError:
        return None


def is_here(model: str) -> bool:
    """Whether `locate` would find the model, or refuse its name, without a network."""
    name, colon, quant = model.rpartition(":")
    if any(Path(each).expanduser().exists() for each in (model, name) if each) or model.startswith((".", "/", "~")):
        return True
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        if not colon:
            return isinstance(try_to_load_from_cache(model, "config.json"), str)
        _choose(Path(snapshot_download(name, local_files_only=True)), quant, model)
    except (LocalEntryNotFoundError, ConfigError):
        return False
    except HFValidationError:
        pass
    return True


def _patterns(quant: str) -> list[str]:
    """The names, for huggingface_hub, of the GGUF files that may be this quantization."""
    spelled = dict.fromkeys((quant, quant.upper(), quant.lower()))
    return [f"*{each}{end}" for each in spelled for end in (SUFFIX, f"-?????-of-?????{SUFFIX}")]


def _choose(folder: Path, quant: str, model: str) -> Path:
    """The only GGUF model in the folder, or in a folder in it, whose name ends in `quant`. Raises ConfigError."""
    files = [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")]
    models = sorted({parts_of(file)[0] for file in files if not file.name.startswith("mmproj")})
    chosen = [
        file for file in models if re.search(rf"(^|[-._]){re.escape(quant)}$", split_stem(file)[0], re.IGNORECASE)
    ]
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        names = ", ".join(split_stem(file)[0] for file in models) or "none"
        raise ConfigError(f"{model}: there is no GGUF file whose name ends in {quant}; those here: {names}.")
    names = ", ".join(split_stem(file)[0] for file in chosen)
    raise ConfigError(f"{model} could be {names}; name more of the end.")


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    with _in_plain_words(name, revision):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


@contextlib.contextmanager
def _in_plain_words(name: str, revision: str | None) -> Iterator[None]:
    """Turns the Hub's errors into ConfigErrors."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its version says which client that is

    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(f"{name} is gated: accept its terms on the Hub and set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"There is no folder {name}, and no such model on the Hub that HF_TOKEN may see.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"There is no folder {name} here, it is not in the Hub's cache, and it cannot be downloaded now "
            "(no network, or HF_HUB_OFFLINE is set)."
        ) from error

"""Finds a model's files: the demo model in this package, a local folder, or the Hub's cache."""

import os
import re
from pathlib import Path

from ...errors import ConfigError

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
DEMO_NAME = "pagewire-demo"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHTS = "*.safetensors"
_FILES = ("*.json", _WEIGHTS, "*.jinja", "*.model", "*.txt", "tiktoken*")


def locate(model: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
    """The folder and the name of `model`; an empty `model` is the demo model. Raises ConfigError with what to do.

    A name that is no folder is looked up on the Hub, with a progress bar; huggingface_hub itself reads HF_HOME,
    HF_TOKEN and HF_HUB_OFFLINE. Only configs, tokenizers and, with `weights`, safetensors are fetched.
    """
    if not model:
        return DEMO_MODEL, DEMO_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.exists():
        raise ConfigError(f"{model} is a file; a model is a folder with config.json and safetensors.")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"There is no folder {model}.")
    return _download(model, revision, [name for name in _FILES if weights or name != _WEIGHTS]), model


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ConfigError(f"{name} is gated: accept its terms on the Hub and set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"There is no folder {name}, and no such model on the Hub that HF_TOKEN may see.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"There is no folder {name} here, it is not in the Hub's cache, and it cannot be downloaded now "
            "(no network, or HF_HUB_OFFLINE is set)."
        ) from error

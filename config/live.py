"""Which settings may change while a server runs, and what else follows from such a change. Pure."""

import difflib

import msgspec
from msgspec.structs import replace

from ..errors import ConfigError
from .access import check_key_classes
from .config import EngineConfig, HttpConfig, Said, ServerConfig
from .flags import SETTINGS
from .latency_classes import with_default
from .resolve import resolve, resolve_http

LIVE = tuple(setting for setting in SETTINGS.values() if setting.live is not None)
"""Those that may change while it runs."""

RELOADABLE = frozenset(
    {
        "model",
        "revision",
        "served_model_name",
        "dtype",
        "quantization",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_memory",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
    }
)
"""Those that `POST /admin/models` changes, by loading the model again."""


def check_live(name: str) -> None:
    """Raises ConfigError if there is no such setting, or if it cannot change while the server runs."""
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        raise ConfigError(f"There is no setting {name[:100]!r}{f'; is it {near[0]}?' if near else '.'}")
    if SETTINGS[name].live is None:
        reload = " or a reload of the model (POST /admin/models)" if name in RELOADABLE else ""
        raise ConfigError(f"{name} cannot change while the server runs: it needs a restart{reload}.")


def decide(said: Said, before: ServerConfig) -> ServerConfig:
    """`before` with the live settings that `said` leads to. Makes the checks of the start, and raises ConfigError."""
    engine = resolve(said.config, before.engine.model, said.machine)
    http = resolve_http(said.config, said.keys, said.admin_keys)
    check_key_classes(http.api_keys, with_default(engine.latency_classes))
    return ServerConfig(
        engine=with_live_engine(before.engine, engine),
        http=with_live_http(before.http, http),
        said=said,
    )


def with_live_engine(config: EngineConfig, new: EngineConfig) -> EngineConfig:
    """`config` with the live settings of `new`."""
    return replace(config, **{one.name: getattr(new, one.name) for one in LIVE if one.section == "engine"})


def with_live_http(config: HttpConfig, new: HttpConfig) -> HttpConfig:
    """`config` with the live settings and the keys of `new`, which have rates."""
    sections = {name: getattr(config, name) for name in ("clients", "reports", "service")}
    for one in LIVE:
        if one.section in sections:
            value = getattr(getattr(new, one.section), one.name)
            sections[one.section] = replace(sections[one.section], **{one.name: value})
    return replace(config, api_keys=new.api_keys, admin_keys=new.admin_keys, **sections)


def value_of(engine: EngineConfig, http: HttpConfig, name: str) -> object:
    """A live setting as it holds, in JSON's types."""
    section = SETTINGS[name].section
    value: object = getattr(engine if section == "engine" else getattr(http, section), name)
    return msgspec.to_builtins(value)

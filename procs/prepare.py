"""From what a user says to what processes are given: finds the checkpoint, reads its config and the files of keys."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ..api.http.tls import tls_context
from ..api.output.parsers import registry as parsers
from ..config.access import ApiKey, check_key_classes, read_key_file
from ..config.config import Config, EngineConfig, HttpConfig, MachineFacts, ModelFacts, Said, ServerConfig
from ..config.latency_classes import with_default
from ..config.machine import machine_facts
from ..config.plugins import check_module
from ..config.resolve import resolve, resolve_http
from ..engine.checkpoint.gguf import is_gguf
from ..engine.checkpoint.source import base_of, locate
from ..engine.checkpoint.spec import check_options, model_facts, read_spec
from ..engine.core.speculation import num_draft_tokens
from ..engine.extension import load_extension
from ..engine.kv_connector import registry as kv_connectors
from ..engine.models.cut import cut
from ..engine.models.lower import lower
from ..engine.models.stages import lengths_of
from ..engine.text.infill import read_infill
from ..engine.text.template_files import read_templates
from ..errors import ConfigError


def prepare(config: Config) -> EngineConfig:
    """What an engine without HTTP is given; the arguments and errors of `prepare_server`."""
    return prepare_server(config).engine


def prepare_server(config: Config) -> ServerConfig:
    """Finds the model, which is downloaded if need be, and decides what the user left open. Raises ConfigError, also
    for what only the engine's processes will open."""
    model, machine = examine(config)
    engine = resolve(config, model, machine)
    keys, admin_keys = read_keys(config)
    said = Said(config=config, machine=machine, keys=keys, admin_keys=admin_keys)
    http = _http_of(config, keys, admin_keys)
    check_key_classes(http.api_keys, with_default(engine.latency_classes))
    return ServerConfig(engine=engine, http=http, said=said)


def read_keys(config: Config) -> tuple[tuple[ApiKey, ...], tuple[ApiKey, ...]]:
    """What the files of users' and administrators' keys hold. Raises ConfigError."""
    keys = config.keys
    user_keys = () if keys.api_key_file is None else read_key_file(Path(keys.api_key_file))
    file = keys.admin_api_key_file
    return user_keys, () if file is None else read_key_file(Path(file), "--admin-api-key-file")


def prepare_http(config: Config) -> HttpConfig:
    """Reads the files of keys and looks into those of certificates. Raises ConfigError."""
    return _http_of(config, *read_keys(config))


def _http_of(config: Config, keys: Sequence[ApiKey], admin_keys: Sequence[ApiKey]) -> HttpConfig:
    http = resolve_http(config, keys, admin_keys)
    tls_context(http.listen)
    return http


def examine(config: Config) -> tuple[ModelFacts, MachineFacts]:
    """The facts about the model and this machine. Raises ConfigError."""
    source, options = config.source, config.engine
    if source.models:
        raise ConfigError("Several models are for `pagewire serve`; name one.")
    kv_connectors.check(options.kv_connector)
    parsers.check(options.tool_call_parser, options.reasoning_parser)
    num_draft_tokens(options.speculative)
    if options.extension is not None:
        load_extension(options.extension)
    if options.runner_plugin is not None:
        check_module("--runner-plugin", options.runner_plugin)
    reads_weights = options.load_format != "dummy" and options.scripted is None
    folder, name = locate(source.model, source.revision, weights=reads_weights)
    adapter = None
    if (base := base_of(folder)) is not None:
        adapter, (folder, _) = folder, locate(base, None, weights=reads_weights)
    spec = read_spec(folder)
    if adapter is not None and (spec.decoder is None or is_gguf(folder)):
        raise ConfigError(
            f"{name} is an adapter of {base}, which pagewire does not describe or which is a GGUF file; merge the "
            "adapter into the model with PEFT's merge_and_unload."
        )
    check_options(
        spec,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        is_dummy=not reads_weights,
        quantization=options.quantization,
    )
    if spec.decoder is not None:
        deals_experts = options.enable_expert_parallel
        part = cut(spec.decoder, 0, options.tensor_parallel_size, deals_experts=deals_experts)
        if options.pipeline_parallel_size > 1:
            lengths_of(lower(part), len(part.blocks), options.pipeline_parallel_size, options.pipeline_layers)
    facts = model_facts(spec, folder, name, adapter)
    templates = read_templates(folder, options.chat_template or None)
    tool_calls_shown, reasoning_shown = parsers.shown_parsers("\n".join(templates.values()))
    facts = replace(
        facts, tool_calls_shown=tool_calls_shown, reasoning_shown=reasoning_shown, infill=read_infill(folder)
    )
    return facts, machine_facts()

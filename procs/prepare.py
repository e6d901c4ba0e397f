"""From what a person says to what every process receives: find the checkpoint, read its config, decide the rest."""

from pathlib import Path

from msgspec.structs import replace

from ..api.http.tls import tls_context
from ..api.output.parsers import registry as parsers
from ..config.access import read_key_file
from ..config.config import Config, EngineConfig, MachineFacts, ModelFacts
from ..config.machine import machine_facts
from ..config.resolve import resolve
from ..engine.checkpoint.source import locate
from ..engine.checkpoint.spec import check_options, model_facts, read_spec
from ..engine.core.speculation import num_draft_tokens
from ..engine.extension import load_extension
from ..engine.kv_connector import registry as kv_connectors
from ..engine.parallel import shard
from ..engine.text.template_files import read_templates


def prepare(config: Config) -> EngineConfig:
    """Downloads the model if need be. Raises ConfigError, also for what only the engine's processes will open."""
    engine = resolve(config, *examine(config))
    tls_context(engine)
    return engine


def examine(config: Config) -> tuple[ModelFacts, MachineFacts]:
    """What `prepare` decides by."""
    kv_connectors.check(config.kv_connector)
    parsers.check(config.tool_call_parser, config.reasoning_parser)
    num_draft_tokens(config.speculative)
    if config.extension is not None:
        load_extension(config.extension)
    folder, name = locate(config.model, config.revision, weights=config.load_format != "dummy")
    spec = read_spec(folder)
    check_options(
        spec,
        tensor_parallel_size=config.tensor_parallel_size,
        is_dummy=config.load_format == "dummy",
        quantization=config.quantization,
    )
    shard.check(spec, config.tensor_parallel_size)
    facts = model_facts(spec, folder, name)
    templates = read_templates(folder, Path(config.chat_template) if config.chat_template else None)
    tool_call_parser, reasoning_parser = parsers.shown_parsers("\n".join(templates.values()))
    facts = replace(facts, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
    keys = () if config.api_key_file is None else read_key_file(Path(config.api_key_file))
    file = config.admin_api_key_file
    admin_keys = () if file is None else read_key_file(Path(file), "--admin-api-key-file")
    return facts, replace(machine_facts(), api_keys=keys, admin_keys=admin_keys)

"""Tests mirror the tree: `api/http/tls.py` is tested by `tests/api/http/test_tls.py`. Exceptions are listed here."""

import ast
from pathlib import Path

from test_layout import ROOT, sources

TESTS = ROOT / "tests"
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_DECISION = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Match,
    ast.Try,
    ast.BoolOp,
    ast.comprehension,
)
_MAX_WITHOUT_A_TEST = 5  # decisions; a module without logic of its own has fewer

# Module → the tests that cover it instead, and why they are there.
ELSEWHERE = {
    "api.admin.about": "api/test_app.py: over the whole application",
    "api.admin.models": "api/test_by_model.py: over the whole application",
    "api.admin.settings": "e2e/test_settings.py: needs processes",
    "api.admin.swapping": "e2e/test_model_swap.py: needs processes",
    "api.http.exchange": "api/http/test_server.py: needs a connection",
    "api.http.http_error": "api/test_bad_input.py: the shape of every refusal",
    "api.http.origins": "api/test_app.py: over the whole application",
    "api.llamacpp.reply": "api/llamacpp/test_endpoints.py: over the whole application",
    "api.ollama.reply": "api/ollama/test_endpoints.py: over the whole application",
    "api.openai.conversation": "api/openai/test_chat.py: over the conversion of chat messages",
    "api.openai.endpoints": "api/openai/test_chat.py: over the whole application",
    "api.gateway.open_request": "api/gateway/test_gateway.py: with the gateway that owns it",
    "api.gateway.stream": "api/gateway/test_gateway.py: with the gateway that feeds it",
    "api.output.beam_search": "offline/test_beam.py: against transformers",
    "api.output.parsers.block": "api/output/parsers/test_lexer.py: cases of every family",
    "api.output.parsers.elements": "api/output/parsers/test_bare_spelling.py: calls of every family with elements",
    "api.output.parsers.families.gemma4": "api/output/parsers/test_spelling.py: forced calls of every family",
    "api.output.parsers.families.harmony": "api/output/parsers/test_lexer.py: cases of every family",
    "api.output.parsers.families.pythonic": "api/output/parsers/test_lexer.py: cases of every family",
    "api.output.parsers.family": "api/test_families.py: a family from a module",
    "api.output.parsers.registry": "api/output/parsers/test_lexer.py: cases of every family",
    "api.output.reply": "api/openai/test_completions.py: over the whole application",
    "api.output.service": "api/output/test_sse.py: over the whole application",
    "api.output.turn": "api/responses/test_reply.py: its parts are not useful alone",
    "cli": "e2e/test_own_code.py: needs processes",
    "config.peer_flags": "config/test_foreign_flags.py: every flag of every table",
    "config.vllm_flags": "config/test_foreign_flags.py: every flag of every table",
    "commands.bench.picture": "commands/bench/test_serve.py: with a load",
    "commands.client": "commands/test_talk.py: with a server that answers",
    "commands.launch": "e2e/test_followers.py: needs processes",
    "commands.tokenize": "e2e/test_terminal.py: needs a server",
    "commands.top": "commands/test_metrics.py: the numbers; e2e/test_terminal.py the screen",
    "ray.broker": "ray_cluster/test_backend.py: needs a Ray cluster, as do all of ray",
    "ray.door": "ray_cluster/test_serving.py: needs Ray Serve",
    "ray.engine_process": "ray_cluster/test_serving.py: needs Ray Serve",
    "ray.holder": "ray_cluster/test_backend.py: needs a Ray cluster",
    "ray.lead": "ray_cluster/test_backend.py: needs a Ray cluster",
    "ray.placing": "ray_cluster/test_placing.py: no folder of tests can be called ray",
    "ray.policy": "ray_cluster/test_policy.py: no folder of tests can be called ray",
    "ray.replica": "ray_cluster/test_serving.py: needs Ray Serve",
    "ray.roster": "ray_cluster/test_roster.py: no folder of tests can be called ray",
    "ray.serve_llm": "ray_cluster/test_serve_llm.py: no folder of tests can be called ray",
    "ray.serving": "ray_cluster/test_settings.py: what an operator says of an application",
    "engine.models.cut_mixers": "engine/executors/test_mixers.py: ranks have the states of one",
    "engine.models.description": "engine/executors/test_family_exactness.py: what longrope excludes",
    "engine.core.constraints": "test_constraints.py: with real grammars",
    "engine.core.plan_builder": "engine/core/test_scheduler.py: with the plans that it builds",
    "engine.core.loads": "engine/kv_connector/test_chain.py: with real connectors",
    "engine.device.sleep": "test_faults.py: needs an engine that serves",
    "engine.executors.functions": "engine/executors/test_reference.py: as operations",
    "engine.executors.vocabulary": "engine/executors/test_native.py: with a model, of one and two ranks",
    "engine.executors.registers": "engine/executors/test_reference.py: with operations",
    "engine.executors.weights": "engine/weights/test_quantized_exactness.py: with models, of every kind of matrix",
    "engine.gpu.decoder": "engine/gpu/test_exactness.py: with a model",
    "engine.gpu.shapes": "engine/gpu/test_device_steps.py: with the steps that have these shapes",
    "engine.gpu.state": "engine/gpu/test_device_steps.py: with its steps",
    "engine.gpu.weights": "engine/gpu/test_quantized.py: with a model",
    "engine.executors.expert_replicas": "test_expert_ranks.py: needs ranks",
    "engine.runner.kept_weights": "engine/gpu/test_kept_weights.py: with a model on the GPU's path",
    "engine.runner.kernel_checks": "engine/gpu/test_trial.py: with kernels that fail",
    "engine.kv_connector.file_meta": "test_group_tiers.py: files of items of several cache groups",
    "engine.kv_connector.p2p_listener": "engine/kv_connector/test_p2p_server.py: with the server that owns it",
    "engine.kv_connector.p2p_fetcher": "engine/kv_connector/test_p2p_link.py: two instances that talk",
    "engine.kv_connector.p2p_settings": "engine/kv_connector/test_p2p.py: options that are refused",
    "engine.kv_connector.p2p_wire": "engine/kv_connector/test_p2p.py: two instances that talk",
    "engine.kv_connector.p2p_worker": "engine/kv_connector/test_p2p.py: two instances that talk",
    "engine.kv_connector.block_storage": "engine/kv_connector/test_block_files.py: files with these names and headers",
    "engine.kv_connector.redis_blocks": "engine/kv_connector/test_redis.py: with a real server",
    "engine.kv_connector.redis_index": "engine/kv_connector/test_redis.py: with a real server",
    "engine.kv_connector.v1_core": "engine/kv_connector/test_v1.py: both halves of connectors",
    "engine.kv_connector.v1_meta": "engine/kv_connector/test_v1.py: both halves of connectors",
    "engine.kv_connector.v1_worker": "engine/kv_connector/test_v1.py: both halves of connectors",
    "engine.kv_connector.room": "engine/kv_connector/test_tier_histories.py: random histories of every tier",
    "engine.models.pieces": "engine/models/test_families.py: every family's page",
    "engine.models.program": "engine/models/test_lower.py: with the programs of descriptions",
    "engine.parallel.shared_memory": "engine/parallel/test_collectives.py: needs processes that share it",
    "engine.steps.encoder_steps": "test_pooling.py: against transformers",
    "engine.steps.host_steps": "engine/runner/test_runner.py: with a model",
    "engine.steps.pooling": "test_pooling.py: against transformers",
    "engine.steps.stage_steps": "test_stages.py: with models in several stages",
    "engine.steps.rows": "engine/steps/test_ngram.py: with the code that reads the rows",
    "engine.text.grammar_text": "engine/text/test_grammar.py: with the real library",
    "engine.text.thinking_budget": "engine/text/test_grammar.py: with the masks",
    "kernels.cpu.dense": "kernels/cpu/test_operations.py: the products of every kind",
    "kernels.triton.compile": "kernels/triton/test_compiled.py: the compiled kernels",
    "offline.outputs": "offline/test_llm_engine.py: what steps return",
    "offline.pooled": "test_pooling.py: against transformers",
    "procs.announcement": "e2e/test_lifecycle.py: over the output of a start",
    "procs.grammar_sandbox": "procs/test_grammar.py: with the actor that owns it",
    "procs.inline": "offline/test_llm.py: through LLM",
    "procs.killable": "procs/test_grammar.py: processes that are killed",
    "procs.shared_apis": "e2e/test_engines.py: needs processes",
    "procs.model_share": "procs/test_model_copy.py: both sides of a copy",
    "procs.sleep": "e2e/test_sleep.py: needs processes",
    "procs.supervisor": "e2e/test_lifecycle.py: needs processes",
    "procs.lead_link": "procs/test_follower.py: with the follower that owns it",
    "procs.weight_keeper": "engine/device/test_keeper.py: its side of the protocol",
    "procs.inline_ranks": "test_ranks.py: needs a process for each rank",
    "procs.topology": "test_layout.py: the table and the mailboxes",
    "route.app": "route/test_relay.py: a router before real servers",
    "route.ask": "route/test_relay.py: a router before real servers",
    "route.serve": "e2e/test_route.py: needs processes",
}

# A room whose modules are all tested by one file.
ROOMS_ELSEWHERE = {"engine.models.families": "engine/models/test_families.py: every family's page"}


def num_decisions(tree: ast.AST) -> int:
    """Number of branches, loops and other decisions in the functions of a module."""
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, _FUNCTION) for node in ast.walk(f)}
    return sum(isinstance(node, _DECISION) and id(node) in inside for node in ast.walk(tree))


def file_of_tests(module: str) -> Path:
    room, _, name = module.rpartition(".")
    return TESTS / room.replace(".", "/") / f"test_{name}.py"


def test_every_module_with_logic_has_a_test_file_at_the_mirrored_path() -> None:
    modules = {module: path for module, path in sources() if path.name != "__init__.py"}
    missing = {
        module
        for module, path in modules.items()
        if num_decisions(ast.parse(path.read_text())) > _MAX_WITHOUT_A_TEST
        and not file_of_tests(module).exists()
        and module.rpartition(".")[0] not in ROOMS_ELSEWHERE
    }
    assert not missing - ELSEWHERE.keys(), "write tests, or add the tests that cover the module to ELSEWHERE"
    assert not ELSEWHERE.keys() - missing, "remove these from ELSEWHERE"


def test_every_exception_names_an_existing_file_and_a_reason() -> None:
    places = [*ELSEWHERE.values(), *ROOMS_ELSEWHERE.values()]
    assert not [where for where in places if not (TESTS / where.partition(":")[0]).exists()]
    assert all(where.partition(": ")[2] for where in places)

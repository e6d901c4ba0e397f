"""Flags, sizes and the pure function that decides the rest."""

import argparse
from pathlib import Path

import msgspec
import pytest

from pagewire.config.config import Config, EngineConfig, MachineFacts, ModelFacts, parse_size
from pagewire.config.flags import add_flags, read_flags
from pagewire.config.machine import OVERRIDES, cpu_quota, machine_facts
from pagewire.config.resolve import resolve
from pagewire.errors import ConfigError

MODEL = ModelFacts(path="/m", name="m", max_position=4096, vocab_size=100, eos_token_ids=(2,), dtype="float16")


def parse(*argv: str) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_flags(parser.parse_args(argv))


def decide(config: Config, model: ModelFacts = MODEL) -> EngineConfig:
    return resolve(config, model, MachineFacts(num_cores=4))


def test_without_flags_it_is_the_default() -> None:
    assert parse() == Config()


def test_flags_become_typed_values() -> None:
    config = parse(
        "m", "--max-model-len", "2k", "--kv-cache-memory", "1.5G", "--no-enable-prefix-caching", "--port", "0"
    )
    assert config.model == "m" and config.max_model_len == 2048 and config.kv_cache_memory == 3 * 2**29
    assert config.port == 0 and not config.enable_prefix_caching
    assert parse("--served-model-name", "a", "b").served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "70000"], "--port: expected int <= 65535."),
        (["--port", "eighty"], "--port: expected int, got str."),
        (["--max-num-seqs", "0"], "--max-num-seqs: expected int >= 1."),
        (["--kv-cache-memory", "much"], "'much' is not a number or a size such as 512M, 2G or 8k."),
        (["--drain-timeout", "-1"], "--drain-timeout: expected float >= 0.0."),
    ],
)
def test_a_wrong_flag_gives_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert str(error.value) == sentence


def test_speculation_and_an_extension_exclude_each_other() -> None:
    assert decide(Config(speculative="ngram")).speculative == "ngram"
    with pytest.raises(ConfigError, match="--extension"):
        decide(Config(speculative="ngram", extension="module:Class"))


@pytest.mark.parametrize(
    "config",
    [Config(kv_connector=("host,size=1G",)), Config(extension="module:Class")],
    ids=lambda config: repr(config),
)
def test_what_knows_one_rank_is_refused_beside_several(config: Config) -> None:
    decide(config)
    with pytest.raises(ConfigError, match="knows the KV of one rank only"):
        decide(msgspec.structs.replace(config, tensor_parallel_size=2))


def test_ranks_share_the_cores() -> None:
    assert [decide(Config(tensor_parallel_size=size)).num_threads for size in (1, 2, 8)] == [4, 2, 1]
    assert decide(Config(tensor_parallel_size=2, threads=3)).num_threads == 3


def test_every_flag_has_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for name in Config.__struct_fields__:
        assert name == "model" or "--" + name.replace("_", "-") in text
    assert all(action.help for action in parser._actions)


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    assert parse().api_key == ("secret",)
    assert parse("--api-key", "other").api_key == ("other",)


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("8k", 8192), ("2G", 2**31), ("1.5 GiB", 3 * 2**29), ("3mb", 3 * 2**20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "2X", "G", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_resolve_fills_in_what_was_left_open() -> None:
    engine = decide(Config())
    assert engine.max_model_len == 4096 and engine.dtype == "float32" and engine.num_threads == 4
    assert engine.served_model_names == ("m",) and engine.eos_token_ids == (2,)
    assert decide(Config(dtype="float32", threads=1, max_model_len=100)).num_threads == 1


def test_parsers_are_the_templates_unless_one_says_another() -> None:
    model = msgspec.structs.replace(MODEL, tool_call_parser="mistral", reasoning_parser="qwen3")
    config = decide(Config(), model)
    assert (config.tool_call_parser, config.reasoning_parser) == ("mistral", "qwen3")
    config = decide(parse("--tool-call-parser", "pythonic", "--reasoning-parser", "none"), model)
    assert (config.tool_call_parser, config.reasoning_parser) == ("pythonic", "none")


def test_what_a_cpu_gets() -> None:
    assert decide(Config(device="cpu")).max_num_batched_tokens == 512
    assert decide(Config(device="cuda")).max_num_batched_tokens == 2048
    assert decide(Config(device="cpu", max_num_batched_tokens=64)).max_num_batched_tokens == 64
    int8 = decide(Config(device="cpu", quantization="int8"))
    assert int8.dtype == int8.kv_cache_dtype == "float32"
    assert decide(Config(device="cpu", dtype="float32", kv_cache_dtype="bfloat16")).kv_cache_dtype == "bfloat16"
    assert len({int8.kv_model_key, decide(Config(device="cpu", dtype="float32")).kv_model_key}) == 2
    with pytest.raises(ConfigError, match="--quantization int8 is for --device cpu"):
        decide(Config(quantization="int8", device="cuda"))


NO_COMPILER = {"has_compiler": False}
GPU = {"has_gpu": True}


@pytest.mark.parametrize(
    ("model", "machine", "flags", "expected"),
    [
        ({"dtype": "bfloat16"}, {}, {}, ("float32", "float32", "compiled", "float32")),
        ({"dtype": "float16"}, {}, {}, ("float32", "float32", "compiled", "float32")),
        ({"dtype": "bfloat16", "weight_bytes": 900}, {}, {}, ("float32", "float32", "compiled", "float32")),
        ({"dtype": "bfloat16"}, {}, {"dtype": "bfloat16"}, ("bfloat16", "float32", "compiled", "none")),
        ({"dtype": "bfloat16"}, {}, {"cpu_kernels": "torch"}, ("float32", "float32", "torch", "float32")),
        ({}, {}, {"cpu_kernels": "torch", "dtype": "bfloat16"}, ("bfloat16", "bfloat16", "torch", "none")),
        ({"dtype": "bfloat16"}, NO_COMPILER, {}, ("float32", "float32", "torch", "float32")),
        ({"dtype": "bfloat16", "weight_bytes": 900}, NO_COMPILER, {}, ("bfloat16", "bfloat16", "torch", "none")),
        ({"dtype": "float32", "weight_bytes": 900}, NO_COMPILER, {}, ("float32", "float32", "torch", "float32")),
        ({"weight_bytes": 900}, NO_COMPILER, {"quantization": "int8"}, ("float32", "float32", "torch", "none")),
        ({}, {}, {"quantization": "int8", "dtype": "bfloat16"}, ("bfloat16", "float32", "compiled", "none")),
        # transformers' own model widens its weights, compiler or not.
        ({"dtype": "bfloat16", "is_native": False}, {}, {}, ("float32", "float32", "compiled", "float32")),
        ({"weight_bytes": 900, "is_native": False}, {}, {}, ("bfloat16", "bfloat16", "compiled", "none")),
        ({"dtype": "bfloat16"}, GPU, {}, ("bfloat16", "bfloat16", None, "none")),
        ({"dtype": "float16"}, GPU, {}, ("bfloat16", "bfloat16", None, "none")),
        ({"dtype": "float32"}, GPU, {}, ("float32", "float32", None, "float32")),
        ({"dtype": "bfloat16"}, GPU, {"deterministic": True}, ("bfloat16", "bfloat16", None, "exact")),
        ({"dtype": "bfloat16"}, {}, {"dtype": "bfloat16", "deterministic": True},
         ("bfloat16", "float32", "compiled", "exact")),
    ],
)  # fmt: skip
def test_types_and_kernels(
    model: dict[str, object], machine: dict[str, object], flags: dict[str, object], expected: tuple[str | None, ...]
) -> None:
    """(of weights and KV, of activations, what computes, what is promised); a machine with 1,000 bytes of memory."""
    engine = resolve(
        Config(**flags),  # type: ignore[arg-type]
        msgspec.structs.replace(MODEL, **{"weight_bytes": 10} | model),
        msgspec.convert({"num_cores": 2, "memory_bytes": 1000} | machine, MachineFacts),
    )
    assert (engine.dtype, engine.arithmetic, engine.cpu_kernels, engine.batch_invariance) == expected
    assert engine.kv_cache_dtype == engine.dtype


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16"}, {"cpu_kernels": "torch"}, {"quantization": "int8"}])
@pytest.mark.parametrize("facts", [{}, NO_COMPILER, {"memory_bytes": 10}])
@pytest.mark.parametrize("model", [{}, {"is_native": False}, {"dtype": "bfloat16"}])
def test_instructions_for_bfloat16_decide_nothing(
    flags: dict[str, object], facts: dict[str, object], model: dict[str, object]
) -> None:
    """So a request has the same tokens on every processor."""
    model_facts = msgspec.structs.replace(MODEL, **{"weight_bytes": 10} | model)
    engines = [
        resolve(
            Config(**flags),  # type: ignore[arg-type]
            model_facts,
            msgspec.convert(
                {"num_cores": 1, "memory_bytes": 1000, "has_bfloat16": bf16, "has_amx": amx} | facts, MachineFacts
            ),
        )
        for bf16, amx in ((False, False), (True, False), (True, True))
    ]
    assert engines[0] == engines[1] == engines[2]


@pytest.mark.parametrize(
    ("flags", "facts", "model", "sentence"),
    [
        ({}, NO_COMPILER, {}, "needs a C compiler on a CPU \\(install gcc or clang\\)"),
        ({"cpu_kernels": "torch"}, {}, {}, "excludes --cpu-kernels torch, .* leave one of them out"),
        ({"speculative": "ngram"}, {}, {}, "excludes --speculative, .* leave one of them out"),
        ({"tensor_parallel_size": 2}, {}, {}, "excludes --tensor-parallel-size, .* leave one of them out"),
        ({}, {}, {"is_native": False}, "is not there for m, which runs in transformers"),
    ],
)
def test_deterministic_says_what_stands_in_its_way(
    flags: dict[str, object], facts: dict[str, object], model: dict[str, object], sentence: str
) -> None:
    def decide_here(config: Config) -> EngineConfig:
        machine = msgspec.convert({"num_cores": 1} | facts, MachineFacts)
        return resolve(config, msgspec.structs.replace(MODEL, **model), machine)

    decide_here(Config(**flags))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--deterministic {sentence}"):
        decide_here(Config(deterministic=True, **flags))  # type: ignore[arg-type]


def test_the_operator_is_warned_where_company_shows() -> None:
    model = msgspec.structs.replace(MODEL, dtype="bfloat16")
    assert decide(Config(), model).invariance_warning is None
    assert decide(Config(dtype="bfloat16", deterministic=True), model).invariance_warning is None
    for config in (
        Config(dtype="bfloat16"),
        Config(kv_cache_dtype="bfloat16"),
        Config(cpu_kernels="torch"),
        Config(quantization="int8"),
        Config(device="cuda"),
    ):
        assert "tokens may depend on what else is served" in str(decide(config, model).invariance_warning), config


def test_resolve_refuses_more_context_than_there_is() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 5000 is more than the 4096 tokens"):
        decide(Config(max_model_len=5000))


def test_facts_about_the_machine_can_be_replaced() -> None:
    found = machine_facts({})
    text = '{"num_cores": 7, "has_compiler": false, "memory_bytes": 5}'
    replaced = machine_facts({OVERRIDES: text})
    assert (replaced.num_cores, replaced.has_compiler, replaced.memory_bytes) == (7, False, 5)
    assert msgspec.structs.replace(
        replaced, num_cores=found.num_cores, has_compiler=found.has_compiler, memory_bytes=found.memory_bytes
    ) == found  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", '{"has_compiler": 3}', '{"cores": 3}'])
def test_what_is_no_fact_about_a_machine(text: str) -> None:
    with pytest.raises(ConfigError, match=OVERRIDES):
        machine_facts({OVERRIDES: text})


def test_a_control_group_grants_whole_cpus(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) > 1000
    for text, num in (("max 100000", 1 << 16), ("250000 100000", 2), ("50000 100000", 1), ("nonsense", 1 << 16)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert cpu_quota(tmp_path) == num

"""Command lines of other engines: every flag of the tables is taken, needless or refused in a sentence."""

import json
from collections.abc import Mapping

import pytest

from pagewire.cli import build_parser
from pagewire.config.config import Config, SourceOptions
from pagewire.config.flags import SETTINGS, read_flags
from pagewire.config.foreign_flags import Flag, NotNeeded, Refused, Taken, translate, translate_options
from pagewire.config.peer_flags import BY_NAME, LLAMA, SGLANG
from pagewire.config.vllm_flags import ALIASES, FLAGS
from pagewire.errors import ConfigError

_VALUES = {  # values that the flags take, by the words of their names
    "--ssl-cert-reqs": "0",
    "--nnodes": "1",
    "--kv-cache-dtype": "fp8_e4m3",
    "--scheduling-policy": "priority",
    "--generation-config": "vllm",
    "--node-rank": "0",
    "--gpu-memory-utilization": "0.8",
    "--mem-fraction-static": "0.8",
    "--dtype": "half",
    "--chat-template": "template.jinja",
    "--chat-template-file": "template.jinja",
    "--reasoning-budget": "0",
    "--config": "settings.toml",
}
_MODEL = ("--model", "--model-path", "-m", "--hf-repo")
_OBJECTS = {
    "--kv-events-config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///tmp/events"},
    "--speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
    "--override-generation-config": {"temperature": 0.5},
    "--default-chat-template-kwargs": {"enable_thinking": False},
}


def read(*argv: str) -> tuple[Config, list[str]]:
    found = translate(argv, BY_NAME, ALIASES)
    return read_flags(build_parser().parse_args(["serve", *found.arguments])), found.notes


def words(flag: Flag, name: str) -> list[str]:
    """The flag with a value of its kind."""
    if flag.kind in ("", "=?"):
        return [name]
    value: object = _VALUES.get(flag.name, "7")
    if flag.kind == "={}":
        value = json.dumps(_OBJECTS.get(flag.name, {"key": 1}))
    return [name, str(value)]


@pytest.mark.parametrize("flag", [*FLAGS, *SGLANG, *LLAMA], ids=lambda flag: flag.name)
def test_every_flag_is_taken_or_answered_in_one_sentence(flag: Flag) -> None:
    if flag.name == "--config":
        assert translate(["--config", "settings.toml"], BY_NAME, ALIASES) == (["--config=settings.toml"], [])
        return
    for name in flag.names:
        flag = BY_NAME[name]
        try:
            model = [] if flag.name in _MODEL else ["demo"]
            config, notes = read(*model, *words(flag, name))
        except ConfigError as error:
            assert isinstance(flag.answer, Refused) or flag.name in ("--chat-template",), error
            assert str(error).startswith(name) and str(error).endswith(".") and "\n" not in str(error)
            continue
        assert config.source.model in ("demo", "7")
        if isinstance(flag.answer, NotNeeded):
            assert len(notes) == 1 and notes[0].startswith(f"{name} is not needed: ") and notes[0].endswith(".")
        if config == Config(source=SourceOptions(model=config.source.model)) and not isinstance(flag.answer, Refused):
            is_default = isinstance(flag.answer, Taken) and flag.answer.convert is None  # 1 node is the default
            assert notes or is_default or config.source.model == "7", "a flag went without effect and without a word"


def test_a_command_line_of_vllm() -> None:
    config, notes = read(
        "--served_model_name", "a", "b", "--model", "Qwen/Qwen3-0.6B", "-tp=2", "-dp", "3", "--max-model-len", "4096",
        "--gpu-memory-utilization", "0.85", "--trust-remote-code", "--enforce-eager", "--enable-auto-tool-choice",
        "--tool-call-parser", "qwen3_xml", "--reasoning-parser=deepseek_r1", "--no-enable-prefix-caching", "-O3",
        "--kv-cache-memory-bytes", "1G", "--max-num-queued-reqs=5", "--api-server-count", "2", "--host", "0.0.0.0",
        "--allowed-origins", '["https://a", "https://b"]', "--disable-uvicorn-access-log", "--shutdown-timeout", "5",
        "--speculative-config.method", "ngram", "--spec-tokens", "3", "--kv-offloading-size", "1.5",
        "--no-async-scheduling", "--attention-backend", "FLASHINFER", "--api-key", "k", "l",
        "--override-generation-config.temperature", "0.5", "--port", "9000", "--quantization", "awq",
        "--distributed-executor-backend", "ray",
    )  # fmt: skip
    engine = config.engine
    assert config.source.model == "Qwen/Qwen3-0.6B" and config.source.served_model_name == ("a", "b")
    assert (engine.tensor_parallel_size, engine.data_parallel_size, engine.max_model_len) == (2, 3, 4096)
    assert engine.gpu_memory_utilization == 0.85 and not engine.enable_prefix_caching and engine.quantization is None
    assert (engine.tool_call_parser, engine.reasoning_parser) == ("qwen3_coder", "deepseek_r1")
    assert engine.kv_cache_memory == 2**30 and engine.max_queued_requests == 5 and engine.pipeline_depth == 1
    assert engine.speculative == "ngram,tokens=3" and engine.kv_connector == ("host,size=1536M",)
    assert engine.attention_backend == "flashinfer" and engine.override_generation_config == {"temperature": 0.5}
    assert config.listen.host == "0.0.0.0" and config.listen.port == 9000 and config.keys.api_key == ("k", "l")
    assert config.clients.allowed_origins == ("https://a", "https://b") and not config.clients.access_log
    assert config.service.api_processes == 2 and config.service.drain_timeout == 5 and config.service.backend == "ray"
    assert [note.partition(":")[0].removesuffix(" is not needed") for note in notes] == [
        "--trust-remote-code", "--enforce-eager", "--enable-auto-tool-choice", "-O", "--quantization"
    ]  # fmt: skip


def test_a_command_line_of_sglang_and_one_of_llama_server() -> None:
    config, _ = read("--model-path", "m", "--tp", "2", "--mem-fraction-static", "0.7", "--context-length", "100")
    assert config.source.model == "m" and config.engine.tensor_parallel_size == 2
    assert config.engine.gpu_memory_utilization == 0.7 and config.engine.max_model_len == 100
    config, notes = read("-m", "m.gguf", "-c", "0", "-ngl", "99", "-np", "4", "--temp", "0.5", "--top-k", "4", "-fa")
    assert config.source.model == "m.gguf" and config.engine.max_num_seqs == 4 and len(notes) == 3
    assert config.engine.override_generation_config == {"temperature": 0.5, "top_k": 4}


def test_the_models_own_tokenizer_may_be_named() -> None:
    for argv in (
        ["a/b", "--tokenizer", "a/b"],
        ["--tokenizer=a/b", "--model=a/b"],
        ["-m", "m", "--tokenizer-path", "m"],
    ):
        config, notes = read(*argv)
        assert config.source.model in argv[0] + argv[1] and not notes
    for argv in (["a/b", "--tokenizer", "c/d"], ["a", "--served-model-name", "c", "--tokenizer", "c"]):
        with pytest.raises(
            ConfigError, match=r"--tokenizer is not there: the tokenizer in the model's folder is used\."
        ):
            read(*argv)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--hf-overrides", '{"a": 1}'],
            "--hf-overrides is not there: set the fields in the checkpoint's config.json.",
        ),
        (["--hf-overrides", "{a"], "--hf-overrides needs JSON, not '{a'."),
        (["--enforce-eager=3"], "--enforce-eager is a switch and takes no value."),
        (["--seed"], "--seed needs a value."),
        (["--kv-offloading-size", "much"], "--kv-offloading-size much: needs a number of GiB."),
        (["--temp", "warm"], "--temp warm: needs a number."),
        (["-r", "1"], "-r is not there: on the other machines run `pagewire launch --join tcp://HOST:PORT`."),
        (
            ["--config", "a.yaml"],
            "--config a.yaml: a --config file is TOML here: write `port = 8000` for `port: 8000`.",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        translate(argv, BY_NAME, ALIASES)
    assert str(error.value) == sentence


def test_our_own_command_lines_stay_as_they_are() -> None:
    for setting in SETTINGS.values():
        if setting.name != "model" and setting.flag not in BY_NAME:
            assert translate([setting.flag, "-1", "x"], BY_NAME, ALIASES) == ([setting.flag, "-1", "x"], [])
    assert translate(["m", "--explain", "--", "--seed"], BY_NAME, ALIASES).arguments == [
        "m",
        "--explain",
        "--",
        "--seed",
    ]
    assert translate(["--kv_eviction=lfu"], BY_NAME, ALIASES).arguments == ["--kv-eviction=lfu"]
    assert translate(["--nonsense_1", "x"], BY_NAME, ALIASES).arguments == ["--nonsense_1", "x"]


def test_keyword_arguments_of_vllm() -> None:
    given: Mapping[str, object] = {
        "trust_remote_code": True, "dtype": "half", "tensor_parallel_size": 2, "enforce_eager": True, "seed": None,
        "speculative_config": {"method": "ngram"}, "hf_overrides": {}, "kv_cache_memory_bytes": 2**20, "threads": 1,
    }  # fmt: skip
    settings, notes = translate_options(given, BY_NAME)
    assert settings == {
        "dtype": "float16", "tensor_parallel_size": 2, "speculative": "ngram", "kv_cache_memory": 2**20,
        "threads": 1,
    }  # fmt: skip
    assert [note.partition(" ")[0] for note in notes] == ["trust_remote_code", "enforce_eager"]
    with pytest.raises(ConfigError, match="hf_overrides is not there"):
        translate_options({"hf_overrides": {"a": 1}}, BY_NAME)

"""Settings, their reasons and sources, and `--config` files."""

import argparse
from pathlib import Path

import msgspec
import pytest

from pagewire.commands.explain import explain, settings, shown
from pagewire.config.config import Config, MachineFacts, ModelFacts, NumaNode, Purpose, ServerConfig
from pagewire.config.flags import SETTINGS, add_flags, make_config, read_settings
from pagewire.config.resolve import resolve, resolve_http
from pagewire.errors import ConfigError

MODEL = ModelFacts(
    path="/m",
    name="m",
    max_position=4096,
    vocab_size=100,
    eos_token_ids=(2,),
    checkpoint_dtype="float16",
    wide_bytes=1000,
)
CPU = MachineFacts(num_cores=4)
BARE_CPU = MachineFacts(num_cores=4, has_compiler=False)
GPU = MachineFacts(num_cores=4, has_gpu=True)


def parse(*argv: str) -> tuple[Config, dict[str, str]]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_settings(parser.parse_args(argv))


def server(config: Config, machine: MachineFacts, model: ModelFacts = MODEL) -> ServerConfig:
    return ServerConfig(engine=resolve(config, model, machine), http=resolve_http(config, (), ()))


def rows(config: Config, machine: MachineFacts, sources: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {row[0]: row[1:] for row in settings(config, server(config, machine), machine, sources)}


@pytest.mark.parametrize("machine", [CPU, BARE_CPU, GPU], ids=["cpu", "no compiler", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("is_encoder", [False, True], ids=["decoder", "encoder"])
def test_every_decided_setting_has_a_reason(machine: MachineFacts, dtype: str, is_encoder: bool) -> None:
    model = msgspec.structs.replace(MODEL, checkpoint_dtype=dtype, purpose=Purpose(is_encoder=is_encoder))
    reasons = {row[0]: row[1:] for row in settings(Config(), server(Config(), machine, model), machine, {})}
    assert reasons.keys() >= SETTINGS.keys()
    for name, setting in SETTINGS.items():
        value, reason = reasons[name]
        assert value == shown(setting.default) or reason != "default", f"{name} = {value}: {reason}"


def test_reasons_follow_the_decision() -> None:
    assert rows(Config(), CPU, {})["dtype"] == ("float32", "what a CPU computes in; the matrices stay float32")
    bare = rows(Config(), BARE_CPU, {})
    assert bare["dtype"] == ("bfloat16", "as many bits as the checkpoint's float16, with its own range")
    assert (
        bare["cpu_kernels"][0] == "torch" and "there is no C compiler (install gcc or clang)" in bare["cpu_kernels"][1]
    )
    assert rows(Config(), CPU, {})["cpu_kernels"] == ("avx2", "the best of those that work here: avx2, portable")
    assert rows(Config(), CPU, {})["batch_invariance"][0] == "exact"
    assert rows(Config(), GPU, {})["batch_invariance"][0] == "none"
    wide = msgspec.structs.replace(MODEL, checkpoint_dtype="float32")
    reason = {row[0]: row[1:] for row in settings(Config(), server(Config(), GPU, wide), GPU, {})}["dtype"]
    assert reason[0] == "bfloat16" and "--dtype float32 keeps the checkpoint's" in reason[1]
    assert rows(Config(), GPU, {})["max_num_batched_tokens"] == ("2048", "the value for a GPU")
    assert rows(make_config(device="cpu"), GPU, {"device": "--device"})["block_size"] == ("16", "the value for a CPU")
    assert "shared by 2 ranks" in rows(make_config(tensor_parallel_size=2), CPU, {})["threads"][1]
    nodes = (NumaNode(0, ((0,), (1,))), NumaNode(1, ((2,), (3,))))
    numa = MachineFacts(num_cores=4, online_cpus=(0, 1, 2, 3), numa_nodes=nodes)
    assert rows(Config(), numa, {})["cpu_bind"] == ("none", "there is one rank")
    both = rows(make_config(tensor_parallel_size=2), numa, {})
    assert both["cpu_bind"] == ("0-1 | 2-3", "the CPUs of 2 NUMA nodes, shared by 2 ranks")
    assert rows(make_config(tensor_parallel_size=8), numa, {})["cpu_bind"][1].startswith("there are fewer usable cores")


def test_the_source_of_a_setting_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('max-num-seqs = 3\nkv_cache_memory = "2G"\nenable_prefix_caching = false\napi_key = ["a", "b"]\n')
    config, sources = parse("--config", str(file), "--max-num-seqs", "5")
    assert config == make_config(
        max_num_seqs=5, kv_cache_memory=2 << 30, enable_prefix_caching=False, api_key=("a", "b")
    )
    reasons = rows(config, CPU, sources)
    assert reasons["max_num_seqs"] == ("5", "--max-num-seqs") and reasons["enable_prefix_caching"] == ("no", str(file))
    assert reasons["api_key"] == ("2 of them", str(file))
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    config, sources = parse()
    text = explain(config, server(config, CPU), CPU, sources)
    assert "secret" not in text and "PAGEWIRE_API_KEY" in text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_num_seqs = 0", "{file}: max_num_seqs: expected int >= 1."),
        ("max_seqs = 3", "--config {file}: there is no setting max_seqs; is it max_num_seqs?"),
        ("[serve]\nport = 3", "--config {file}: there is no setting serve"),
        ("port = ", "--config {file} is no valid TOML: "),
        ('kv_cache_memory = "much"', "'much' is not a number or a size"),
        ('config = "other.toml"', "--config {file}: there is no setting config"),
    ],
)
def test_an_invalid_file_gives_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse("--config", str(file))
    assert str(error.value).startswith(sentence.format(file=file))
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("--config", str(tmp_path / "nowhere.toml"))

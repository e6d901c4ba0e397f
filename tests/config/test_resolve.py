"""Settings that follow from the model, the machine and the other settings."""

import msgspec
import pytest
from msgspec.structs import replace

from pagewire.config.config import Config, EngineConfig, MachineFacts, Purpose, SamplingDefaults
from pagewire.config.flags import make_config
from pagewire.config.resolve import note_on_folders, resolve
from pagewire.errors import ConfigError

from .test_config import GPU, MODEL, NO_COMPILER, decide, parse


def test_speculation_and_an_extension_exclude_each_other() -> None:
    assert decide(make_config(speculative="ngram")).speculative == "ngram"
    with pytest.raises(ConfigError, match="--extension"):
        decide(make_config(speculative="ngram", extension="module:Class"))


def test_sockets_of_one_machine_are_refused_with_several_machines() -> None:
    flags: dict[str, object] = {"kv_connector": ("host,size=1G", "p2p,peer=/x"), "device": "cpu"}
    network = {**flags, "kv_connector": ("p2p,serve=tcp://10.0.0.1:7100,peer=named,key-file=k",)}
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        decide(make_config(**flags, **sizes))
        for several, flag in (({"nnodes": 2}, "--nnodes"), ({"backend": "ray"}, "--backend ray")):
            with pytest.raises(
                ConfigError, match=rf"peer=/x is a socket of one machine, and {flag} puts ranks on others"
            ):
                decide(make_config(**flags, **sizes, **several))
            decide(make_config(**network, **sizes, **several))
    for local in ("p2p,serve=/x", "p2p,peer=/x"):
        with pytest.raises(ConfigError, match="is a socket of one machine, and --backend ray puts ranks on others"):
            decide(make_config(backend="ray", kv_connector=(local,)))
    decide(make_config(backend="ray", kv_connector=network["kv_connector"]))


def test_the_first_rank_has_the_folder_of_the_disk_tier_which_the_core_looks_at() -> None:
    disk, shared = "disk,path=d,size=1M", "shared,path=/s,size=1M"
    for sizes in ({}, {"tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match=r"--kv-connector disk is for .*; leave it or --backend ray out, or give"):
            decide(make_config(**sizes, backend="ray", kv_connector=(disk,)))
    decide(make_config(tensor_parallel_size=2, nnodes=2, kv_connector=(disk,)))  # where the lead has the first rank
    found = decide(make_config(backend="ray", kv_connector=("host,size=1M", shared)))
    note = note_on_folders(found, "--backend ray")
    assert note.startswith("--kv-connector shared: /s must be the same folder on all machines") and "ray puts" in note
    assert not note_on_folders(decide(make_config(kv_connector=(disk,))), "--backend ray")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "with --pipeline-parallel-size: no rank has all layers and the logits"),
        ({"kv_domains": 2, "tensor_parallel_size": 2}, "with --kv-domains: ranks have tokens of their own"),
        ({"speculative": "ngram", "tensor_parallel_size": 2}, "with --speculative with several ranks: ranks propose"),
        ({"scripted": "x.json"}, "--runner-plugin has no meaning beside --scripted"),
    ],
)
def test_what_a_runner_plugin_excludes(flags: dict[str, object], sentence: str) -> None:
    decide(make_config(runner_plugin="m:C", speculative="ngram"))
    decide(make_config(runner_plugin="m:C", tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=sentence):
        decide(make_config(runner_plugin="m:C", device="cpu", **flags))


_RANKS: dict[str, object] = {"tensor_parallel_size": 2, "device": "cpu"}
_EXPERTS = {**_RANKS, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel deals experts .* there is one"),
        *(
            ({**flags, "all2all_backend": way}, f"--all2all-backend {way} is for .* --enable-expert-parallel and --kv-")
            for flags in ({}, _EXPERTS, {**_RANKS, "kv_domains": 2})
            for way in ("all-to-all", "allgather_reducescatter")
        ),
        ({**_RANKS, "expert_replicas": 1}, "--expert-replicas 1 needs --enable-expert-parallel"),
        ({**_EXPERTS, "expert_replicas": 2, "deterministic": True}, "--deterministic excludes it"),
        ({**_EXPERTS, "expert_replicas": 1, "load_format": "dummy"}, "which --load-format dummy lacks"),
    ],
)
def test_what_experts_of_ranks_need(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        decide(make_config(**flags))


def test_replicas_of_experts_change_bits_where_ranks_sum() -> None:
    assert decide(make_config(**_EXPERTS)).batch_invariance == "exact"
    assert decide(make_config(expert_replicas=1, **_EXPERTS)).batch_invariance != "exact"


_DOMAINS = {**_RANKS, "kv_domains": 2}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"kv_domains": 2}, "--kv-domains 2: each domain has one rank so far, and --tensor-parallel-size is 1; give"),
        ({**_DOMAINS, "tensor_parallel_size": 4}, "and --tensor-parallel-size is 4"),
        (
            {**_DOMAINS, "pipeline_parallel_size": 2},
            "is not there with --pipeline-parallel-size: a domain without tokens",
        ),
        ({**_DOMAINS, "speculative": "ngram"}, "is not there with --speculative: only a domain's own rank"),
        (
            {**_DOMAINS, "kv_connector": ("host,size=1M", "p2p,serve=x")},
            "is not there with --kv-connector p2p: peers name an engine",
        ),
    ],
)
def test_what_domains_lack(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        decide(make_config(**flags))


def test_domains_on_several_machines_have_tiers_that_all_of_them_see() -> None:
    assert decide(make_config(**_DOMAINS, nnodes=2, kv_connector=("host,size=1M", "redis,url=unix:///r,size=1M")))
    for name in ("disk", "shared"):
        with pytest.raises(ConfigError, match=rf"--kv-connector {name} with --kv-domains is for .* or --nnodes out"):
            decide(make_config(**_DOMAINS, nnodes=2, kv_connector=("host,size=1M", f"{name},path=d,size=1M")))


def test_domains_are_for_described_models() -> None:
    assert on_gpu(90, tensor_parallel_size=2, kv_domains=2).kv_domains == 2
    with pytest.raises(ConfigError, match="--kv-domains 2 is not there with --attention-backend torch"):
        on_gpu(90, tensor_parallel_size=2, kv_domains=2, attention_backend="torch")
    with pytest.raises(ConfigError, match="transformers computes m, whose layers cannot be divided"):
        decide(make_config(**_DOMAINS), msgspec.structs.replace(MODEL, is_native=False))
    found = decide(make_config(**_DOMAINS))
    assert found.kv_domains == found.num_ranks == 2 and found.batch_invariance == "exact"


def test_domains_that_exchange_tokens_sum_nothing_over_ranks() -> None:
    """So replicas change no bits."""
    dealt = {**_DOMAINS, **_EXPERTS, "expert_replicas": 1}
    found = decide(make_config(**dealt, deterministic=True))
    assert found.exchanges_tokens and found.batch_invariance == "exact"
    assert decide(make_config(**dealt, all2all_backend="all-to-all")).weights_key == found.weights_key
    assert decide(make_config(**dealt)).batch_invariance == "exact"
    summed = {**dealt, "all2all_backend": "allgather_reducescatter"}
    other = decide(make_config(**summed))
    assert not other.exchanges_tokens and other.batch_invariance != "exact"
    assert other.weights_key != found.weights_key, "ranks have parts of shared experts"
    with pytest.raises(ConfigError, match="--deterministic excludes it"):
        decide(make_config(**summed, deterministic=True))
    assert not decide(make_config(**_DOMAINS)).exchanges_tokens


def test_ranks_share_the_cores() -> None:
    assert [decide(make_config(tensor_parallel_size=size)).num_threads for size in (1, 2, 8)] == [4, 2, 1]
    assert decide(make_config(tensor_parallel_size=2, threads=3)).num_threads == 3


def test_resolve_fills_in_open_settings() -> None:
    engine = decide(Config())
    assert engine.max_model_len == 4096 and engine.dtype == "float32" and engine.num_threads == 4
    assert engine.served_model_names == ("m",) and engine.model.eos_token_ids == (2,)
    assert decide(make_config(dtype="float32", threads=1, max_model_len=100)).num_threads == 1


def test_parsers_are_those_of_the_template_unless_set() -> None:
    model = msgspec.structs.replace(MODEL, tool_calls_shown="mistral", reasoning_shown="qwen3")
    config = decide(Config(), model)
    assert (config.tool_call_parser, config.reasoning_parser) == ("mistral", "qwen3")
    config = decide(parse("--tool-call-parser", "pythonic", "--reasoning-parser", "none"), model)
    assert (config.tool_call_parser, config.reasoning_parser) == ("pythonic", "none")


def test_defaults_on_a_cpu() -> None:
    assert decide(make_config(device="cpu")).max_num_batched_tokens == 512
    assert decide(make_config(device="cuda")).max_num_batched_tokens == 2048
    assert decide(make_config(device="cpu", max_num_batched_tokens=64)).max_num_batched_tokens == 64
    int8 = decide(make_config(device="cpu", quantization="int8"))
    assert int8.dtype == int8.kv_cache_dtype == "float32"
    assert decide(make_config(device="cpu", dtype="float32", kv_cache_dtype="bfloat16")).kv_cache_dtype == "bfloat16"
    assert len({int8.kv_model_key, decide(make_config(device="cpu", dtype="float32")).kv_model_key}) == 2
    with pytest.raises(ConfigError, match="--quantization int8 is for --device cpu"):
        decide(make_config(quantization="int8", device="cuda"))


@pytest.mark.parametrize(
    ("model", "machine", "flags", "expected"),
    [
        ({"checkpoint_dtype": "bfloat16"}, {}, {}, ("bfloat16", "bfloat16", "compiled", "exact")),
        ({"checkpoint_dtype": "float16"}, {}, {}, ("float32", "float32", "compiled", "exact")),
        ({"checkpoint_dtype": "bfloat16", "wide_bytes": 900}, {}, {}, ("bfloat16", "bfloat16", "compiled", "exact")),
        ({"checkpoint_dtype": "bfloat16"}, {}, {"dtype": "float32"}, ("float32", "float32", "compiled", "exact")),
        ({"checkpoint_dtype": "bfloat16", "attends_in_c": False}, {}, {}, ("bfloat16", "bfloat16", "compiled", "none")),
        ({"checkpoint_dtype": "bfloat16"}, {}, {"cpu_kernels": "torch"}, ("float32", "float32", "torch", "float32")),
        ({}, {}, {"cpu_kernels": "torch", "dtype": "bfloat16"}, ("bfloat16", "bfloat16", "torch", "none")),
        ({"checkpoint_dtype": "bfloat16"}, NO_COMPILER, {}, ("float32", "float32", "torch", "float32")),
        ({"checkpoint_dtype": "bfloat16", "wide_bytes": 900}, NO_COMPILER, {},
         ("bfloat16", "bfloat16", "torch", "none")),
        ({"checkpoint_dtype": "float32", "wide_bytes": 900}, NO_COMPILER, {},
         ("float32", "float32", "torch", "float32")),
        ({"wide_bytes": 900}, NO_COMPILER, {"quantization": "int8"}, ("float32", "float32", "torch", "none")),
        ({}, {}, {"quantization": "int8", "dtype": "bfloat16"}, ("bfloat16", "bfloat16", "compiled", "exact")),
        # transformers' own model widens its weights, compiler or not.
        ({"checkpoint_dtype": "bfloat16", "is_native": False}, {}, {}, ("float32", "float32", "compiled", "float32")),
        ({"wide_bytes": 900, "is_native": False}, {}, {}, ("bfloat16", "bfloat16", "compiled", "none")),
        ({"checkpoint_dtype": "bfloat16"}, GPU, {}, ("bfloat16", "bfloat16", None, "none")),
        ({"checkpoint_dtype": "float16"}, GPU, {}, ("bfloat16", "bfloat16", None, "none")),
        ({"checkpoint_dtype": "float32"}, GPU, {}, ("bfloat16", "bfloat16", None, "none")),
        ({"checkpoint_dtype": "float32"}, GPU, {"dtype": "float32"}, ("float32", "float32", None, "float32")),
        ({"checkpoint_dtype": "float32", "purpose": Purpose(is_encoder=True)}, GPU, {},
         ("float32", "float32", None, "float32")),
        ({"checkpoint_dtype": "bfloat16"}, GPU, {"deterministic": True}, ("bfloat16", "bfloat16", None, "exact")),
        ({"checkpoint_dtype": "bfloat16"}, {}, {"dtype": "bfloat16", "deterministic": True},
         ("bfloat16", "bfloat16", "compiled", "exact")),
    ],
)  # fmt: skip
def test_types_and_kernels(
    model: dict[str, object], machine: dict[str, object], flags: dict[str, object], expected: tuple[str | None, ...]
) -> None:
    """`expected`: (weights and KV, what is multiplied, kernels, batch invariance) with 1,000 bytes of memory."""
    engine = resolve(
        make_config(**flags),
        msgspec.structs.replace(MODEL, **{"wide_bytes": 10} | model),
        msgspec.convert({"num_cores": 2, "memory_bytes": 1000} | machine, MachineFacts),
    )
    assert (engine.dtype, engine.arithmetic, engine.kernels, engine.batch_invariance) == expected
    assert engine.kv_cache_dtype == engine.dtype


@pytest.mark.parametrize(
    ("asked", "facts", "level"),
    [
        ("auto", {}, "avx512"),
        ("auto", NO_COMPILER, None),
        ("auto", NO_COMPILER | {"shipped_levels": ("amx", "avx2")}, "avx2"),
        ("avx2", {}, "avx2"),
        ("avx2", NO_COMPILER | {"shipped_levels": ("avx512", "avx2")}, "avx2"),
        ("torch", {}, None),
        ("amx-emulated", {}, "amx-emulated"),
        ("auto", {"has_gpu": True}, None),
    ],
)
def test_the_level_of_the_c_kernels(asked: str, facts: dict[str, object], level: str | None) -> None:
    machine = msgspec.convert({"num_cores": 1, "cpu_levels": ["avx512", "avx2", "portable"]} | facts, MachineFacts)
    engine = resolve(make_config(cpu_kernels=asked), MODEL, machine)
    assert engine.cpu_level == level
    assert (engine.no_cpu_level is not None) == (asked == "auto" and level is None and not machine.has_gpu)


@pytest.mark.parametrize(
    ("asked", "facts", "sentence"),
    [
        ("amx", {}, "amx: this CPU .* lacks instructions .* What works here: auto, avx2, portable, torch\\."),
        ("avx2", NO_COMPILER, "avx2: the installation has no library .* What works here: auto, torch\\."),
        ("amx-emulated", NO_COMPILER, "no C compiler .* What works here: auto, torch\\."),
        ("i8mm", {}, "i8mm: this CPU .* lacks"),
    ],
)
def test_a_level_that_cannot_be_had_is_refused(asked: str, facts: dict[str, object], sentence: str) -> None:
    machine = msgspec.convert({"num_cores": 1} | facts, MachineFacts)
    with pytest.raises(ConfigError, match=f"--cpu-kernels .*{sentence}"):
        resolve(make_config(cpu_kernels=asked), MODEL, machine)


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16"}, {"cpu_kernels": "torch"}, {"quantization": "int8"}])
@pytest.mark.parametrize("facts", [{}, NO_COMPILER, {"memory_bytes": 10}])
@pytest.mark.parametrize("model", [{}, {"is_native": False}, {"checkpoint_dtype": "bfloat16"}])
def test_bfloat16_instructions_change_no_setting(
    flags: dict[str, object], facts: dict[str, object], model: dict[str, object]
) -> None:
    """So a request has the same tokens on every processor."""
    model_facts = msgspec.structs.replace(MODEL, **{"wide_bytes": 10} | model)
    engines = [
        resolve(
            make_config(**flags),
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
        ({}, NO_COMPILER, {}, "needs the C kernels on a CPU, but .* no C compiler \\(install gcc or clang\\)"),
        ({"cpu_kernels": "torch"}, {}, {}, "excludes --cpu-kernels torch, .* leave one of them out"),
        ({"speculative": "ngram"}, GPU, {}, "excludes --speculative, .* leave one of them out"),
        ({"tensor_parallel_size": 2}, GPU, {}, "excludes --tensor-parallel-size, .* leave one of them out"),
        ({}, {}, {"is_native": False}, "is not there for m, which runs in transformers"),
        ({}, {}, {"attends_in_c": False}, "is not there for m, whose attention runs in torch"),
    ],
)
def test_deterministic_names_what_excludes_it(
    flags: dict[str, object], facts: dict[str, object], model: dict[str, object], sentence: str
) -> None:
    def decide_here(config: Config) -> EngineConfig:
        machine = msgspec.convert({"num_cores": 1} | facts, MachineFacts)
        return resolve(config, msgspec.structs.replace(MODEL, **model), machine)

    decide_here(make_config(**flags))
    with pytest.raises(ConfigError, match=f"--deterministic {sentence}"):
        decide_here(make_config(deterministic=True, **flags))


def test_the_operator_is_warned_if_tokens_may_depend_on_the_batch() -> None:
    model = msgspec.structs.replace(MODEL, checkpoint_dtype="bfloat16")
    assert decide(Config(), model).invariance_warning is None
    for config in (make_config(kv_cache_dtype="bfloat16"), make_config(quantization="int8")):
        assert decide(config, model).invariance_warning is None
    for config in (make_config(cpu_kernels="torch"), make_config(device="cuda")):
        assert "tokens may depend on what else is served" in str(decide(config, model).invariance_warning), config


@pytest.mark.parametrize(
    ("flags", "facts", "model", "sentence"),
    [
        ({"speculative": "ngram"}, GPU, {}, "--speculative is not there for GPUs with --pipeline-parallel-size"),
        ({"speculative": "ngram"}, {}, {"has_states": True}, "--speculative is not there for m with --pipeline-par"),
    ],
)
def test_what_stages_cannot_do_is_refused(
    flags: dict[str, object], facts: dict[str, object], model: dict[str, object], sentence: str
) -> None:
    machine = msgspec.convert({"num_cores": 1} | facts, MachineFacts)
    with pytest.raises(ConfigError, match=sentence):
        resolve(make_config(pipeline_parallel_size=2, **flags), msgspec.structs.replace(MODEL, **model), machine)


def test_threads_are_shared_by_the_ranks_of_all_stages() -> None:
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    config = decide(make_config(**sizes))
    assert config.num_ranks == 4 and config.num_threads == decide(make_config(tensor_parallel_size=4)).num_threads


def test_resolve_refuses_more_context_than_the_model_has() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 5000 is more than the 4096 tokens"):
        decide(make_config(max_model_len=5000))


def on_gpu(capability: int | None, **flags: object) -> EngineConfig:
    machine = MachineFacts(num_cores=1, has_gpu=True, gpu_capability=capability)
    return resolve(make_config(**flags), msgspec.structs.replace(MODEL, checkpoint_dtype="bfloat16"), machine)


def test_types_follow_from_the_gpus_capability() -> None:
    assert on_gpu(None, kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    assert on_gpu(89, kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    assert on_gpu(80).dtype == "bfloat16" and on_gpu(75).dtype == on_gpu(75).kv_cache_dtype == "float32"
    assert on_gpu(75, dtype="float16").dtype == "float16"
    with pytest.raises(
        ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or newer, and this one has 8\.6"
    ):
        on_gpu(86, kv_cache_dtype="fp8")
    with pytest.raises(
        ConfigError, match=r"bfloat16 needs a GPU of compute capability 8\.0 .* 7\.5: choose float32 or"
    ):
        on_gpu(75, dtype="bfloat16")
    with pytest.raises(ConfigError, match="fp8 is for GPUs"):
        on_gpu(75, kv_cache_dtype="fp8", device="cpu")


def test_an_attention_backend_needs_a_gpu_and_its_package() -> None:
    def decide_here(backend: str, *packages: str, **flags: object) -> EngineConfig:
        machine = MachineFacts(num_cores=1, has_gpu=True, attention_packages=packages)
        return resolve(make_config(attention_backend=backend, **flags), MODEL, machine)

    for backend in ("auto", "triton", "torch"):
        assert decide_here(backend).block_size == 64
    assert decide_here("flashinfer", "flashinfer", "flash-attn").block_size == 64
    assert decide_here("flash-attn", "flash-attn").block_size == 256, "FlashAttention takes no smaller pages"
    with pytest.raises(ConfigError, match="flash-attn needs the package flash-attn, which is not installed; install"):
        decide_here("flash-attn", "flashinfer")
    with pytest.raises(ConfigError, match="flashinfer needs the package flashinfer-python"):
        decide_here("flashinfer")
    with pytest.raises(ConfigError, match="--attention-backend torch is for GPUs; leave it out"):
        decide_here("torch", device="cpu")
    with pytest.raises(ConfigError, match="--deterministic excludes --attention-backend torch, whose sums"):
        decide_here("torch", deterministic=True)
    assert decide_here("triton", deterministic=True).deterministic


def test_sampling_parameters_of_requests_that_give_none() -> None:
    recommended = replace(MODEL, sampling=SamplingDefaults(temperature=0.6, top_k=20))
    assert decide(make_config(), recommended).model.sampling == recommended.sampling
    plain = decide(make_config(generation_config="vllm"), recommended).model.sampling
    assert plain == SamplingDefaults()
    changed = decide(make_config(override_generation_config={"temperature": 0.2}), recommended).model.sampling
    assert changed == SamplingDefaults(temperature=0.2, top_k=20)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ({"warmth": 1}, "warmth is not one of temperature, top_k, top_p, min_p, repetition_penalty."),
        ({"top_p": 0}, "top_p = 0 is not between 0 and 1."),
        ({"temperature": -1}, "temperature = -1 is not between 0 and 100."),
        ({"temperature": "hot"}, "Expected float, got str - at $.temperature."),
    ],
)
def test_an_override_out_of_bounds_is_refused(override: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        decide(make_config(override_generation_config=override))
    assert str(error.value) == f"--override-generation-config: {sentence}"


@pytest.mark.parametrize(
    ("num", "replay", "is_refused"),
    [
        (1, "tcp://*:5558", False),
        (1, "tcp://*:5557", True),
        (2, "tcp://*:5558", True),
        (2, "tcp://127.0.0.1:5556", True),
        (2, "tcp://*:5559", False),
        (2, "tcp://*:5555", False),
        (2, "ipc:///run/replay", False),
        (2, None, False),
    ],
)
def test_the_ports_of_kv_events_and_of_their_replay_do_not_overlap(
    num: int, replay: str | None, is_refused: bool
) -> None:
    config = make_config(data_parallel_size=num, kv_events="tcp://*:5557", kv_events_replay=replay)
    if is_refused:
        with pytest.raises(ConfigError, match=f"at least {num} apart"):
            decide(config)
    else:
        assert decide(config).kv_events_replay == replay
    apart = make_config(data_parallel_size=2, kv_events="tcp://127.0.0.1:5557", kv_events_replay="tcp://127.0.0.2:5558")
    assert decide(apart).kv_events == "tcp://127.0.0.1:5557", "of different addresses"

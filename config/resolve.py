"""Decides what the user left open, by facts about the model and the machine, and refuses what cannot be.

Pure functions: no file and no environment variable is read here, and nothing is assigned later.
"""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from ..errors import ConfigError
from ..kernels.cpu.levels import EMULATED
from .access import ApiKey, check_origins, check_root_path, check_tls, merge_keys
from .config import (
    ATTENTION_PACKAGES,
    Config,
    CpuKernels,
    Dtype,
    EngineConfig,
    EngineOptions,
    HttpConfig,
    MachineFacts,
    ModelFacts,
    SamplingDefaults,
    num_machines,
)
from .cpu_bind import bind_ranks, num_threads
from .gpu import LEAST_CAPABILITY, check_fp8, show_capability
from .latency_classes import check_classes
from .plugins import split_spec

_ANY_HOST = {"*", "0.0.0.0", "[::]"}


def resolve(config: Config, model: ModelFacts, machine: MachineFacts) -> EngineConfig:
    """What every process of the engine is given. Raises ConfigError for options that exclude each other, or that this
    model or machine cannot have."""
    options = config.engine
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position and options.scripted is None:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {model.max_position} tokens {model.name} was made for."
        )
    if options.kv_peers and not options.kv_connector:
        raise ConfigError("--kv-peers names hosts to load KV from; give --kv-connector p2p,peer=… or shared,… as well.")
    check_classes(options.latency_classes or {}, options.scheduling_policy)
    _check_kv_events(config.source.served_model_name or (model.name,), options)
    if options.speculative is not None and options.extension is not None:
        raise ConfigError("--speculative computes tokens that --extension does not know of; leave one of them out.")
    if options.runner_plugin is not None:
        _check_plugin(options)
    _check_experts(options)
    _check_domains(config, model, machine)
    _check_scripted(options)
    _check_ranks(options, model, machine)
    if model.purpose.is_encoder:
        _check_encoder(options, model)
        options = replace(options, enable_prefix_caching=False)
    if model.decoder_start_ids:
        _check_encoder_decoder(options, model)
    on_cpu = _on_cpu(options, machine)
    if on_cpu and options.kv_cache_dtype == "fp8":
        raise ConfigError("--kv-cache-dtype fp8 is for GPUs; on a CPU it can be bfloat16.")
    if on_cpu and "float16" in (options.dtype, options.kv_cache_dtype):
        raise ConfigError("float16 is for GPUs; on a CPU it can be bfloat16 or float32.")
    if not on_cpu:
        _check_capability(options, machine.gpu_capability)
    if options.quantization is not None and not on_cpu:
        raise ConfigError(f"--quantization {options.quantization} is for --device cpu; leave one of them out.")
    _check_attention(options, machine)
    if options.deterministic:
        _check_deterministic(config, model, machine)
    kernels: CpuKernels | None = None
    level = _choose_level(config.cpu.cpu_kernels, machine) if on_cpu else None
    if on_cpu:
        kernels = "torch" if level is None else "compiled"
    elif config.cpu.cpu_bind not in ("auto", "none"):
        raise ConfigError("--cpu-bind is for --device cpu; leave one of them out.")
    # torch has products of 8 and 4 bits for float32 activations only.
    is_wide = model.is_native and kernels == "torch" and options.quantization is not None
    dtype = _choose_dtype(options, model, machine, is_wide=is_wide, in_c=model.is_native and kernels == "compiled")
    nnodes = check_machines(config)
    is_alone = nnodes == 1 and config.service.backend == "local"
    of_engine = options.tensor_parallel_size * options.pipeline_parallel_size
    num_ranks = of_engine // nnodes * options.data_parallel_size  # of this machine
    cpu_sets = bind_ranks(config.cpu.cpu_bind, num_ranks, machine) if on_cpu and is_alone else ()
    return EngineConfig(
        **{name: getattr(options, name) for name in options.__struct_fields__ if name not in _DECIDED},
        model=replace(model, sampling=_sampling(options, model)),
        served_model_names=config.source.served_model_name or (model.name,),
        dtype=dtype,
        arithmetic="float32" if is_wide else dtype,
        kernels=kernels,
        cpu_level=level,
        no_cpu_level=_NO_LEVEL if kernels == "torch" and config.cpu.cpu_kernels == "auto" else None,
        max_model_len=max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens or _choose_budget(options, model, machine, max_model_len),
        kv_cache_dtype=dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        block_size=16 if on_cpu else _FLASH_BLOCK if options.attention_backend == "flash-attn" else 64,
        num_threads=config.cpu.threads or num_threads(cpu_sets, num_ranks, machine),
        cpu_sets=cpu_sets,
        tool_call_parser=model.tool_calls_shown if options.tool_call_parser == "auto" else options.tool_call_parser,
        reasoning_parser=model.reasoning_shown if options.reasoning_parser == "auto" else options.reasoning_parser,
    )


def _sampling(options: EngineOptions, model: ModelFacts) -> SamplingDefaults:
    """The sampling parameters of requests that give none. Raises ConfigError."""
    flag = "--override-generation-config"
    base = model.sampling if options.generation_config == "auto" else SamplingDefaults()
    override = options.override_generation_config or {}
    if unknown := override.keys() - _MOST.keys():
        raise ConfigError(f"{flag}: {min(unknown)} is not one of {', '.join(_MOST)}.")
    try:
        found = msgspec.convert({**msgspec.structs.asdict(base), **override}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{flag}: {error}.".replace("`", "")) from None
    for name in override:
        value: float = getattr(found, name)
        if not 0 <= value <= _MOST[name] or (value == 0 and name in ("top_p", "repetition_penalty")):
            raise ConfigError(f"{flag}: {name} = {value:g} is not between 0 and {_MOST[name]:g}.")
    return found


_MOST = {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 100.0}
_FLASH_BLOCK = 256  # positions: FlashAttention 2 takes pages of a multiple of them
_DECIDED = {*EngineConfig.__annotations__, "tool_call_parser", "reasoning_parser"}


def check_machines(config: Config) -> int:
    """The number of machines that run ranks. Raises ConfigError."""
    service, num_stages = config.service, config.engine.pipeline_parallel_size
    nnodes, num_ranks = num_machines(service, num_stages), config.engine.tensor_parallel_size
    if num_stages == 1 and num_ranks % nnodes:
        raise ConfigError(f"--nnodes {nnodes} does not divide the {num_ranks} ranks: each machine runs as many.")
    if num_stages % nnodes and num_stages > 1:
        raise ConfigError(
            f"--nnodes {nnodes} does not divide the {num_stages} stages of --pipeline-parallel-size: each machine runs "
            "as many whole stages."
        )
    if nnodes > 1 or service.backend == "ray":
        what = "--backend ray" if service.backend == "ray" else "--nnodes"
        if config.cpu.cpu_bind not in ("auto", "none"):
            raise ConfigError(f"--cpu-bind names CPUs of one machine: leave it out with {what}.")
        is_apart = service.backend == "ray"
        if num_ranks * num_stages > 1 or is_apart:
            check_several_machines(config.engine, what, is_apart=is_apart)
    return nnodes


def check_several_machines(options: EngineOptions, what: str, *, is_apart: bool = False) -> None:
    """Raises ConfigError for what needs all ranks of an engine on the core's machine. what: it puts some on others.
    is_apart: also the first one, whose folder the core looks at."""
    for name, given in map(_split_connector, options.kv_connector):
        for option in ("serve", "peer") if name == "p2p" else ():
            value = given.get(option)
            if value is not None and not value.startswith("tcp://") and (option, value) != ("peer", "named"):
                raise ConfigError(
                    f"--kv-connector p2p: {option}={value} is a socket of one machine, and {what} puts ranks on "
                    "others; give tcp://HOST:PORT and key-file=FILE."
                )
    names = {spec.partition(",")[0] for spec in options.kv_connector}
    if options.kv_domains > 1 and (in_folders := sorted(names & {"disk", "shared"})):
        raise ConfigError(
            f"--kv-connector {in_folders[0]} with --kv-domains is for engines whose ranks are all on one machine, "
            f"because the core looks at the folder that each domain writes to; leave it or {what} out."
        )
    if is_apart and "disk" in names:
        raise ConfigError(
            "--kv-connector disk is for engines whose first rank is on the core's machine, because the core looks at "
            f"the folder that this rank writes to; leave it or {what} out, or give shared,path=DIR with a folder that "
            "all machines see."
        )


def note_on_folders(options: EngineOptions, what: str) -> str:
    """A sentence on what cannot be checked here where no rank is on the core's machine; empty: nothing. what: it puts
    them on others."""
    found = (given.get("path") for name, given in map(_split_connector, options.kv_connector) if name == "shared")
    return "".join(
        f"--kv-connector shared: {path} must be the same folder on all machines, such as one of a network file system; "
        f"{what} puts the ranks on others than the core's, which would find nothing there."
        for path in found
    )


def _split_connector(spec: str) -> tuple[str, dict[str, str]]:
    return split_spec("--kv-connector", spec)


def resolve_http(config: Config, file_keys: Sequence[ApiKey], admin_file_keys: Sequence[ApiKey]) -> HttpConfig:
    """What a router or an engine's api processes are given. `file_keys`, `admin_file_keys`: what the key files hold.
    Raises ConfigError."""
    clients, listen = config.clients, config.listen
    endpoint = config.reports.otlp_traces_endpoint
    url = urlsplit("http://none" if endpoint is None else endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError("--otlp-traces-endpoint must be an address such as http://127.0.0.1:4318.")
    if (state := config.reports.state) is not None and not Path(state).absolute().parent.is_dir():
        raise ConfigError(f"--state {state}: its folder does not exist; make it first.")
    check_tls(listen.ssl_certfile, listen.ssl_keyfile, listen.ssl_ca_certs, listen.ssl_cert_reqs)
    check_origins(clients.allowed_origins)
    keys = (*map(ApiKey, config.keys.api_key), *file_keys)
    keys = merge_keys(keys, clients.requests_per_minute, clients.tokens_per_minute)
    admin_keys = merge_keys((*map(ApiKey, config.keys.admin_api_key), *admin_file_keys), None, None)
    if {key.key for key in keys} & {key.key for key in admin_keys}:
        raise ConfigError("An administrator's key is a user's as well; give administrators keys of their own.")
    for flag, is_asked in (
        ("--enable-sleep-mode", config.admin.enable_sleep_mode),
        ("--enable-model-swap", config.admin.enable_model_swap),
    ):
        if is_asked and not admin_keys:
            raise ConfigError(f"{flag} is for administrators; give --admin-api-key or --admin-api-key-file.")
    return HttpConfig(
        listen=replace(listen, root_path=check_root_path(listen.root_path)),
        clients=clients,
        service=config.service,
        admin=config.admin,
        reports=config.reports,
        api_keys=keys,
        admin_keys=admin_keys,
    )


_STAGES = "--pipeline-parallel-size"


def _check_ranks(options: EngineOptions, model: ModelFacts, machine: MachineFacts) -> None:
    """Refuses what several ranks cannot do."""
    if options.pipeline_parallel_size == 1:
        if options.pipeline_layers is not None:
            raise ConfigError(f"--pipeline-layers divides the layers among stages; give {_STAGES} as well.")
    else:
        _check_stages(options, model, on_cpu=_on_cpu(options, machine))


def _check_stages(options: EngineOptions, model: ModelFacts, *, on_cpu: bool) -> None:
    """Refuses what several stages cannot do yet."""
    if options.speculative is not None and not on_cpu:
        raise ConfigError(
            f"--speculative is not there for GPUs with {_STAGES}: only the last stage knows how many draft tokens were "
            "accepted when the next pass begins; leave one of them out."
        )
    if options.speculative is not None and model.has_states:
        raise ConfigError(
            f"--speculative is not there for {model.name} with {_STAGES}: the recurrent states behind rejected draft "
            "tokens cannot be taken back in every stage; leave one of them out."
        )


def _check_plugin(options: EngineOptions) -> None:
    """Refuses what a runner plugin cannot have yet."""
    for flag, is_asked, why in (
        (_STAGES, options.pipeline_parallel_size > 1, "no rank has all layers and the logits"),
        ("--kv-domains", options.kv_domains > 1, "ranks have tokens of their own"),
        (
            "--speculative with several ranks",
            options.speculative is not None and options.tensor_parallel_size > 1,
            "ranks propose draft tokens by themselves, and an error on one of them would divide them",
        ),
    ):
        if is_asked:
            raise ConfigError(f"--runner-plugin is not there with {flag}: {why}; leave one of them out.")


def _check_kv_events(names: Sequence[str], options: EngineOptions) -> None:
    if options.kv_events is None:
        for flag, is_asked in (
            ("--kv-events-replay", options.kv_events_replay is not None),
            ("--kv-events-host", options.kv_events_host is not None),
            ("--kv-events-key-file", options.kv_events_key_file is not None),
            ("--kv-events-insecure", options.kv_events_insecure),
        ):
            if is_asked:
                raise ConfigError(f"{flag} is about what --kv-events publishes; give that address as well.")
        return
    if not options.enable_prefix_caching:
        raise ConfigError("--kv-events has nothing to publish with --no-enable-prefix-caching; leave one of them out.")
    if options.kv_events_insecure and options.kv_events_key_file is not None:
        raise ConfigError("--kv-events-insecure is for subscribers without keys; leave it or --kv-events-key-file out.")
    if "@" in (options.kv_events_host or ""):
        raise ConfigError("--kv-events-host must not contain @, which separates the parts of the topic kv@HOST@MODEL.")
    if "@" in names[0]:
        raise ConfigError(
            f"--kv-events: the model's name {names[0]!r} contains @, which separates the parts of the topic "
            "kv@HOST@MODEL; give another one with --served-model-name."
        )
    _check_event_ports(options)


def _check_event_ports(options: EngineOptions) -> None:
    """Several engines take the ports from the first one's on (`procs/engines.py`)."""
    events, replay = _host_and_port(options.kv_events), _host_and_port(options.kv_events_replay)
    if events is None or replay is None:
        return
    (host, first), (other_host, second), num = events, replay, options.data_parallel_size
    can_meet = host == other_host or not _ANY_HOST.isdisjoint((host, other_host))
    if can_meet and abs(first - second) < num:
        raise ConfigError(
            f"--kv-events takes the ports {first} to {first + num - 1}, one for each engine, and --kv-events-replay "
            f"{second} to {second + num - 1}; give them ports that are at least {num} apart."
        )


def _host_and_port(address: str | None) -> tuple[str, int] | None:
    """None: it has no port."""
    base, colon, port = (address or "").rpartition(":")
    return (base.removeprefix("tcp://"), int(port)) if colon and port.isdigit() else None


def _check_encoder(options: EngineOptions, model: ModelFacts) -> None:
    """Refuses options that do not apply to an encoder, which computes each text in one step and keeps no KV."""
    for flag, is_asked in (
        ("--tensor-parallel-size", options.tensor_parallel_size > 1),
        (_STAGES, options.pipeline_parallel_size > 1),
        ("--quantization", options.quantization is not None),
        ("--load-format dummy", options.load_format == "dummy"),
        ("--kv-connector", bool(options.kv_connector)),
        ("--kv-peers", bool(options.kv_peers)),
        ("--kv-events", options.kv_events is not None),
        ("--extension", options.extension is not None),
        ("--runner-plugin", options.runner_plugin is not None),
        ("--speculative", options.speculative is not None),
        ("--deterministic", options.deterministic),
        ("--attention-backend", options.attention_backend != "auto"),
        ("--client-address", options.client_address is not None),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is for models that generate text; {model.name} reads whole texts at once.")
    _check_whole_texts(options, model)


def _check_whole_texts(options: EngineOptions, model: ModelFacts) -> None:
    longest, most = options.max_model_len or model.max_position, options.max_num_batched_tokens
    if most is not None and most < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {most} is less than the {longest} tokens of the longest text, which "
            f"{model.name} reads at once; set --max-model-len as well."
        )


def _check_encoder_decoder(options: EngineOptions, model: ModelFacts) -> None:
    """Refuses what a model with an encoder beside its decoder cannot do yet."""
    for flag, is_asked in (
        ("--tensor-parallel-size", options.tensor_parallel_size > 1),
        (_STAGES, options.pipeline_parallel_size > 1),
        ("--kv-connector", bool(options.kv_connector)),
        ("--kv-peers", bool(options.kv_peers)),
        ("--kv-events", options.kv_events is not None),
        ("--extension", options.extension is not None),
        ("--runner-plugin", options.runner_plugin is not None),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is not there for {model.name}, which has an encoder; leave it out.")
    _check_whole_texts(options, model)


def _check_scripted(options: EngineOptions) -> None:
    """Refuses what a model that does not compute cannot do."""
    for flag, is_asked in (
        ("--tensor-parallel-size", options.tensor_parallel_size > 1),
        (_STAGES, options.pipeline_parallel_size > 1),
        ("--kv-connector", bool(options.kv_connector)),
        ("--extension", options.extension is not None),
        ("--runner-plugin", options.runner_plugin is not None),
        ("--speculative", options.speculative is not None),
    ):
        if is_asked and options.scripted is not None:
            raise ConfigError(f"{flag} has no meaning beside --scripted, where no model computes; leave it out.")


def _check_experts(options: EngineOptions) -> None:
    """Refuses whole experts for one rank, a way to exchange tokens where none are exchanged, and replicas where there
    is nothing to copy or to copy from."""
    if options.enable_expert_parallel and options.tensor_parallel_size == 1:
        raise ConfigError(
            "--enable-expert-parallel deals experts to the ranks of --tensor-parallel-size, and there is one; give a "
            "number of ranks, or leave it out."
        )
    if options.all2all_backend is not None and not (options.enable_expert_parallel and options.kv_domains > 1):
        raise ConfigError(
            f"--all2all-backend {options.all2all_backend} is for whole experts in several KV domains; give "
            "--enable-expert-parallel and --kv-domains as well, or leave it out."
        )
    is_summed = not options.exchanges_tokens  # over the ranks, each of which adds what its experts give
    for what, is_so in (
        ("needs --enable-expert-parallel; give it as well", not options.enable_expert_parallel),
        ("reads experts from the checkpoint, which --load-format dummy lacks", options.load_format == "dummy"),
        ("changes how sums are grouped, so --deterministic excludes it", options.deterministic and is_summed),
    ):
        if is_so and options.expert_replicas:
            raise ConfigError(f"--expert-replicas {options.expert_replicas} {what}.")


def _check_domains(config: Config, model: ModelFacts, machine: MachineFacts) -> None:
    """Refuses what KV domains cannot do yet."""
    options = config.engine
    if options.kv_domains == 1:
        return
    flag = f"--kv-domains {options.kv_domains}"
    if options.kv_domains != options.tensor_parallel_size:
        raise ConfigError(
            f"{flag}: each domain has one rank so far, and --tensor-parallel-size is {options.tensor_parallel_size}; "
            "give both the same number."
        )
    if not _on_cpu(options, machine) and options.attention_backend not in ("auto", "triton"):
        raise ConfigError(
            f"{flag} is not there with --attention-backend {options.attention_backend}, which needs rows in every step "
            "that it attends to; leave one of them out."
        )
    if not model.is_native:
        raise ConfigError(f"{flag}: transformers computes {model.name}, whose layers cannot be divided; leave it out.")
    for other, is_asked, why in (
        (
            _STAGES,
            options.pipeline_parallel_size > 1,
            "a domain without tokens sends the next stage no input to wait for",
        ),
        (
            "--speculative",
            options.speculative is not None,
            "only a domain's own rank knows how many draft tokens it has in a step, and all ranks must know it",
        ),
        (
            "--kv-connector p2p",
            any(spec.partition(",")[0] == "p2p" for spec in options.kv_connector),
            "peers name an engine, and do not know which of its domains computes a prompt",
        ),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is not there with {other}: {why}; leave one of them out.")


def _check_attention(options: EngineOptions, machine: MachineFacts) -> None:
    backend = options.attention_backend
    if backend != "auto" and _on_cpu(options, machine):
        raise ConfigError(f"--attention-backend {backend} is for GPUs; leave it out on a CPU.")
    if backend in ATTENTION_PACKAGES and backend not in machine.attention_packages:
        raise ConfigError(
            f"--attention-backend {backend} needs the package {ATTENTION_PACKAGES[backend]}, which is not installed; "
            "install it, or choose auto, triton or torch."
        )


def _on_cpu(options: EngineOptions, machine: MachineFacts) -> bool:
    return options.device == "cpu" or (options.device == "auto" and not machine.has_gpu)


_NO_LEVEL = "the installation has no compiled kernels for this CPU, and there is no C compiler (install gcc or clang)"


def _choose_level(asked: str, machine: MachineFacts) -> str | None:
    """The level of the C kernels; None: torch's kernels. Raises ConfigError for a level that cannot be had here."""
    usable = machine.usable_levels
    if asked == "auto":
        return usable[0] if usable else None
    if asked == "torch" or asked in usable or (asked == EMULATED and machine.has_compiler):
        return None if asked == "torch" else asked
    if asked in machine.cpu_levels or asked == EMULATED:
        why = "the installation has no library of that level, and there is no C compiler (install gcc or clang)"
    else:
        why = "this CPU or its operating system lacks instructions that it needs"
    raise ConfigError(f"--cpu-kernels {asked}: {why}. What works here: {', '.join(('auto', *usable, 'torch'))}.")


def _choose_budget(options: EngineOptions, model: ModelFacts, machine: MachineFacts, max_model_len: int) -> int:
    usual = 512 if _on_cpu(options, machine) else 2048
    if model.decoder_start_ids:
        return max(usual, max_model_len)
    # No stream waits for an encoder's step, and among many texts there are more of nearly the same length.
    return max(4 * usual, max_model_len) if model.purpose.is_encoder else usual


def _choose_dtype(
    options: EngineOptions, model: ModelFacts, machine: MachineFacts, *, is_wide: bool, in_c: bool
) -> Dtype:
    """is_wide: activations are float32 in any case. in_c: the C kernels run the model. Whether a CPU has bfloat16
    instructions is not considered: tokens would depend on the machine."""
    if options.dtype != "auto":
        return options.dtype
    if in_c:
        return "bfloat16" if model.checkpoint_dtype == "bfloat16" else "float32"
    on_cpu = _on_cpu(options, machine)
    if not on_cpu and _is_old(machine.gpu_capability):
        return "float32"  # which loses nothing of any checkpoint
    if not on_cpu and not model.purpose.is_encoder:
        return "bfloat16"  # tensor cores have no float32, and some devices lack the shared memory for its tiles
    # To compute in float32, torch needs every weight in float32.
    fits_wide = 2 * model.wide_bytes <= machine.memory_bytes // 2
    is_float32 = model.checkpoint_dtype == "float32" or is_wide or (on_cpu and fits_wide)
    return "float32" if is_float32 else "bfloat16"


def _is_old(capability: int | None) -> bool:
    """Whether a GPU has neither bfloat16 nor what the Triton kernels need."""
    return capability is not None and capability < LEAST_CAPABILITY


def _check_capability(options: EngineOptions, capability: int | None) -> None:
    """Refuses types that the GPU does not have."""
    check_fp8(options.kv_cache_dtype, capability)
    if capability is not None and _is_old(capability) and options.dtype == "bfloat16":
        raise ConfigError(
            f"--dtype bfloat16 needs a GPU of compute capability {show_capability(LEAST_CAPABILITY)} or newer, and "
            f"this one has {show_capability(capability)}: choose float32 or float16."
        )


def _check_deterministic(config: Config, model: ModelFacts, machine: MachineFacts) -> None:
    """Refuses --deterministic with options whose order of summation depends on other requests."""
    tail, on_cpu = "whose sums depend on what else is served", _on_cpu(config.engine, machine)
    backend = config.engine.attention_backend
    for flag, is_asked in (
        ("--tensor-parallel-size", config.engine.tensor_parallel_size > 1 and not on_cpu),
        ("--speculative", config.engine.speculative is not None and not on_cpu),
        (f"--attention-backend {backend}", backend not in ("auto", "triton")),
        ("--cpu-kernels torch", config.cpu.cpu_kernels == "torch" and on_cpu),
    ):
        if is_asked:
            raise ConfigError(f"--deterministic excludes {flag}, {tail}; leave one of them out.")
    if not model.is_native:
        raise ConfigError(f"--deterministic is not there for {model.name}, which runs in transformers, {tail}.")
    if on_cpu and not model.attends_in_c:
        raise ConfigError(f"--deterministic is not there for {model.name}, whose attention runs in torch, {tail}.")
    if on_cpu and not machine.usable_levels:
        raise ConfigError(
            f"--deterministic needs the C kernels on a CPU, but {_NO_LEVEL}: without them torch computes, {tail}."
        )

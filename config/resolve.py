"""From what a person says, and what is known of the model and the machine, to what every process receives.

`resolve` is pure: nothing is assigned later and nobody reads the environment below it.
"""

from urllib.parse import urlsplit

from msgspec.structs import asdict

from ..errors import ConfigError
from .access import ApiKey, check_origins, check_root_path, check_tls, merge_keys
from .config import Config, CpuKernels, DoorConfig, Dtype, EngineConfig, MachineFacts, ModelFacts


def resolve(config: Config, model: ModelFacts, machine: MachineFacts) -> EngineConfig:
    """Decides everything that `config` left open. Raises ConfigError if it asks for what cannot be."""
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {model.max_position} tokens {model.name} was made for."
        )
    if config.kv_events_replay is not None and config.kv_events is None:
        raise ConfigError("--kv-events-replay repeats what --kv-events tells; give that address as well.")
    if config.kv_events is not None and not config.enable_prefix_caching:
        raise ConfigError("--kv-events has nothing to tell with --no-enable-prefix-caching; leave one of them out.")
    endpoint = urlsplit("http://none" if config.otlp_traces_endpoint is None else config.otlp_traces_endpoint)
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
        raise ConfigError("--otlp-traces-endpoint must be an address such as http://127.0.0.1:4318.")
    if config.speculative is not None and config.extension is not None:
        raise ConfigError("--speculative computes more than --extension is told of a plan; leave one of them out.")
    if config.tensor_parallel_size > 1 and (config.kv_connector or config.extension is not None):
        flag = "--kv-connector" if config.kv_connector else "--extension"
        raise ConfigError(f"{flag} knows the KV of one rank only; leave it or --tensor-parallel-size out.")
    door = resolve_door(config, machine.api_keys, machine.admin_keys)
    for flag in ("enable_sleep_mode", "enable_model_swap"):
        if getattr(config, flag) and not door.admin_keys:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} is for administrators; give --admin-api-key or --admin-api-key-file.")
    if config.api_processes > 1 and config.batch_folder is not None:
        raise ConfigError("Batches belong to one process; leave --batch-folder or --api-processes out.")
    if model.purpose.is_encoder:
        _check_encoder(config, model)
    on_cpu = _on_cpu(config, machine)
    if on_cpu and config.kv_cache_dtype == "fp8":
        raise ConfigError("--kv-cache-dtype fp8 is for GPUs; on a CPU it can be bfloat16.")
    if on_cpu and "float16" in (config.dtype, config.kv_cache_dtype):
        raise ConfigError("float16 is for GPUs; on a CPU it can be bfloat16 or float32.")
    if config.quantization == "int8" and not on_cpu:
        raise ConfigError("--quantization int8 is for --device cpu; leave one of them out.")
    if config.deterministic:
        _check_deterministic(config, model, machine)
    kernels: CpuKernels | None = None
    if on_cpu:
        kernels = "compiled" if machine.has_compiler and config.cpu_kernels == "auto" else "torch"
    # What computes in float32 whatever the type of the weights.
    is_wide = model.is_native and (kernels == "compiled" or config.quantization == "int8")
    dtype = _choose_dtype(config, model, machine, is_wide=is_wide)
    return EngineConfig(
        model_path=model.path,
        served_model_names=config.served_model_name or (model.name,),
        dtype=dtype,
        arithmetic="float32" if is_wide else dtype,
        cpu_kernels=kernels,
        device=config.device,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        quantization=config.quantization,
        load_format=config.load_format,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or _choose_budget(config, model, machine, max_model_len),
        kv_cache_memory=config.kv_cache_memory,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        gpu_memory_utilization=config.gpu_memory_utilization,
        block_size=16 if on_cpu else 64,
        enable_prefix_caching=config.enable_prefix_caching and not model.purpose.is_encoder,
        scheduling_policy=config.scheduling_policy,
        itl_target_ms=config.itl_target_ms,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        kv_eviction=config.kv_eviction,
        kv_connector=config.kv_connector,
        kv_events=config.kv_events,
        kv_events_replay=config.kv_events_replay,
        extension=config.extension,
        record_trace=config.record_trace,
        pipeline_depth=config.pipeline_depth,
        speculative=config.speculative,
        deterministic=config.deterministic,
        client_address=config.client_address,
        num_threads=config.threads
        or max(1, machine.num_cores // (config.tensor_parallel_size * config.data_parallel_size)),
        vocab_size=model.vocab_size,
        model_fingerprint=model.fingerprint,
        eos_token_ids=model.eos_token_ids,
        sampling=model.sampling,
        purpose=model.purpose,
        chat_template=config.chat_template,
        trust_request_chat_template=config.trust_request_chat_template,
        tool_call_parser=model.tool_call_parser if config.tool_call_parser == "auto" else config.tool_call_parser,
        reasoning_parser=model.reasoning_parser if config.reasoning_parser == "auto" else config.reasoning_parser,
        **asdict(door),
        enable_sleep_mode=config.enable_sleep_mode,
        enable_model_swap=config.enable_model_swap,
        batch_folder=config.batch_folder,
        metrics_prefix=config.metrics_prefix,
        enable_log_requests=config.enable_log_requests,
        otlp_traces_endpoint=config.otlp_traces_endpoint,
        start_timeout_s=config.start_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
        api_processes=config.api_processes,
    )


def resolve_door(config: Config, file_keys: tuple[ApiKey, ...], admin_file_keys: tuple[ApiKey, ...]) -> DoorConfig:
    """The part that a router has as well. `file_keys`, `admin_file_keys`: what the files of keys hold. Raises
    ConfigError."""
    admin_keys = merge_keys((*map(ApiKey, config.admin_api_key), *admin_file_keys), None, None)
    users = {*config.api_key, *(key.key for key in file_keys)}
    if any(key.key in users for key in admin_keys):
        raise ConfigError("An administrator's key is a user's as well; give administrators keys of their own.")
    check_tls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs, config.ssl_cert_reqs)
    check_origins(config.allowed_origins)
    return DoorConfig(
        host=config.host,
        port=config.port,
        uds=config.uds,
        root_path=check_root_path(config.root_path),
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        api_keys=merge_keys(
            (*map(ApiKey, config.api_key), *file_keys), config.requests_per_minute, config.tokens_per_minute
        ),
        admin_keys=admin_keys,
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        allowed_origins=config.allowed_origins,
        max_body_size=config.max_body_size,
        max_head_size=config.max_head_size,
        head_timeout_s=config.head_timeout_s,
        body_timeout_s=config.body_timeout_s,
        timeout_keep_alive=config.timeout_keep_alive,
        request_timeout_s=config.request_timeout_s,
        access_log=config.access_log,
        outage_wait=config.outage_wait,
        drain_timeout=config.drain_timeout,
    )


def _check_encoder(config: Config, model: ModelFacts) -> None:
    """Refuses what an encoder, whose sequences are computed whole and leave nothing behind, has no use for."""
    for flag, is_asked in (
        ("--tensor-parallel-size", config.tensor_parallel_size > 1),
        ("--quantization", config.quantization is not None),
        ("--load-format dummy", config.load_format == "dummy"),
        ("--kv-connector", bool(config.kv_connector)),
        ("--kv-events", config.kv_events is not None),
        ("--extension", config.extension is not None),
        ("--speculative", config.speculative is not None),
        ("--deterministic", config.deterministic),
        ("--client-address", config.client_address is not None),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is for models that generate text; {model.name} reads whole texts at once.")
    longest, most = config.max_model_len or model.max_position, config.max_num_batched_tokens
    if most is not None and most < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {most} is less than the {longest} tokens of the longest text, which "
            f"{model.name} reads at once; set --max-model-len as well."
        )


def _on_cpu(config: Config, machine: MachineFacts) -> bool:
    return config.device == "cpu" or (config.device == "auto" and not machine.has_gpu)


def _choose_budget(config: Config, model: ModelFacts, machine: MachineFacts, max_model_len: int) -> int:
    usual = 512 if _on_cpu(config, machine) else 2048
    # No stream waits for an encoder's step, and many texts can be sorted into batches of nearly one length.
    return max(4 * usual, max_model_len) if model.purpose.is_encoder else usual


def _choose_dtype(config: Config, model: ModelFacts, machine: MachineFacts, *, is_wide: bool) -> Dtype:
    """is_wide: activations are float32 in any case. A CPU's bfloat16 instructions decide nothing: a request's tokens
    would depend on the machine, and on the requests beside it."""
    if config.dtype != "auto":
        return config.dtype
    if model.dtype == "float32" or is_wide:
        return "float32"
    # torch needs every weight as float32 to compute in it.
    return "float32" if _on_cpu(config, machine) and 2 * model.weight_bytes <= machine.memory_bytes // 2 else "bfloat16"


def _check_deterministic(config: Config, model: ModelFacts, machine: MachineFacts) -> None:
    """Refuses --deterministic with what sums in an order that depends on other requests."""
    tail = "whose sums depend on what else is served"
    for flag, is_asked in (
        ("--tensor-parallel-size", config.tensor_parallel_size > 1),
        ("--speculative", config.speculative is not None),
        ("--cpu-kernels torch", config.cpu_kernels == "torch" and _on_cpu(config, machine)),
    ):
        if is_asked:
            raise ConfigError(f"--deterministic excludes {flag}, {tail}; leave one of them out.")
    if not model.is_native:
        raise ConfigError(f"--deterministic is not there for {model.name}, which runs in transformers, {tail}.")
    if _on_cpu(config, machine) and not machine.has_compiler:
        raise ConfigError(
            f"--deterministic needs a C compiler on a CPU (install gcc or clang): without one torch computes, {tail}."
        )

"""Every setting once, in frozen structs.

`Config` is what a user says: each field of its sections is a flag, its default and its help. `resolve` decides what
the user left open by facts about the model (`ModelFacts`) and the machine (`MachineFacts`). The results are what
processes are given: `EngineConfig` for each of them, `HttpConfig` for those that serve HTTP. They hold the sections as
they are; a field that `resolve` decides is narrowed in `EngineConfig`.
"""

import re
from hashlib import sha256
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..errors import ConfigError
from .access import ApiKey
from .families import REASONING_PARSERS, TOOL_CALL_PARSERS
from .latency_classes import LatencyClass

Dtype = Literal["float32", "bfloat16", "float16"]
KvDtype = Literal["float32", "bfloat16", "float16", "fp8"]
CpuKernels = Literal["compiled", "torch"]
CpuLevel = Literal[  # those of kernels/cpu/levels.py
    "auto", "torch", "amx", "avx512bf16", "avx512", "avx2", "portable", "i8mm", "dotprod", "neon", "amx-emulated"
]
AttentionBackend = Literal["auto", "triton", "flashinfer", "flash-attn", "torch"]
ATTENTION_PACKAGES = {"flashinfer": "flashinfer-python", "flash-attn": "flash-attn"}  # names in the package index
BatchInvariance = Literal["exact", "float32", "none"]


Live = Literal["any", "within"]
"""How a setting may change while the server runs (`PATCH /admin/settings`): to any value, or within what the start has
reserved for it."""


def _doc(group: str, text: str, *, ge: float | None = None, le: float | None = None, live: Live | None = None) -> Meta:
    """`live`: None: it needs a restart."""
    return Meta(description=text, extra={"group": group, "live": live}, ge=ge, le=le)


_OR_SHOWN = "or module:FAMILY; auto: what its chat template shows"
_Positive = Annotated[int, Meta(ge=1)]
_PositiveFloat = Annotated[float, Meta(gt=0)]


class SourceOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and what clients call it."""

    model: Annotated[
        str,
        _doc(
            "model",
            "a folder, a GGUF file or a Hub name (NAME:QUANT for GGUF), or a LoRA adapter; empty or demo: the demo "
            "model of pagewire; demo-hybrid: the one with recurrent layers",
        ),
    ] = ""
    models: Annotated[
        tuple[str, ...],
        _doc(
            "model",
            "several models behind one port, loaded when they are asked for: models, folders of models, and TOML files "
            "with a [[models]] table for each; the same as several MODELs",
        ),
    ] = ()
    revision: Annotated[str | None, _doc("model", "branch, tag or commit of a Hub model")] = None
    served_model_name: Annotated[
        tuple[str, ...], _doc("model", "name(s) that clients may use; responses have the first (default: the model's)")
    ] = ()


class EngineOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is computed and scheduled. `EngineConfig` narrows what `resolve` decides."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _doc(
            "model",
            "type of weights, KV cache and what is multiplied; sums are float32. auto: the checkpoint's, but for "
            "float16, which is bfloat16 on a GPU and float32 on a CPU. float32: a bfloat16 checkpoint's matrices stay "
            "as they are with the C kernels. float16 is for GPUs",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        _doc(
            "model",
            "int8: weights quantized to 8 bits while loading; int4: to 4 bits in groups of 128 columns, and the "
            "embedding and head to 8. Activations are rounded to 8 bits in each step. CPU only",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        _doc("model", "dummy: random weights of the model's shapes, for benchmarks; no weight files are needed"),
    ] = "auto"
    scripted: Annotated[
        str | None, _doc("model", "a JSON file that says what the model answers, for tests of programs; no weights")
    ] = None
    max_model_len: Annotated[
        _Positive | None,
        _doc("model", "longest prompt + output in tokens; 8k is 8192 (default: what the model declares)"),
    ] = None
    chat_template: Annotated[str | None, _doc("model", "a jinja file or its text, to replace the model's template")] = (
        None
    )
    default_chat_template_kwargs: Annotated[
        dict[str, object] | None,
        _doc(
            "model",
            'variables of the chat template for requests that do not set them, in JSON: {"enable_thinking": false}',
        ),
    ] = None
    generation_config: Annotated[
        Literal["auto", "vllm"],
        _doc(
            "model",
            "sampling parameters of requests that give none; auto: what generation_config.json recommends; vllm: "
            "temperature 1 and nothing else",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, object] | None,
        _doc("model", 'some of these parameters, in JSON: {"temperature": 0.6, "top_p": 0.9}'),
    ] = None
    trust_request_chat_template: Annotated[
        bool, _doc("model", "let requests bring their own chat_template, which may keep the tokenizer busy")
    ] = False
    tool_call_parser: Annotated[
        str, _doc("model", f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}, {_OR_SHOWN}")
    ] = "auto"
    reasoning_parser: Annotated[
        str, _doc("model", f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}, {_OR_SHOWN}")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], _doc("engine", "where the model runs; auto: cuda if there is one")
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, _doc("engine", "ranks that split the model, each with its own process and device", ge=1, le=64)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, _doc("engine", "stages that compute the layers one after the other, each with its own ranks", ge=1, le=64)
    ] = 1
    pipeline_layers: Annotated[
        str | None, _doc("engine", "layers of each stage, such as 18,20 (default: dealt by their cost)")
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        _doc(
            "engine",
            "deal whole experts to the ranks of --tensor-parallel-size, instead of a part of each expert to every rank",
        ),
    ] = False
    expert_replicas: Annotated[
        int,
        _doc(
            "engine",
            "slots of each rank and layer for further copies of experts that many tokens choose, with "
            "--enable-expert-parallel; the copies follow what is measured, and are read while steps go on",
            ge=0,
        ),
    ] = 0
    kv_domains: Annotated[
        int,
        _doc(
            "engine",
            "parts of the ranks that serve requests of their own, each with a KV cache and --max-num-seqs rows, and "
            "share feed-forward layers and experts: 1, or the number of --tensor-parallel-size",
            ge=1,
            le=64,
        ),
    ] = 1
    all2all_backend: Annotated[
        Literal["all-to-all", "allgather_reducescatter"] | None,
        _doc(
            "engine",
            "which tokens a rank gets from others for its experts, with --kv-domains and --enable-expert-parallel; "
            "all-to-all: those that chose them, on GPUs only in steps that are not recorded as CUDA graphs; "
            "allgather_reducescatter: all (default: all-to-all)",
        ),
    ] = None
    data_parallel_size: Annotated[
        int, _doc("engine", "engines behind one port that share the requests, each with the whole model", ge=1, le=64)
    ] = 1
    max_num_seqs: Annotated[
        int, _doc("engine", "maximum number of sequences that run at once", ge=1, le=65536, live="within")
    ] = 256
    max_num_batched_tokens: Annotated[
        _Positive | None,
        _doc(
            "engine",
            "maximum tokens of a step; long prompts are chunked (default: 2048, CPU 512, encoders 4 times)",
            live="within",
        ),
    ] = None
    kv_cache_memory: Annotated[
        _Positive | None,
        _doc("engine", "bytes for the KV cache of each rank, such as 2G (default: from the free memory)"),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        _doc(
            "engine",
            "share of the GPU's memory for weights, activations and KV; at most what is free at the start, less 512 MB",
            ge=0,
            le=1,
        ),
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8"],
        _doc(
            "engine",
            "type of the KV cache; auto: as --dtype; bfloat16 halves that of float32, and on a GPU fp8 that of "
            "bfloat16, a little less exact",
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, _doc("engine", "reuse the KV of prompts with a common prefix")] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "fair", "shortest", "slo"],
        _doc(
            "engine",
            "order of requests: by arrival, by their priority, fair shares for tenants, the shortest first, or by the "
            "deadlines of --latency-classes; under the last two nobody waits for newcomers for ever",
            live="any",
        ),
    ] = "fcfs"
    latency_classes: Annotated[
        dict[str, LatencyClass] | None,
        _doc(
            "engine",
            "targets of classes of requests, in JSON, which requests name as service_tier: "
            '{"interactive": {"ttft_ms": 500, "itl_ms": 50}, "batch": {"share": 0.5}}',
            live="any",
        ),
    ] = None
    itl_target_ms: Annotated[
        _PositiveFloat | None,
        _doc(
            "engine",
            "longest delay of a stream's next token by a prompt's chunk, in ms (default: no bound)",
            live="any",
        ),
    ] = None
    max_queued_requests: Annotated[
        int, _doc("engine", "maximum number of waiting requests; further ones get 429", ge=1, live="any")
    ] = 10_000
    max_queued_tokens: Annotated[
        int,
        _doc(
            "engine",
            "maximum tokens of waiting requests, prompt + longest output; further ones get 429; 4M is 4194304",
            ge=1,
            live="any",
        ),
    ] = 16_777_216
    kv_eviction: Annotated[
        Literal["lru", "lfu", "cost"],
        _doc("engine", "which cached KV goes first: least recently, least frequently used, or cheapest to recompute"),
    ] = "lru"
    kv_connector: Annotated[
        tuple[str, ...],
        _doc(
            "engine",
            "where KV is kept beyond the device, nearest first: host, disk, shared, redis, p2p or module:Class, each "
            "with its options, such as host,size=4G disk,path=DIR,size=20G",
            live="within",
        ),
    ] = ()
    kv_peers: Annotated[
        tuple[str, ...],
        _doc(
            "engine",
            "hosts that a request's kv_transfer_params may name as where its KV is, such as prefill-0 or 10.1.*, where "
            "* stands for anything (default: none)",
        ),
    ] = ()
    kv_events: Annotated[
        str | None,
        _doc("engine", "publish KV events for routers here: ipc:///path or tcp://host:port (ZeroMQ XPUB)"),
    ] = None
    kv_events_replay: Annotated[
        str | None, _doc("engine", "resend KV events here to routers that missed some (ZeroMQ ROUTER)")
    ] = None
    kv_events_host: Annotated[
        str | None,
        _doc("engine", "name of this engine in the topic of KV events, kv@HOST@MODEL (default: the machine's name)"),
    ] = None
    kv_events_key_file: Annotated[
        str | None,
        _doc("engine", "keys that subscribers of KV events over TCP must have (CURVE); made if there is no such file"),
    ] = None
    kv_events_insecure: Annotated[
        bool,
        _doc("engine", "let other machines get KV events without keys: whoever connects to --kv-events reads prompts"),
    ] = False
    extension: Annotated[
        str | None, _doc("engine", "module:Class,option=value: adds data to each plan, with attention that reads it")
    ] = None
    runner_plugin: Annotated[
        str | None,
        _doc(
            "engine",
            "module:Class,option=value: code that is called around steps, after layers and on logits; a subclass of "
            "pagewire.RunnerPlugin",
        ),
    ] = None
    record_trace: Annotated[
        str | None, _doc("engine", "write every arrival, plan and result to this file, for `pagewire replay`")
    ] = None
    pipeline_depth: Annotated[
        int, _doc("engine", "steps in flight at once; 1: wait for each step's tokens before the next", ge=1, le=8)
    ] = 2
    attention_backend: Annotated[
        AttentionBackend,
        _doc(
            "engine",
            "attention on a GPU; auto: triton, which needs nothing; flashinfer or flash-attn: that package for prompts "
            "and Triton for the rest; torch: its own kernels, slow",
        ),
    ] = "auto"
    speculative: Annotated[
        str | None,
        _doc(
            "engine",
            "ngram: draft tokens from earlier text of the request; ngram,tokens=4: at most 4 in a step",
            live="within",
        ),
    ] = None
    deterministic: Annotated[
        bool, _doc("engine", "slower: a request's output does not depend on other requests, bit by bit")
    ] = False
    strict_kernels: Annotated[
        bool,
        _doc(
            "engine",
            "refuse to start if a kernel of pagewire fails its check, instead of using slower ones; on a GPU also end "
            "if a CUDA graph cannot be recorded",
        ),
    ] = False
    log_level: Annotated[
        Literal["info", "warning", "error"],
        _doc("server", "least important lines that the processes log", live="any"),
    ] = "info"
    client_address: Annotated[
        str | None,
        _doc("engine", "address for programs that send token ids (`EngineClient`): ipc:///path or tcp://host:port"),
    ] = None

    @property
    def exchanges_tokens(self) -> bool:
        """Whether each rank has tokens of its own, and gives others those that their experts compute."""
        is_dealt = self.kv_domains > 1 and self.enable_expert_parallel
        return is_dealt and self.all2all_backend != "allgather_reducescatter"


class CpuOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computes on a CPU."""

    threads: Annotated[
        int, _doc("engine", "CPU threads of each rank's worker; 0: one for each core, split among ranks", ge=0)
    ] = 0
    cpu_bind: Annotated[
        str,
        _doc(
            "engine",
            "CPUs of each rank: a list for each, such as '0-3,8|4-7,9'; none: not bound; auto: with several ranks each "
            "gets a NUMA node, or an equal share of the cores",
        ),
    ] = "auto"
    cpu_kernels: Annotated[
        CpuLevel,
        _doc(
            "engine",
            "kernels on a CPU; auto: our C kernels for the best level that the CPU has; a level (on x86-64 from amx to "
            "portable, on ARM from i8mm to neon): those for it; torch: its own kernels, whose results depend on how "
            "many requests run at once. A level comes from the wheel or is compiled once; without both torch is used. "
            "amx-emulated is for tests",
        ),
    ] = "auto"


class ListenOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a server listens, and its certificate."""

    host: Annotated[str, _doc("network", "address to listen on")] = "127.0.0.1"
    port: Annotated[int, _doc("network", "port to listen on; 0: any free one", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, _doc("network", "listen on a Unix socket, for its owner only, instead of a port")] = None
    root_path: Annotated[
        str, _doc("network", "path prefix under which a proxy serves this server, such as /llm; it may strip it or not")
    ] = ""
    ssl_certfile: Annotated[str | None, _doc("access", "serve TLS with this certificate chain (a PEM file)")] = None
    ssl_keyfile: Annotated[
        str | None, _doc("access", "the certificate's private key (default: in the certificate's file)")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, _doc("access", "verify clients' certificates with these authorities (a PEM file)")
    ] = None
    ssl_cert_reqs: Annotated[
        int, _doc("access", "client certificates: 0: not requested, 1: optional, 2: required", ge=0, le=2)
    ] = 0


class KeyOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys as they are given; `HttpConfig` holds those of the files as well."""

    api_key: Annotated[tuple[str, ...], _doc("access", "key(s) that clients must send (also PAGEWIRE_API_KEY)")] = ()
    api_key_file: Annotated[
        str | None, _doc("access", "a file with a key in each line, optionally with rates of its own")
    ] = None
    admin_api_key: Annotated[tuple[str, ...], _doc("access", "key(s) for administrators' paths only")] = ()
    admin_api_key_file: Annotated[
        str | None, _doc("access", "a file with a key in each line, for administrators' paths only")
    ] = None


class AdminOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What administrators may do."""

    enable_model_swap: Annotated[bool, _doc("server", "let administrators replace a model (POST /admin/models)")] = (
        False
    )
    enable_sleep_mode: Annotated[
        bool, _doc("server", "let administrators put the engine to sleep (POST /sleep) and wake it (POST /wake_up)")
    ] = False


class ClientOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients may send, how much, how fast, and from which web pages."""

    requests_per_minute: Annotated[
        _Positive | None,
        _doc("access", "maximum requests per minute of each key, or of all clients if there are no keys", live="any"),
    ] = None
    tokens_per_minute: Annotated[
        _Positive | None,
        _doc(
            "access",
            "maximum prompt + output tokens per minute of each key, or of all clients if there are no keys",
            live="any",
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        _doc("access", "origins of web pages that may use this server: https://host, or * for any (CORS)", live="any"),
    ] = ()
    max_body_size: Annotated[
        int,
        _doc(
            "limits",
            "maximum size of a request's body in bytes, up to 128M; 16M is 16777216",
            ge=1,
            le=134217728,
        ),
    ] = 16777216
    max_head_size: Annotated[
        int,
        _doc("limits", "maximum size of a request's head in bytes: its first line and at most 100 headers", ge=1024),
    ] = 32768
    head_timeout_s: Annotated[
        float, _doc("limits", "how long a request's head may take to arrive, in seconds", ge=0.001)
    ] = 10.0
    body_timeout_s: Annotated[
        float, _doc("limits", "how long a request's body may take to arrive, in seconds", ge=0.001)
    ] = 30.0
    timeout_keep_alive: Annotated[
        int,
        _doc("limits", "how long an idle connection is kept, in seconds; should be longer than a proxy keeps it", ge=1),
    ] = 75
    request_timeout_s: Annotated[
        _PositiveFloat | None,
        _doc("limits", "maximum duration of a request, in seconds (default: no bound)", live="any"),
    ] = None
    access_log: Annotated[
        bool, _doc("network", "log a line for each request, without prompts and keys", live="any")
    ] = True


class ReportOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an api process stores and reports."""

    state: Annotated[
        str | None,
        _doc(
            "server",
            "SQLite file of stored responses, files, batches, … for later servers (default: deleted at the end)",
        ),
    ] = None
    metrics_prefix: Annotated[
        Literal["pagewire", "vllm"],
        _doc("server", "prefix of metric names in /metrics; vllm: for dashboards made for vLLM"),
    ] = "pagewire"
    enable_log_requests: Annotated[
        bool, _doc("server", "log a line for each finished request: tokens and times, never texts", live="any")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        _doc("server", "send a span for each request to this OpenTelemetry collector, such as http://host:4318"),
    ] = None


class ServiceOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How processes are started, watched, replaced and ended."""

    start_timeout_s: Annotated[
        float, _doc("server", "how long a process may take to start, in seconds", ge=1, live="any")
    ] = 600.0
    hang_timeout_s: Annotated[
        float, _doc("server", "a process that does not respond for this many seconds is replaced", ge=1, live="any")
    ] = 10.0
    outage_wait: Annotated[
        float,
        _doc(
            "network",
            "how long new requests wait for a process to be replaced, in seconds, before a 503",
            ge=0,
            live="any",
        ),
    ] = 30.0
    api_processes: Annotated[
        int,
        _doc(
            "server",
            "processes that serve HTTP on the port; limits other than rates apply to each",
            ge=1,
            le=64,
        ),
    ] = 1
    models_memory: Annotated[
        _Positive | None,
        _doc(
            "server",
            "host's memory that the loaded ones of several models may take together, such as 24G (default: four "
            "fifths of what is free at the start); of GPUs they take what --gpu-memory-utilization says",
        ),
    ] = None
    model_wait: Annotated[
        float,
        _doc("server", "how long requests wait for one of several models to be loaded, in seconds, before a 503", ge=0),
    ] = 300.0
    drain_timeout: Annotated[
        float,
        _doc(
            "network",
            "how long open requests may go on after SIGTERM, in seconds; a second signal ends them",
            ge=0,
            live="any",
        ),
    ] = 60.0
    nnodes: Annotated[
        int,
        _doc("server", "machines among which the ranks are divided; the others run `pagewire launch --join`", ge=1),
    ] = 1
    backend: Annotated[
        Literal["local", "ray"],
        _doc("server", "who starts the ranks: this machine and those of --nnodes, or the nodes of a Ray cluster"),
    ] = "local"
    join_address: Annotated[
        str | None,
        _doc("server", "tcp://HOST:PORT of this machine, where the other machines of --nnodes join"),
    ] = None
    key_file: Annotated[
        str | None,
        _doc("server", "shared key of tcp:// addresses between machines; made if it does not exist"),
    ] = None


def num_machines(service: ServiceOptions, num_stages: int) -> int:
    """The machines that run ranks; without --nnodes Ray places each stage by itself."""
    return num_stages if service.backend == "ray" and service.nnodes == 1 else service.nnodes


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may choose, in the order of `--help`. Names and meanings follow vLLM's where it has such a flag."""

    source: SourceOptions = SourceOptions()
    engine: EngineOptions = EngineOptions()
    cpu: CpuOptions = CpuOptions()
    listen: ListenOptions = ListenOptions()
    keys: KeyOptions = KeyOptions()
    admin: AdminOptions = AdminOptions()
    clients: ClientOptions = ClientOptions()
    reports: ReportOptions = ReportOptions()
    service: ServiceOptions = ServiceOptions()


class ModelVersion(Struct, frozen=True, omit_defaults=True):
    """A model that the server serves, has served, or could not load after open requests had ended for it."""

    version: int  # from 1, in the order of their loading
    root: str  # its folder
    name: str
    created: int  # when it was loaded, in seconds since 1970
    state: Literal["serving", "retired", "failed"]
    problem: str | None = None  # why it could not be loaded


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Sampling parameters that the model's authors recommend, for requests that give none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


Task = Literal["generate", "embed", "score", "classify"]


class Purpose(Struct, frozen=True, kw_only=True):
    """What a model can be used for, and how it turns a prompt into one vector."""

    tasks: tuple[Task, ...] = ("generate", "embed")
    is_encoder: bool = False  # attends to the whole prompt in one step and keeps no KV
    pooling: Literal["last", "mean", "cls"] = "last"  # of the tokens' last hidden states
    is_normalized: bool = True  # the vector has length 1
    size: int = 0  # dimensions of a vector
    prompts: dict[str, str] = {}  # prefixes of a text, by the use of the vector
    default_prompt: str | None = None  # the name of one of them
    labels: tuple[str, ...] = ()  # of a classifier with several


class Infill(Struct, frozen=True, kw_only=True):
    """The special tokens by which a model writes what belongs between two texts."""

    prefix: str  # before the text that comes first
    suffix: str  # before the text that comes last
    middle: str  # before what the model writes; may be empty
    is_suffix_first: bool = False  # in the prompt
    stop_ids: tuple[int, ...] = ()  # tokens with which it ends besides the model's ends
    file: str = ""  # before the name of another file


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What `engine.checkpoint.spec` reads in a checkpoint's config files, and processes are given."""

    path: str
    name: str  # unless the user gives another
    adapter: str = ""  # folder of a LoRA adapter of its weights
    max_position: int  # declared context, tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str  # float32, bfloat16, float16
    weight_bytes: int = 0  # of the tensors as they are stored: numbers, scales and zero points
    wide_bytes: int = 0  # about what the tensors take if they are not quantized, in `checkpoint_dtype`
    fingerprint: str = ""  # hex; differs if weights or config differ, and between copies of the files
    files_digest: str = ""  # hex; the same for all copies of the files, on any machine
    is_native: bool = True  # run by our own layers; else by transformers' model
    attends_in_c: bool = True  # the C kernels have the attention of all its layers
    has_states: bool = False  # it has recurrent layers
    sampling: SamplingDefaults = SamplingDefaults()  # from generation_config.json
    purpose: Purpose = Purpose()
    regime_limit: int | None = None  # tokens; beyond them all positions of a sequence have other rotary frequencies
    # Of a model with an encoder, whose prompts the encoder reads: what its decoder's text begins with. Empty: others.
    decoder_start_ids: tuple[int, ...] = ()
    tool_calls_shown: str = "hermes"  # the family that the chat template shows
    reasoning_shown: str = "none"
    infill: Infill | None = None  # None: the tokenizer has no tokens for it


class NumaNode(Struct, frozen=True):
    """The part of a NUMA node that this process may use."""

    number: int
    cores: tuple[tuple[int, ...], ...]  # the CPUs (hardware threads) of each core, as Linux numbers them


class GpuFacts(Struct, frozen=True, kw_only=True):
    """A GPU that this process may use."""

    name: str  # as CUDA_VISIBLE_DEVICES takes it in any order of the devices: GPU-…
    total_bytes: int
    free_bytes: int  # when it was looked at


class MachineFacts(Struct, frozen=True, kw_only=True):
    """What `resolve` decides by; see `machine_facts`."""

    num_cores: int  # that this process may use, and whose time it is granted
    memory_bytes: int = 0
    has_gpu: bool = False
    gpu_capability: int | None = None  # 89 for 8.9; the lowest of the GPUs, None: unknown
    has_compiler: bool = True  # for C
    cpu_levels: tuple[str, ...] = ("avx2", "portable")  # of the C kernels, that the CPU can run; best first
    shipped_levels: tuple[str, ...] = ()  # whose compiled libraries are in the installation
    has_bfloat16: bool = False  # the CPU has instructions that multiply bfloat16
    has_amx: bool = False  # the CPU has tiles
    online_cpus: tuple[int, ...] = ()  # of the machine
    numa_nodes: tuple[NumaNode, ...] = ()  # empty: unknown
    num_sockets: int = 1  # that this process may use
    attention_packages: tuple[str, ...] = ()  # values of --attention-backend whose package is installed
    cpu_quota: int | None = None  # whole CPUs whose time the control groups grant
    gpus: tuple[GpuFacts, ...] = ()  # that this process may use; empty: unknown

    @property
    def usable_levels(self) -> tuple[str, ...]:
        """The levels that can be loaded here, best first."""
        return tuple(level for level in self.cpu_levels if self.has_compiler or level in self.shipped_levels)


class EngineConfig(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What every process of an engine is given: the options, decided, and facts. It holds no secret, since plugins and
    traces see it."""

    model: ModelFacts
    served_model_names: tuple[str, ...]
    dtype: Dtype  # of weights; matrices of bfloat16 stay so where `arithmetic` is float32 and the C kernels compute
    arithmetic: Dtype = "float32"  # of the activations that are multiplied
    kernels: CpuKernels | None = "compiled"  # None: on a GPU
    cpu_level: str | None = None  # of the compiled kernels; None: the best that the worker's CPU has
    no_cpu_level: str | None = None  # why torch computes on a CPU, unless it was asked for
    num_threads: int
    cpu_sets: tuple[tuple[int, ...], ...] = ()  # the CPUs of each rank; empty: ranks are not bound
    gpu_ids: tuple[str, ...] = ()  # of each rank, as CUDA_VISIBLE_DEVICES names it; empty: by the rank's place
    engine_number: int = 0  # among all that the launch's api processes serve
    number_in_model: int | None = None  # among the engines of one of several models; None: there is one model
    system_prompt: str = ""  # of conversations that have none
    block_size: int
    # Narrowed: what the user may leave open is decided here.
    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_dtype: KvDtype

    @property
    def runs_in_c(self) -> bool:
        """Whether the C kernels compute the whole model. They store activations in float32 and round them to
        `arithmetic` where they are multiplied."""
        return self.kernels == "compiled" and self.model.is_native

    @property
    def activations(self) -> Dtype:
        """The type of activations between products."""
        return "float32" if self.runs_in_c else self.arithmetic

    @property
    def weights_key(self) -> tuple[object, ...]:
        """Engines with equal keys pack the same weights, on CPUs with the same level of C kernels."""
        return (
            self.model.fingerprint or self.model.path,
            self.model.purpose,  # an embedding model has no head
            self.load_format,
            self.dtype,
            self.arithmetic,
            self.quantization,
            self.kernels,
            self.cpu_level,
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.pipeline_layers,
            self.enable_expert_parallel,
            self.kv_domains,
            self.exchanges_tokens,  # then each rank has shared experts whole
        )

    @property
    def num_ranks(self) -> int:
        """The workers of this engine: rank stage · tensor_parallel_size + t is rank t of its stage."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def num_in_flight(self) -> int:
        """Plans that the core has sent and not had answered, at most."""
        return self.pipeline_parallel_size + self.pipeline_depth - 1

    @property
    def stages_by_mail(self) -> bool:
        """Whether there are stages that send each other messages, as those on CPUs. Those on GPUs hand tensors from
        device to device."""
        return self.pipeline_parallel_size > 1 and self.kernels is not None

    @property
    def batch_invariance(self) -> BatchInvariance:
        """How far a request's tokens depend on other requests, on chunks, prefix hits and preemptions.

        exact: not at all, bit by bit. float32: nothing is rounded to less than float32, so the order of summation
        changes logits by some 1e-6, and only tokens whose logits are that close can change places. none: roundings to
        16 or 8 bits amplify these differences."""
        # Which ranks have an expert decides how sums over the ranks are grouped, and replicas follow what is served.
        is_regrouped = self.expert_replicas and not self.exchanges_tokens
        if self.deterministic or (self.runs_in_c and self.model.attends_in_c and not is_regrouped):
            return "exact"
        is_wide = self.arithmetic == self.kv_cache_dtype == "float32" and self.quantization is None
        return "float32" if is_wide else "none"

    @property
    def invariance_warning(self) -> str | None:
        """One sentence for the operator, if other requests can change tokens more often than float32 rounding does."""
        if self.batch_invariance == "exact" or self.model.purpose.is_encoder:
            return None
        if self.batch_invariance == "none":
            return "tokens may depend on what else is served: roundings to 16 or 8 bits enlarge differences of sums"
        if self.kernels == "torch":
            return "tokens may depend on what else is served where two are almost equally likely: torch computes"
        return None

    @property
    def kv_model_key(self) -> bytes:
        """32 bytes that differ if equal tokens may have different KV, or KV of a different layout."""
        who = self.model.fingerprint or self.model.path
        kind = (
            who,
            self.load_format,
            self.dtype,
            self.arithmetic,
            self.quantization,
            self.kernels,  # those of torch widen quantized checkpoints
            self.cpu_level,  # levels may differ in the last bits of a sum
            self.kv_cache_dtype,
            self.block_size,
            self.extension,
            self.runner_plugin,
            self.attention_backend,
            self.deterministic,
        )
        return sha256(repr(kind).encode()).digest()


class HttpConfig(Struct, frozen=True, kw_only=True):
    """What processes that serve HTTP are given, and no others: an engine's api processes, and a router, which leaves
    `admin`, `reports` and `versions` at their defaults."""

    listen: ListenOptions
    clients: ClientOptions = ClientOptions()
    service: ServiceOptions = ServiceOptions()
    admin: AdminOptions = AdminOptions()
    reports: ReportOptions = ReportOptions()
    api_keys: tuple[ApiKey, ...] = ()  # empty: no key is asked for
    admin_keys: tuple[ApiKey, ...] = ()  # for the paths of administrators, and for nothing else
    versions: tuple[ModelVersion, ...] = ()


class Said(Struct, frozen=True, kw_only=True):
    """What a `ServerConfig` was decided from, to decide again when settings change. It holds keys."""

    config: Config
    machine: MachineFacts
    keys: tuple[ApiKey, ...] = ()  # of --api-key-file, without the rates of other flags
    admin_keys: tuple[ApiKey, ...] = ()  # of --admin-api-key-file


class ServerConfig(Struct, frozen=True, kw_only=True):
    """What a supervisor is given. It gives `engine` to each of its processes, and `http` to those that serve HTTP."""

    engine: EngineConfig
    http: HttpConfig
    said: Said | None = None  # None: settings cannot change while it runs


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`2G` → 2147483648, `8k` → 8192, `512` → 512. Raises ConfigError on anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a number or a size such as 512M, 2G or 8k.")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))

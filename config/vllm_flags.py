"""The flags of `vllm serve` 0.32, and what each of them becomes here. docs/from-vllm.md is generated from the table."""

import json

from ..errors import ConfigError
from .families import REASONING_PARSERS, TOOL_CALL_PARSERS
from .foreign_flags import MODEL, Convert, Flag, NotNeeded, Refused, Settings, Taken, read_table, renamed

VERSION = "0.32"


def _one_of(setting: str, table: dict[str, str], otherwise: str | None = None) -> Convert:
    """`table`: their value → ours; what is not in it is passed on, or has no effect for the reason `otherwise`."""

    def convert(value: object) -> Settings | str:
        text = str(value)
        if text.lower() in table:
            return {setting: table[text.lower()]}
        return {setting: text} if otherwise is None else otherwise

    return convert


def _quantization(value: object) -> Settings | str:
    if value in ("int8", "int4"):
        return {"quantization": value}
    return "the checkpoint says how it is quantized, and is read so; int8 and int4 quantize while loading."


def _load_format(value: object) -> Settings | str:
    if value in ("auto", "dummy"):
        return {"load_format": value}
    return "safetensors and GGUF files are recognized."


def _max_model_len(value: object) -> Settings | str:
    return "this is what happens anyway." if str(value) in ("-1", "auto") else {"max_model_len": value}


def _parser(setting: str, families: dict[str, str], names: dict[str, str]) -> Convert:
    def convert(value: object) -> Settings | str:
        text = names.get(str(value), str(value))
        if text in families or ":" in text or text == "auto":
            return {setting: text}
        return "there is no family of this name; the one that the chat template shows is used."

    return convert


def _attention(value: object) -> Settings | str:
    table = {"FLASH_ATTN": "flash-attn", "FLASHINFER": "flashinfer", "TRITON_ATTN": "triton"}
    ours = table.get(str(value).upper(), str(value))
    if ours in ("auto", "triton", "flashinfer", "flash-attn", "torch"):
        return {"attention_backend": ours}
    return "there is no such backend here; one is chosen for the device."


def _all_to_all(value: object) -> Settings | str:
    if value in ("all-to-all", "allgather_reducescatter"):
        return {"all2all_backend": value}
    return "ranks send each other tokens by the collectives of the device."


def _executor(value: object) -> Settings | str:
    return {"backend": "ray"} if value == "ray" else "ranks are pagewire's own processes."


def _speculative(value: object) -> Settings | str:
    if not isinstance(value, dict):
        raise ConfigError("needs an object.")
    if value.get("method") in ("ngram", "ngram_gpu"):
        num = value.get("num_speculative_tokens")
        return {"speculative": "ngram" if num is None else f"ngram,tokens={num}"}
    return "draft tokens come from earlier text (method ngram) and not from a model; the same tokens come without them."


def _kv_events(value: object) -> Settings | str:
    if not isinstance(value, dict):
        raise ConfigError("needs an object.")
    if not value.get("enable_kv_cache_events") or value.get("publisher") == "null":
        return "no events are asked for."
    settings: dict[str, object] = {"kv_events": value.get("endpoint", "tcp://*:5557")}
    if value.get("replay_endpoint"):
        settings["kv_events_replay"] = value["replay_endpoint"]
    return settings


def _kv_transfer(value: object) -> Settings | str:
    if not isinstance(value, dict):
        raise ConfigError("needs an object.")
    if value.get("kv_role") in ("kv_producer", "kv_consumer"):
        raise ConfigError("give --kv-connector p2p,… to engines that hand KV to each other (docs/kv-cache.md).")
    return "KV beyond the device is kept by --kv-connector: host,…, disk,…, shared,… or p2p,…"


def _offloading(value: object) -> Settings | str:
    try:
        size = float(str(value))
    except ValueError as error:
        raise ConfigError("needs a number of GiB.") from error
    return {"kv_connector": [f"host,size={round(size * 1024)}M"]} if size > 0 else "nothing is asked for."


def _origins(value: object) -> Settings | str:
    if isinstance(value, list):  # our own several values, or one of JSON
        texts = [str(one) for one in value]
        if len(texts) == 1 and texts[0].startswith("["):
            try:
                found = json.loads(texts[0])
            except ValueError as error:
                raise ConfigError("needs a JSON list, or origins.") from error
            texts = [str(one) for one in found]
        return {"allowed_origins": texts} if texts else "none are allowed."
    return {"allowed_origins": [value]}


def _config(value: object) -> Settings | str:
    if str(value).endswith((".yaml", ".yml")):
        raise ConfigError("a --config file is TOML here: write `port = 8000` for `port: 8000`.")
    return {"config": value}


_DTYPES = {"half": "float16", "float": "float32"}
_KV_DTYPES = {"fp8_e4m3": "fp8", "half": "float16", "float": "float32"}
_TOOLS = {
    **dict.fromkeys(("qwen3_xml",), "qwen3_coder"),
    **dict.fromkeys(("llama4_json",), "llama3_json"),
    **dict.fromkeys(("llama4_pythonic", "olmo3"), "pythonic"),
    **dict.fromkeys(("deepseek_v32",), "deepseek_v31"),
    **dict.fromkeys(("qwen3_json",), "hermes"),
}
_REASONING = {"deepseek_v3": "deepseek_r1", "holo2": "qwen3", "glm47": "glm45", "minimax_m2_append_think": "minimax_m2"}

_SAME = Taken()
_COMPILES = NotNeeded("nothing is compiled or captured with options; a GPU's steps are recorded as they are needed.")
_CODE = Refused(
    "no code is loaded into processes by a name, but for families of parsers, --extension and --runner-plugin."
)
_MEDIA = NotNeeded("requests contain text only; one with an image, audio or video gets 400.")
_LORA = NotNeeded("an adapter is served by giving its folder as MODEL.")
_SECURE = "ignoring it would protect less; let a proxy do it."
_EXPERTS = NotNeeded("experts are divided by --enable-expert-parallel and copied by --expert-replicas.")
_DATA = NotNeeded("the engines of --data-parallel-size share one api on one machine; `pagewire route` is for several.")
_NODES = NotNeeded("with --nnodes, other machines join at --join-address by `pagewire launch --join`.")
_CACHE = NotNeeded("blocks, their hashes and the states of recurrent layers follow from model and device.")
_METRICS = NotNeeded("/metrics has all metrics; see docs/metrics.md.")
_LOGS = NotNeeded("logs have a line per event and never a prompt or an output.")
_BACKENDS = NotNeeded("the kernels are chosen for the device; `pagewire doctor` says which.")
_LOADING = NotNeeded("files are mapped and read once, in the order in which they are needed.")
_FOUND = NotNeeded("the checkpoint's files say it.")
_RANKS = NotNeeded("ranks and their collectives are pagewire's own processes.")
_CONTEXT = Refused("a context is not divided among ranks.", ("1",))
_TIMED = NotNeeded("the scheduler has its own rules: --max-num-batched-tokens and --itl-target-ms bound a step.")
_OFFLOAD = NotNeeded("weights are not kept in the host's memory; a model that does not fit is refused at start.")
_SLEEP = NotNeeded("sleep frees weights and KV by --enable-sleep-mode alone.")

_ROWS = (
    # model
    (
        Taken("the positional MODEL", renamed("model")),
        "--model=",
    ),
    (
        _SAME,
        "--revision= --served-model-name=+ --enable-sleep-mode --tensor-parallel-size|-tp= "
        "--pipeline-parallel-size|-pp= --data-parallel-size|-dp= --enable-expert-parallel|-ep --nnodes|-n= "
        "--max-num-seqs= --max-num-batched-tokens= "
        "--enable-prefix-caching --scheduling-policy= --gpu-memory-utilization|--device-memory-utilization= "
        "--chat-template= --trust-request-chat-template --enable-log-requests --otlp-traces-endpoint= --host= --port= "
        "--uds= --root-path= --ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-cert-reqs= --api-key=+ "
        "--generation-config= --override-generation-config={} --default-chat-template-kwargs={}",
    ),
    (Taken("half: float16, float: float32", _one_of("dtype", _DTYPES)), "--dtype="),
    (
        Taken("a size or number; auto and -1 are the default; 8k is 8192", _max_model_len),
        "--max-model-len=",
    ),
    (Taken("int8 and int4; else not needed: the checkpoint says it", _quantization), "--quantization|-q="),
    (Taken("auto and dummy; else not needed: formats are recognized", _load_format), "--load-format="),
    (Taken("FLASH_ATTN, FLASHINFER, TRITON_ATTN; else one is chosen", _attention), "--attention-backend="),
    (Taken("fp8_e4m3: fp8", _one_of("kv_cache_dtype", _KV_DTYPES)), "--kv-cache-dtype="),
    (
        Taken(
            "families of the same name, else what the template shows",
            _parser("tool_call_parser", TOOL_CALL_PARSERS, _TOOLS),
        ),
        "--tool-call-parser=",
    ),
    (
        Taken(
            "families of the same name, else what the template shows",
            _parser("reasoning_parser", REASONING_PARSERS, _REASONING),
        ),
        "--reasoning-parser=",
    ),
    (Taken("a TOML file", _config), "--config="),
    (
        NotNeeded("a request without a seed gets a random one; give `seed` with the request to repeat its output."),
        "--seed=",
    ),
    (NotNeeded("families are described by pagewire; no code of a checkpoint is run."), "--trust-remote-code"),
    (Refused("the tokenizer in the model's folder is used.", ("None", MODEL)), "--tokenizer="),
    (
        Refused("the checkpoint's tokenizer and chat template are used.", ("auto", "hf", "slow", "mistral")),
        "--tokenizer-mode=",
    ),
    (Refused("tokens in and out of texts need the tokenizer; `EngineClient` works without."), "--skip-tokenizer-init"),
    (Refused("set the fields in the checkpoint's config.json."), "--hf-overrides={} --model-class-overrides={}"),
    (Refused("the config.json in the model's folder is used."), "--hf-config-path="),
    (Refused("pooling follows the checkpoint's files."), "--pooler-config={}"),
    (Refused("a classifier is not made of another model.", ("auto", "none", "embed")), "--convert="),
    (NotNeeded("the model's files say what it is for; a generating model gives embeddings, too."), "--runner="),
    (
        NotNeeded("described families are computed by pagewire's executors, all others by transformers."),
        "--model-impl=",
    ),
    (
        _FOUND,
        "--code-revision= --tokenizer-revision= --config-format= --quantization-config={} "
        "--allow-deprecated-quantization --language-model-only",
    ),
    (NotNeeded("the Hub's token is HF_TOKEN, as in other programs."), "--hf-token=?"),
    (NotNeeded("the Hub's cache is at HF_HOME, as in other programs."), "--download-dir="),
    (
        _COMPILES,
        "--enforce-eager --compilation-config|-cc={} --optimization-level|-O= --performance-mode= "
        "--cudagraph-capture-sizes=+ --max-cudagraph-capture-size= --cudagraph-metrics --jit-monitor-mode= "
        "--jit-monitor-verbose --kernel-config={} --ir-op-priority={} --enable-flashinfer-autotune",
    ),
    (NotNeeded("a request gets at most 20 candidates for each token, which is its default."), "--max-logprobs="),
    (
        Refused("log-probabilities are those of the model, before other parameters.", ("raw_logprobs",)),
        "--logprobs-mode=",
    ),
    (
        Refused("answers do not contain it."),
        "--enable-return-routed-experts --return-sampling-mask",
    ),
    (Refused("a request asks for it by return_tokens_as_token_ids."), "--return-tokens-as-token-ids"),
    (Refused("a request asks for it by stream_options.include_usage."), "--enable-force-include-usage"),
    (NotNeeded("noise follows from the request's seed and the position."), "--use-fp64-gumbel"),
    (Refused("the model's sliding window is part of what it computes."), "--disable-sliding-window"),
    (Refused("prompts are texts or token ids."), "--enable-prompt-embeds"),
    (NotNeeded("--record-trace records every plan, and `pagewire replay` runs it again."), "--enable-trace-replay"),
    (NotNeeded("texts are turned into tokens by a process of its own."), "--renderer-num-workers="),
    (_CODE, "--io-processor-plugin= --middleware=+"),
    (
        _CODE._replace(because="--runner-plugin module:Class calls a subclass of pagewire.RunnerPlugin."),
        "--logits-processors=+ --worker-cls= --worker-extension-cls=",
    ),
    (
        _CODE._replace(because="a parser of another module is named by --reasoning-parser module:FAMILY."),
        "--reasoning-parser-plugin=",
    ),
    (
        _CODE._replace(because="a parser of another module is named by --tool-call-parser module:FAMILY."),
        "--tool-parser-plugin=",
    ),
    (NotNeeded("policies are those of --scheduling-policy."), "--scheduler-cls="),
    (
        _SLEEP,
        "--sleep-mode-offload-cudagraph --sleep-preserve-parameter-names=+ --enable-cumem-allocator "
        "--enable-nccl-comm-suspend",
    ),
    # loading
    (
        _LOADING,
        "--safetensors-load-strategy= --safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= "
        "--model-loader-extra-config={} --ignore-patterns=+ --use-tqdm-on-load --pt-load-map-location= "
        "--max-parallel-loading-workers=",
    ),
    # kernels
    (
        _BACKENDS,
        "--mamba-backend= --mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds= --moe-backend= --linear-backend= --sparse-indexer-topk-backend= "
        "--attention-config|-ac={} --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= "
        "--disable-custom-all-reduce --disable-cascade-attn",
    ),
    # ranks and machines
    (
        Taken("allgather_reducescatter; else ranks send tokens as the device does it best", _all_to_all),
        "--all2all-backend=",
    ),
    (
        Taken("ray: --backend ray; else ranks are pagewire's own processes", _executor),
        "--distributed-executor-backend=",
    ),
    (
        _RANKS,
        "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= "
        "--ray-workers-use-nsight --enable-batch-sharded-sampling --enable-shm-tensor-arena --enable-hc-sp "
        "--enable-fault-tolerance --fault-tolerance-config={}",
    ),
    (_NODES, "--master-addr= --master-port="),
    (Refused("on the other machines run `pagewire launch --join tcp://HOST:PORT`.", ("0",)), "--node-rank|-r="),
    (Refused("on the other machines run `pagewire launch --join tcp://HOST:PORT`."), "--headless"),
    (
        NotNeeded("--cpu-bind gives each rank its CPUs; by default a NUMA node each."),
        "--numa-bind --numa-bind-nodes=+ --numa-bind-cpus=+",
    ),
    (Refused("set CUDA_VISIBLE_DEVICES to these numbers instead."), "--device-ids="),
    (_CONTEXT, "--decode-context-parallel-size|-dcp= --prefill-context-parallel-size|-pcp="),
    (
        NotNeeded("a context is not divided among ranks."),
        "--dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size=",
    ),
    (
        _DATA,
        "--data-parallel-size-local|-dpl= --data-parallel-address|-dpa= --data-parallel-rpc-port|-dpp= "
        "--data-parallel-backend|-dpb= --data-parallel-hybrid-lb|-dph --dp-sync-interval= "
        "--disable-nccl-for-dp-synchronization --data-parallel-supervisor-port= --dp-supervisor-probe-interval-s= "
        "--dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold=",
    ),
    (
        Refused("start an engine for each rank by itself, and `pagewire route` in front of them."),
        "--data-parallel-rank|-dpn= --data-parallel-start-rank|-dpr= --data-parallel-external-lb|-dpe "
        "--data-parallel-multi-port-external-lb|-dpm",
    ),
    (
        _EXPERTS,
        "--enable-ep-weight-filter --enable-elastic-ep --elastic-ep-max-dp-size= --enable-eplb --eplb-config={} "
        "--expert-placement-strategy= --enable-dbo --ubatch-size= --dbo-decode-token-threshold= "
        "--dbo-prefill-token-threshold=",
    ),
    # cache
    (Taken("`--kv-cache-memory`", renamed("kv_cache_memory")), "--kv-cache-memory-bytes="),
    (Taken("`--kv-connector host,size=…`; the number is GiB", _offloading), "--kv-offloading-size="),
    (
        NotNeeded("--kv-cache-memory and --gpu-memory-utilization set the size of the cache."),
        "--num-gpu-blocks-override=",
    ),
    (
        _CACHE,
        "--block-size= --prefix-caching-hash-algo= --prefix-cache-retention-interval= --prefix-match-unit= "
        "--kv-cache-dtype-skip-layers=+ --kv-sharing-fast-prefill --swa-bounded-replay --mamba-cache-dtype= "
        "--mamba-ssm-cache-dtype= --mamba-block-size= --mamba-cache-mode= --enable-mamba-shared-prefix-checkpoint "
        "--replayssm-buffer-len= --use-replayssm --disable-hybrid-kv-cache-manager --engram-config={}",
    ),
    (NotNeeded("tiers of the KV cache are those of --kv-connector."), "--kv-offloading-backend="),
    (
        _OFFLOAD,
        "--offload-backend= --cpu-offload-gb= --cpu-offload-params=+ --offload-group-size= --offload-num-in-group= "
        "--offload-prefetch-step= --offload-params=+",
    ),
    (
        Taken("`--kv-events` and `--kv-events-replay`", _kv_events),
        "--kv-events-config={}",
    ),
    (
        Taken("not needed with kv_role kv_both: `--kv-connector`; refused with the others", _kv_transfer),
        "--kv-transfer-config={}",
    ),
    # media
    (
        _MEDIA,
        "--limit-mm-per-prompt={} --enable-mm-embeds --media-io-kwargs={} --mm-processor-kwargs={} "
        "--mm-processor-cache-gb= --mm-processor-cache-type= --mm-hasher-algorithm= "
        "--mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= --mm-encoder-attn-backend= --mm-encoder-attn-dtype= "
        "--mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= "
        "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate= --video-pruning-method= --mm-tensor-ipc= "
        "--mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize --allowed-local-media-path= "
        "--allowed-media-domains=+ --trust-request-mm-kwargs --disable-chunked-mm-input --default-mm-loras={} "
        "--enable-tower-connector-lora --ec-transfer-config={} --ec-manager-config={}",
    ),
    (Refused("there is no encoder of media to serve."), "--mm-encoder-only"),
    # adapters
    (
        _LORA,
        "--enable-lora --max-loras= --max-lora-rank= --lora-dtype= --max-cpu-loras= --fully-sharded-loras "
        "--lora-target-modules=+ --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras "
        "--max-lora-cls-labels=",
    ),
    (Refused("serve an adapter by giving its folder as MODEL, several by several MODELs."), "--lora-modules=+"),
    # observation
    (
        _METRICS,
        "--show-hidden-metrics-for-version= --per-request-spec-decode-metrics= --kv-cache-metrics "
        "--kv-cache-metrics-sample= --custom-histogram-buckets={} --enable-mfu-metrics --disable-log-stats "
        "--aggregate-engine-logging --enable-server-load-tracking",
    ),
    (
        _LOGS,
        "--logging-config={} --log-config-file= --enable-logging-iteration-details --max-log-len= "
        "--enable-log-outputs --enable-log-deltas --log-error-stack --uvicorn-log-level=",
    ),
    (NotNeeded("spans have the stages of a request anyway."), "--collect-detailed-traces=+"),
    (
        NotNeeded("`python -m pagewire.bench.engine.step --profile` shows the parts of a step."),
        "--enable-layerwise-nvtx-tracing --profiler-config={}",
    ),
    # scheduling
    (Taken("`--max-queued-requests`", renamed("max_queued_requests")), "--max-num-queued-reqs="),
    (Taken("`--max-queued-tokens`", renamed("max_queued_tokens")), "--max-num-queued-tokens="),
    (
        _TIMED,
        "--max-num-scheduled-tokens= --max-num-active-seqs= --long-prefill-token-threshold= "
        "--long-prefill-token-threshold-adaptive --enable-chunked-prefill --scheduler-reserve-full-isl --watermark= "
        "--prefill-schedule-interval=",
    ),
    (
        Taken(
            "`--no-async-scheduling`: `--pipeline-depth 1`",
            lambda value: "plans are in flight anyway." if value else {"pipeline_depth": 1},
        ),
        "--async-scheduling",
    ),
    (NotNeeded("a token is sent as soon as it is there; a slow reader gets larger pieces."), "--stream-interval="),
    # kinds of generation
    (
        Taken("`--speculative ngram,tokens=N`; not needed with other methods", _speculative),
        "--speculative-config|-sc={}",
    ),
    (Refused("outputs are not marked."), "--watermark-config={}"),
    (Refused("models generate one token after the other."), "--diffusion-config|-dc={}"),
    (
        NotNeeded("a thinking budget is a field of the request, and tags are those of the model's family."),
        "--reasoning-config={}",
    ),
    (NotNeeded("grammars are enforced by llguidance."), "--structured-outputs-config={}"),
    (
        Refused("there is no such extension; `--extension module:Class` adds data to plans."),
        "--additional-config={} --aux-output-config={}",
    ),
    (Refused("weights are replaced by POST /admin/models (--enable-model-swap)."), "--weight-transfer-config={}"),
    # serving
    (Taken("`--drain-timeout`", renamed("drain_timeout")), "--shutdown-timeout="),
    (Taken("`--api-processes`", renamed("api_processes")), "--api-server-count|-asc="),
    (
        Taken("`--no-access-log`", lambda value: {"access_log": not value}),
        "--disable-uvicorn-access-log",
    ),
    (Taken("also a JSON list", _origins), "--allowed-origins=+"),
    (
        NotNeeded("probes and /metrics are logged only if they fail; --no-access-log logs no request."),
        "--disable-access-log-for-endpoints=",
    ),
    (NotNeeded("a request is refused for what it is, whatever the environment has."), "--fail-on-environ-validation"),
    (NotNeeded("keys travel in headers, and no cookies are used."), "--allow-credentials"),
    (
        NotNeeded("web pages may use the API's methods and headers and no others."),
        "--allowed-methods= --allowed-headers=",
    ),
    (
        NotNeeded("a renewed certificate is read at the next start; SIGHUP starts anew without an interruption."),
        "--enable-ssl-refresh",
    ),
    (Refused(_SECURE), "--ssl-ciphers="),
    (NotNeeded("every answer has an X-Request-Id."), "--enable-request-id-headers"),
    (
        NotNeeded("/docs and /openapi.json say nothing that is secret, and need no other server."),
        "--disable-fastapi-docs --enable-offline-docs",
    ),
    (
        NotNeeded("--max-head-size bounds the head, with at most 100 headers."),
        "--h11-max-incomplete-event-size= --h11-max-header-count=",
    ),
    (Refused("answers come by HTTP; `EngineClient` is for programs with token ids."), "--grpc --grpc-port="),
    (
        NotNeeded(
            "content is rendered as the chat template reads it.",
        ),
        "--chat-template-content-format=",
    ),
    (Refused("an answer's role is assistant.", ("assistant",)), "--response-role="),
    (NotNeeded("tool_choice auto works whenever the model's format of calls is known."), "--enable-auto-tool-choice"),
    (NotNeeded("with tool_choice none the tools are never in the prompt."), "--exclude-tools-when-tool-choice-none"),
    (Refused("forced calls follow tool_choice and each tool's `strict`.", ("auto",)), "--tool-strict-level="),
    (Refused("tools are run by the client."), "--tool-server="),
    (NotNeeded("usage has the cached tokens anyway."), "--enable-prompt-tokens-details"),
    (NotNeeded("a request asks for `timings` by itself."), "--enable-per-request-metrics"),
    (NotNeeded("a comment is sent after 15 seconds of silence."), "--sse-keep-alive-interval="),
    (NotNeeded("/tokenizer_info is there."), "--enable-tokenizer-info-endpoint"),
    (Refused("there is no endpoint in Cohere's format."), "--cohere-format="),
    (NotNeeded("there is no endpoint in Cohere's format."), "--cohere-is-reasoning-model"),
    (
        Refused("thinking is turned off by the template's variable.", ("auto", "none")),
        "--anthropic-disabled-thinking-effort=",
    ),
    (NotNeeded("the endpoints for token ids are there."), "--tokens-only --enable-scale-out"),
    (NotNeeded("answers have no `system_fingerprint`."), "--fingerprint-mode= --fingerprint-value="),
    (NotNeeded("scores are computed in the worker."), "--enable-flash-late-interaction"),
)

FLAGS: list[Flag] = read_table(_ROWS)
ALIASES = {
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}

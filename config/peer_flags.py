"""The flags of SGLang 0.5 and llama-server that are used most, and what each of them becomes here. A name that vLLM has
as well means what it means in vLLM."""

from ..errors import ConfigError
from .foreign_flags import MODEL, Convert, Flag, NotNeeded, Refused, Settings, Taken, find, read_table, renamed
from .vllm_flags import FLAGS as VLLM


def _number(setting: str) -> Convert:
    """A number of which -1 or 0 stands for the default."""
    return lambda value: "this is what happens anyway." if str(value) in ("-1", "0") else {setting: value}


def _policy(value: object) -> Settings | str:
    return (
        {"scheduling_policy": value} if value in ("fcfs", "priority") else "prompts with cached beginnings cost less."
    )


def _speculation(value: object) -> Settings | str:
    return {"speculative": "ngram"} if str(value).upper() == "NGRAM" else "draft tokens come from earlier text: NGRAM."


def _cache_type(value: object) -> Settings | str:
    table = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    return (
        {"kv_cache_dtype": table[str(value)]} if value in table else "the cache is not quantized in llama.cpp's types."
    )


def _template(value: object) -> Settings:
    text = str(value)
    if "{" not in text and "/" not in text and not text.endswith(".jinja"):
        raise ConfigError("templates have no names here; give a jinja file, or leave it out: the model has one.")
    return {"chat_template": text}


def _reasoning_off(value: object) -> Settings | str:
    if str(value) == "0":
        return {"default_chat_template_kwargs": {"enable_thinking": False}}
    return "a request asks for `thinking_token_budget` by itself."


def _default(name: str) -> Convert:
    """A sampling parameter of requests that give none."""

    def convert(value: object) -> Settings:
        try:
            return {"override_generation_config": {name: int(str(value)) if name == "top_k" else float(str(value))}}
        except ValueError as error:
            raise ConfigError("needs a number.") from error

    return convert


_COMPILES = NotNeeded("a GPU's steps are recorded as they are needed.")
_MEMORY = NotNeeded("files are mapped, and memory is planned before it is allocated.")
_METRICS = NotNeeded("it is there anyway.")

_SGLANG = (
    (Taken("the positional MODEL", renamed("model")), "--model-path="),
    (Taken("`--max-model-len`", renamed("max_model_len")), "--context-length="),
    (Taken("`--gpu-memory-utilization`", renamed("gpu_memory_utilization")), "--mem-fraction-static="),
    (Taken("`--max-num-seqs`", renamed("max_num_seqs")), "--max-running-requests="),
    (Taken("`--max-num-batched-tokens`", _number("max_num_batched_tokens")), "--chunked-prefill-size="),
    (Taken("fcfs, priority; else not needed", _policy), "--schedule-policy="),
    (Taken("`--tensor-parallel-size`", renamed("tensor_parallel_size")), "--tp-size|--tp="),
    (Taken("`--data-parallel-size`", renamed("data_parallel_size")), "--dp-size|--dp="),
    (Taken("`--pipeline-parallel-size`", renamed("pipeline_parallel_size")), "--pp-size|--pp="),
    (
        Taken("`--enable-expert-parallel`", lambda value: {"enable_expert_parallel": str(value) != "1"}),
        "--ep-size|--ep|--expert-parallel-size=",
    ),
    (
        Taken("`--no-enable-prefix-caching`", lambda value: {"enable_prefix_caching": not value}),
        "--disable-radix-cache",
    ),
    (Taken("`--deterministic`", renamed("deterministic")), "--enable-deterministic-inference"),
    (
        Taken("`--pipeline-depth 1`", lambda value: {"pipeline_depth": 1} if value else "plans are in flight anyway."),
        "--disable-overlap-schedule",
    ),
    (Taken("NGRAM: `--speculative ngram`; else not needed", _speculation), "--speculative-algorithm="),
    (Taken("`--enable-log-requests`", renamed("enable_log_requests")), "--log-requests"),
    (Taken("`--hang-timeout-s`", renamed("hang_timeout_s")), "--watchdog-timeout="),
    (Refused("the tokenizer in the model's folder is used.", (MODEL,)), "--tokenizer-path="),
    (NotNeeded("a request without a seed gets a random one."), "--random-seed="),
    (_COMPILES, "--disable-cuda-graph --cuda-graph-max-bs= --cuda-graph-bs=+ --enable-torch-compile"),
    (NotNeeded("the kernels are chosen for the device."), "--sampling-backend= --moe-runner-backend= --page-size="),
    (NotNeeded("grammars are enforced by llguidance."), "--grammar-backend="),
    (NotNeeded("--kv-cache-memory sets the size of the cache."), "--max-total-tokens="),
    (
        NotNeeded("--max-num-batched-tokens bounds a step, prompts and decodes together."),
        "--max-prefill-tokens= --enable-mixed-chunk",
    ),
    (_METRICS, "--enable-metrics --enable-cache-report"),
    (NotNeeded("the model's files say it."), "--is-embedding"),
    (NotNeeded("with --nnodes, other machines join at --join-address."), "--dist-init-addr="),
    (NotNeeded("a server is ready when it can answer."), "--skip-server-warmup"),
    (NotNeeded("tiers of the KV cache are those of --kv-connector host,size=4G."), "--enable-hierarchical-cache"),
    (
        NotNeeded("draft tokens come from earlier text: --speculative ngram,tokens=N."),
        "--speculative-num-draft-tokens=",
    ),
)
_LLAMA = (
    (Taken("the positional MODEL: a GGUF file", renamed("model")), "-m="),
    (Taken("the positional MODEL: NAME:QUANT", renamed("model")), "--hf-repo|-hf|-hfr="),
    (Taken("`--max-model-len`; 0 is the default", _number("max_model_len")), "--ctx-size|-c="),
    (Taken("`--max-num-seqs`", _number("max_num_seqs")), "--parallel|-np="),
    (Taken("`--max-num-batched-tokens`", renamed("max_num_batched_tokens")), "--batch-size|-b="),
    (Taken("`--threads`; -1 is the default", _number("threads")), "-t="),
    (Taken("`--served-model-name`", lambda value: {"served_model_name": [value]}), "--alias|-a="),
    (Taken("`--chat-template`", renamed("chat_template")), "--chat-template-file="),
    (Taken("`--default-chat-template-kwargs`", renamed("default_chat_template_kwargs")), "--chat-template-kwargs={}"),
    (Taken("0: `--default-chat-template-kwargs`", _reasoning_off), "--reasoning-budget="),
    (Taken("`--ssl-keyfile`", renamed("ssl_keyfile")), "--ssl-key-file="),
    (Taken("`--ssl-certfile`", renamed("ssl_certfile")), "--ssl-cert-file="),
    (Taken("`--root-path`", renamed("root_path")), "--api-prefix="),
    (Taken("f32, bf16; else not needed", _cache_type), "--cache-type-k|-ctk= --cache-type-v|-ctv="),
    (Taken("`--override-generation-config`", _default("temperature")), "--temp="),
    (Taken("`--override-generation-config`", _default("top_k")), "--top-k="),
    (Taken("`--override-generation-config`", _default("top_p")), "--top-p="),
    (Taken("`--override-generation-config`", _default("min_p")), "--min-p="),
    (
        NotNeeded("--device chooses; a model is computed whole on one kind of device."),
        "--n-gpu-layers|--gpu-layers|-ngl= --split-mode|-sm= --tensor-split|-ts= --main-gpu|-mg=",
    ),
    (_MEMORY, "--mlock --mmap --no-mmap --numa= --defrag-thold|-dt= --cache-reuse="),
    (NotNeeded("it is so anyway."), "--jinja --cont-batching|-cb --metrics --slots --warmup"),
    (NotNeeded("attention never stores its matrix of weights."), "--flash-attn|-fa=?"),
    (
        NotNeeded("a process serves HTTP, and the pool of --threads computes all tokens."),
        "--threads-http= --threads-batch|-tb=",
    ),
    (NotNeeded("the model's files say it."), "--embedding|--embeddings --reranking|--rerank"),
    (NotNeeded("tokens are sent as they come; --request-timeout-s bounds a request."), "--timeout|-to="),
    (NotNeeded("reasoning is a field of its own where the model's family marks it."), "--reasoning-format="),
    (NotNeeded("requests say `max_tokens`."), "--predict|--n-predict="),
    (NotNeeded("logs have a line per event."), "--verbose|-v --log-disable --log-verbosity|-lv= --log-colors=?"),
    (NotNeeded("draft tokens come from earlier text: --speculative ngram."), "--model-draft|-md= --draft-max|--draft="),
    (Refused("serve an adapter by giving its folder as MODEL."), "--lora= --lora-scaled="),
    (
        Refused("positions are scaled as the checkpoint says.", ("none",)),
        "--rope-scaling= --rope-freq-base= --rope-freq-scale= --yarn-orig-ctx=",
    ),
    (Refused("pooling follows the checkpoint's files."), "--pooling="),
    (Refused("web pages of one's own are served by another server."), "--path="),
    (NotNeeded("the page at / needs nothing and shows nothing that is secret."), "--webui --no-webui"),
)


SGLANG: list[Flag] = read_table(_SGLANG)
LLAMA: list[Flag] = read_table(_LLAMA)
BY_NAME = find([*VLLM, *SGLANG, *LLAMA])

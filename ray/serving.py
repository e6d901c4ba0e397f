"""`pagewire.ray.app`: a Ray Serve application of engines that come and go with the load.

    serve run pagewire.ray:app model=PATH max_replicas=4

Three deployments: `Engine` (`replica.py`), `Door` (`door.py`), and `Registry`, through which doors learn of engines.
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any, get_origin

import msgspec
from msgspec import Meta, Struct

from ..config.config import Config
from ..config.flags import SETTINGS, from_options
from ..errors import ConfigError
from ..procs.prepare import prepare_http
from .door import Door
from .policy import Scale
from .replica import LEAVE_S, STOP_S, Engine
from .roster import Registry

_OPEN = 100_000  # requests of a door that Serve does not queue: the router does
# How long a door that was replaced may stay. It has open streams only, and ends with the last one. There is a bound
# because Serve calls the application deploying until then.
_LAST_STREAM_S = 24 * 3600.0


class ServeOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What the operator says of the application, beside the settings of its engines."""

    min_replicas: Annotated[int, Meta(ge=1)] = 1
    max_replicas: Annotated[int, Meta(ge=1)] = 1
    requests_per_replica: Annotated[float, Meta(gt=0)] = 32.0  # open sequences for which there is one engine
    ttft_target_ms: Annotated[float, Meta(ge=0)] = 0.0  # 90th percentile; 0: none
    upscale_delay_s: Annotated[float, Meta(ge=0)] = 10.0
    downscale_delay_s: Annotated[float, Meta(ge=0)] = 120.0
    look_back_period_s: Annotated[float, Meta(gt=0)] = 15.0  # longer than Serve's time between reports, which is 10 s
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0  # of each engine
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0
    num_doors: Annotated[int, Meta(ge=1)] = 1
    version: str = ""  # another one replaces all engines in turn, without another change


_OF_SERVE = {field.name for field in msgspec.structs.fields(ServeOptions)}
_ADDRESS = "it listens at a free port of its node"
_TLS = "doors reach engines without TLS, and clients reach Serve's proxy, which may have TLS"
_FILE = "a file would have to be on every node; give the keys themselves"
_ONE = "it names one for all engines, and several may be on a node"
_REFUSED = {  # settings that are not for the engines, and why
    **dict.fromkeys(("host", "port", "uds", "join_address"), _ADDRESS),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"), _TLS),
    **dict.fromkeys(("api_key_file", "admin_api_key_file"), _FILE),
    **dict.fromkeys(("client_address", "kv_events", "kv_events_replay", "record_trace"), _ONE),
    "data_parallel_size": "max_replicas says how many there are",
}
_OF_RAY = {"nnodes", "key_file"}  # settings of an engine on several nodes, which only Ray starts here
_OF_DOOR = ("root_path", "requests_per_minute", "tokens_per_minute", "access_log")  # not of the engines behind it


def split(args: Mapping[str, object]) -> tuple[ServeOptions, dict[str, object], Config]:
    """The options, the engines' settings, and these as a Config. Values may be text, as `serve run` gives them. Raises
    ConfigError."""
    named = {name.replace("-", "_"): value for name, value in args.items()}
    try:
        options = msgspec.convert(
            {name: value for name, value in named.items() if name in _OF_SERVE}, ServeOptions, strict=False
        )
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{path.rstrip('`')}: {what[0].lower()}{what[1:]}.".replace("`", "")) from error
    if options.max_replicas < options.min_replicas:
        raise ConfigError(f"max_replicas {options.max_replicas} is less than min_replicas {options.min_replicas}.")
    settings = {name: value for name, value in named.items() if name not in _OF_SERVE}
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ConfigError(f"{name} is no setting of pagewire serve, and none of its Ray Serve application.")
        if name in _REFUSED:
            raise ConfigError(f"{name} is not for an engine of a Ray Serve application: {_REFUSED[name]}.")
        if isinstance(value, str) and get_origin(SETTINGS[name].kind) is tuple:
            settings[name] = value.split(",")
    if settings.get("device", "auto") == "auto":  # Ray hides no GPU from an engine that asked for none
        settings["device"] = "cuda" if options.num_gpus else "cpu"
    config = from_options("pagewire.ray.app", settings, strict=False)
    _check_nodes(settings, config)
    _check_gpus(options.num_gpus, config)
    return options, settings, config


def _check_nodes(settings: Mapping[str, object], config: Config) -> None:
    """Raises ConfigError."""
    if config.service.backend == "ray":
        if config.source.models:
            raise ConfigError("backend ray is for engines of one model; leave it out, or name one model.")
    elif found := [name for name in settings if name in _OF_RAY]:
        raise ConfigError(
            f"{found[0]} is for an engine on several nodes; leave it out, or give backend=ray, so that Ray places the "
            "ranks of each engine."
        )


def _check_gpus(num_gpus: float, config: Config) -> None:
    """`num_gpus`: of each engine. Raises ConfigError if its ranks do not fit them."""
    engine = config.engine
    size, num_stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    num_ranks = size * num_stages
    if engine.device == "cpu":
        if num_gpus:
            raise ConfigError(f"num_gpus {num_gpus:g} is for engines on GPUs; leave it or device=cpu out.")
        return
    is_part = num_ranks == 1 and 0 < num_gpus < 1  # engines share a GPU
    is_shared = bool(config.source.models) and num_gpus > num_ranks  # the models of an engine share its GPUs
    if num_gpus != num_ranks and not (is_part or is_shared):
        raise ConfigError(
            f"num_gpus {num_gpus:g} does not fit the {num_ranks} ranks of an engine (tensor_parallel_size {size} times "
            f"pipeline_parallel_size {num_stages}): each rank takes a GPU; give num_gpus={num_ranks}."
        )


def build(args: Mapping[str, object]) -> Any:
    """Makes the application: see `pagewire.ray.app` for the arguments."""
    options, settings, config = split(args)
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    http = prepare_http(from_options("pagewire.ray.app", {"host": "0.0.0.0"}, base=config))
    num_gpus = 0.0 if config.service.backend == "ray" else options.num_gpus  # else those of its ranks' own places
    of_engine = {name: value for name, value in settings.items() if name not in _OF_DOOR}
    registry = serve.deployment(
        _Registry,
        name="Registry",
        num_replicas=1,
        max_ongoing_requests=1000,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},
    ).bind()
    policy = AutoscalingPolicy(
        policy_function=Scale,
        policy_kwargs={
            "requests_per_replica": options.requests_per_replica,
            "ttft_target_ms": options.ttft_target_ms,
        },
    )
    engine = serve.deployment(
        Engine,
        name="Engine",
        max_ongoing_requests=1000,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            initial_replicas=options.min_replicas,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
            look_back_period_s=options.look_back_period_s,
            policy=policy,
        ),
        graceful_shutdown_timeout_s=config.service.drain_timeout + LEAVE_S + STOP_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": num_gpus},
    ).bind(of_engine, options.version, registry)
    wrapped = serve.ingress(Door(http))(_Ingress)
    return serve.deployment(
        wrapped,
        name="Door",
        num_replicas=options.num_doors,
        max_ongoing_requests=_OPEN,
        graceful_shutdown_timeout_s=_LAST_STREAM_S,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0},
    ).bind(engine, registry)


class _Registry:
    """The deployment's class around a `Registry`."""

    def __init__(self) -> None:
        self._registry = Registry()

    async def announce(self, url: str, is_leaving: bool) -> None:
        self._registry.announce(url, is_leaving, time.monotonic())

    async def engines(self) -> dict[str, bool]:
        return self._registry.engines(time.monotonic())


class _Ingress:
    """What Serve wraps around a `Door`. Its arguments make the other deployments parts of the application."""

    def __init__(self, *deployments: object) -> None:
        pass

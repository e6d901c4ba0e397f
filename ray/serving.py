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
_OF_REPLICA = ("host", "port", "uds", "ssl_certfile", "data_parallel_size", "api_key_file", "admin_api_key_file")
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
        if name in _OF_REPLICA:
            raise ConfigError(
                f"{name} is not for an engine of a Ray Serve application, which has its own; leave it out."
            )
        if isinstance(value, str) and get_origin(SETTINGS[name].kind) is tuple:
            settings[name] = value.split(",")
    config = from_options("pagewire.ray.app", settings, strict=False)
    return options, settings, config


def build(args: Mapping[str, object]) -> Any:
    """Makes the application: see `pagewire.ray.app` for the arguments."""
    options, settings, config = split(args)
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    http = prepare_http(from_options("pagewire.ray.app", {"host": "0.0.0.0"}, base=config))
    of_engine = {name: value for name, value in settings.items() if name not in _OF_DOOR}
    registry = serve.deployment(
        _Registry,
        name="Registry",
        num_replicas=1,
        max_ongoing_requests=1000,
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
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    ).bind(of_engine, options.version, registry)
    wrapped = serve.ingress(Door(http))(_Ingress)
    return serve.deployment(
        wrapped,
        name="Door",
        num_replicas=options.num_doors,
        max_ongoing_requests=_OPEN,
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

"""The environment variables of an actor's process."""

from ..config.config import EngineConfig
from . import interpreter
from .topology import kind


def environment_of(name: str, config: EngineConfig, *, ranks_are_here: bool) -> dict[str, str]:
    """This process's variables without secrets, and settings that glibc and OpenMP read only when a process starts.

    The threads of our kernels are a pool of their own (kernels/cpu/threads.c). The settings of OpenMP are for torch's
    operations, such as those of the sampler: without the policy their threads spin for milliseconds, and a sampled
    token beside other programs takes ten times as long. The malloc settings keep large buffers mapped, since page
    faults would cost more than the copies into them.
    """
    environment = interpreter.environment(interpreter.COLLECTOR_HEADERS if kind(name) == "api" else ())
    if kind(name) == "worker":
        defaults = {
            "OMP_WAIT_POLICY": "passive",
            "OMP_NUM_THREADS": str(config.num_threads),
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's; its threads would start with the import, before a worker is forked
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**33),
        }
        if ranks_are_here:  # else gloo listens where the machine's name leads, and NCCL on the first network it finds
            defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        environment |= {key: value for key, value in defaults.items() if key not in environment}
        if config.gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpu_ids)
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment

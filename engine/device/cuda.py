"""A CUDA device, as far as the plain torch path needs one. Steps are synchronous; streams and graphs are to come."""

import torch

_CACHE_SHARE = 0.8  # of the memory that is free once the weights are loaded; the rest is activations


class CudaDevice:
    """See `Device`. Becomes the process's current CUDA device."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)

    def available_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def cache_memory(self) -> int:
        return int(_CACHE_SHARE * self.available_memory())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

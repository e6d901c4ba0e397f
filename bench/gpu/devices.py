"""The figures of GPUs from which `estimate.py` estimates. None was measured by us."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Rates are the vendor's, and `estimate.py` says which share of them it counts on."""

    name: str
    architecture: int  # 90: sm_90
    processors: int  # multiprocessors
    ghz: float  # the boost clock
    gbs: float  # memory bandwidth, GB/s
    tflops: float  # dense bf16 with float32 sums
    mma_share: float  # of `tflops`, that instructions of single warps (HMMA) reach
    shared: int  # bytes of shared memory of a multiprocessor
    threads: int  # of a multiprocessor
    dram_cycles: int  # from a load to its number, of the memory
    cache_cycles: int  # the same, of the second cache
    registers: int = 65536  # of a multiprocessor


# Sources. Multiprocessors, clocks, bandwidth and operations: NVIDIA's data sheets and white papers of A100 80 GB SXM,
# RTX 4090, H100 SXM, H200 SXM and HGX B200 (1,000 W; its clock for tensor cores as listed by hmc-tech.com). Shared
# memory and threads: the table of compute capabilities in the CUDA C++ programming guide. Cycles: of the order of those
# in arXiv 2402.13499 for A100, 4090 and H100, rounded; H200 and B200 are assumed to be as H100. mma_share: HMMA on
# Hopper reaches about 62 % of what HGMMA does (the same paper); B200 is assumed to be worse.
DEVICES = (
    Device(name="A100", architecture=80, processors=108, ghz=1.41, gbs=2039, tflops=312, mma_share=1.0,
           shared=164 << 10, threads=2048, dram_cycles=470, cache_cycles=260),
    Device(name="4090", architecture=89, processors=128, ghz=2.52, gbs=1008, tflops=165, mma_share=1.0,
           shared=100 << 10, threads=1536, dram_cycles=540, cache_cycles=270),
    Device(name="H100", architecture=90, processors=132, ghz=1.83, gbs=3350, tflops=989, mma_share=0.62,
           shared=228 << 10, threads=2048, dram_cycles=480, cache_cycles=260),
    Device(name="H200", architecture=90, processors=132, ghz=1.83, gbs=4800, tflops=989, mma_share=0.62,
           shared=228 << 10, threads=2048, dram_cycles=480, cache_cycles=260),
    Device(name="B200", architecture=100, processors=148, ghz=1.86, gbs=8000, tflops=2250, mma_share=0.5,
           shared=228 << 10, threads=2048, dram_cycles=480, cache_cycles=260),
)  # fmt: skip

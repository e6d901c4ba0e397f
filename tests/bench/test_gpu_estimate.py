"""The estimate of a step on a GPU: what is read off machine code, a launch computed by hand, and whole steps."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagewire.bench.gpu import sass
from pagewire.bench.gpu.devices import DEVICES, Device

if TYPE_CHECKING:
    from pagewire.bench.gpu.launches import Kernel

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# A loop that copies 16 bytes a thread and multiplies, between a load that decides whether the kernel goes on and a
# merge by the last program that arrives.
CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00 */
        /*0010*/                   LDG.E R2, desc[UR4][R4.64] ;                 /* 0x01 */
        /*0020*/                   ISETP.GE.AND P0, PT, R2, R1, PT ;            /* 0x02 */
        /*0030*/               @P0 EXIT ;                                       /* 0x03 */
        /*0040*/                   LDG.E.64 R6, desc[UR4][R8.64] ;              /* 0x04 */
        /*0050*/                   LDGSTS.E.BYPASS.128 [R20], desc[UR4][R6.64] ; /* 0x05 */
        /*0060*/                   LDGDEPBAR ;                                  /* 0x06 */
        /*0070*/                   LDSM.16.M88.4 R24, [R20] ;                   /* 0x07 */
        /*0080*/                   LDGSTS.E.BYPASS.128 [R20], desc[UR4][R10.64] ; /* 0x08 */
        /*0090*/                   HMMA.16816.F32.BF16 R28, R24, R36, R28 ;     /* 0x09 */
        /*00a0*/                   HMMA.16816.F32.BF16 R32, R24, R38, R32 ;     /* 0x0a */
        /*00b0*/               @P1 BRA 0x70 ;                                   /* 0x0b */
        /*00c0*/                   STG.E.128 desc[UR4][R4.64], R28 ;            /* 0x0c */
        /*00d0*/                   ATOMG.E.ADD.STRONG.GPU PT, R40, desc[UR4][R42.64], R44 ; /* 0x0d */
        /*00e0*/                   ISETP.NE.AND P2, PT, R40, R1, PT ;           /* 0x0e */
        /*00f0*/               @P2 EXIT ;                                       /* 0x0f */
        /*0100*/                   LDG.E.STRONG.GPU R46, desc[UR4][R48.64] ;    /* 0x10 */
        /*0110*/                   STG.E desc[UR4][R4.64], R46 ;                /* 0x11 */
        /*0120*/                   EXIT ;                                       /* 0x12 */
        /*0130*/                   BRA 0x130;                                   /* 0x13 */
"""


def test_the_main_loop_and_the_chain_of_loads() -> None:
    found = sass.read(CODE)
    assert found.main == sass.Body(instructions=5, copied=32 * 16, loaded=0, operations=2 * 2 * 16 * 8 * 16)
    assert found.outside == sass.Body(instructions=15, copied=32 * 16, loaded=32 * (4 + 8 + 4), operations=0)
    # The deciding load, the address, the copy, then the counter and what is merged.
    assert found.chain == 5 and not found.is_warpgroup


def test_loads_that_do_not_wait_for_each_other_count_once() -> None:
    first, second = (f"/*00{n}0*/ LDG.E R{n}, desc[UR4][R8.64] ; /* 0x00 */" for n in (1, 2))
    use = "/*00{0}0*/ FADD R{0}, R{1}, R{2} ; /* 0x00 */"
    third = "/*0060*/ LDG.E R6, desc[UR4][R12.64] ; /* 0x00 */"
    assert sass.read(f"{first}\n{second}\n{use.format(3, 1, 2)}").chain == 1
    assert sass.read(f"{first}\n{second}\n{use.format(3, 1, 2)}\n{third}").chain == 2, "it is issued after the sum"
    assert sass.read(f"{first}\n{second}\n{third}").chain == 1


def test_instructions_of_warp_groups_count_for_four_warps() -> None:
    line = "        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;     /* 0x00 */"
    found = sass.read(line)
    assert found.main.operations == 2 * 64 * 128 * 16 // 4 and found.is_warpgroup
    assert sass.read("").chain == 0


# The arithmetic of a launch, with round numbers.

DEVICE = Device(
    name="round", architecture=90, processors=100, ghz=1.0, gbs=1000 / 0.9, tflops=100 / 0.8, mma_share=0.5,
    shared=200 << 10, threads=2048, dram_cycles=500, cache_cycles=200,
)  # fmt: skip


def kernel(*, shared: int = 99 << 10, chain: int = 3) -> "Kernel":
    from pagewire.bench.gpu.launches import Kernel

    main = sass.Body(instructions=40, copied=512, loaded=0, operations=4096)
    return Kernel(registers=100, shared=shared, warps=4, code=sass.Code(main, sass.Body(0, 0, 0, 0), chain, False))


@needs_triton
def test_a_launch_computed_by_hand() -> None:
    from pagewire.bench.gpu.estimate import Work, cost, resident

    assert resident(kernel(), DEVICE) == 2, "100 KiB each of 200"
    assert resident(kernel(shared=0), DEVICE) == 4, "104 registers of 128 threads, of 65,536"
    # 200 programs at once: of 250 pieces, 50 run in a second round on half of the multiprocessors.
    found = cost(kernel(), 250, Work(bytes=2.5e8, operations=2.5e9, units=250), DEVICE)
    assert found.node == 1.3
    assert found.chain == pytest.approx(2 * 0.2 + 0.5)
    assert found.memory == pytest.approx(250), "2.5e8 bytes by 1,000 GB/s: 50 programs have bytes enough in flight"
    assert found.tensor_cores == pytest.approx(2e9 / 50e6 + 5e8 / 25e6), "half of 100 TFLOP/s, without warp groups"
    passes = 2.5e9 / 4096
    assert found.issue == pytest.approx(passes * 40 / (4 * 100) * 1e-3 * (200 + 2 * 50) / 250)
    assert found.total == pytest.approx(found.node + found.chain + found.memory) and found.largest == "memory"


@needs_triton
def test_a_last_round_of_few_programs_is_bound_by_its_bytes_in_flight() -> None:
    from pagewire.bench.gpu.estimate import Work, cost

    found = cost(kernel(), 202, Work(bytes=2.02e8, operations=0, units=202), DEVICE)
    assert found.memory == pytest.approx(200 + 2e6 / (2 * (99 << 10) / 0.5))


@needs_triton
def test_few_programs_are_bound_by_the_bytes_in_flight() -> None:
    from pagewire.bench.gpu.estimate import Work, cost

    found = cost(kernel(), 2, Work(bytes=1e6, operations=0, units=2), DEVICE)
    in_flight = 2 * (99 << 10)
    assert found.memory == pytest.approx(1e6 / (in_flight / 0.5)), "bytes in flight, by the latency"


@needs_triton
def test_expected_experts() -> None:
    from pagewire.bench.gpu.estimate import distinct_experts

    assert distinct_experts(128, 1) == pytest.approx(1)
    assert distinct_experts(2, 2) == pytest.approx(1.5)
    assert 127.9 < distinct_experts(128, 8 * 256) < 128


def test_devices_are_plausible() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES) == 5
    assert all(0 < device.mma_share <= 1 and device.cache_cycles < device.dram_cycles for device in DEVICES)
    assert replace(DEVICES[0], name="") != DEVICES[0]


# Whole steps, in a process of its own: this one may run Triton's interpreter.

PROGRAM = """
import json, sys
sys.path.insert(0, {typing!r})
from pagewire.bench.gpu.devices import DEVICES
from pagewire.bench.gpu.estimate import steps_of
device = next(device for device in DEVICES if device.name == "H200")
found = steps_of("qwen3-0.6b", (1, 8, 32, 256), device)
print(json.dumps({{name: [made.ms, made.by_kernel(), made.by_term(), sum(work.bytes for work in made.works)]
                   for name, (_, made) in found.items()}}))
"""


@needs_triton
@pytest.mark.long
def test_the_estimate_of_a_step_follows_the_engines_walk() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    program = PROGRAM.format(typing=str(ROOT / ".typing"))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # 28 layers: four products and attention with its write of keys, and the head; above 16 rows in a library.
    kernels = {name: {kernel: number for kernel, (number, _) in made[1].items()} for name, made in found.items()}
    one, many = kernels["step, 1 × 1024"], kernels["step, 256 × 1024"]
    assert one["_decode_kernel"] == many["_decode_kernel"] == one["_norm_rotary_write"] == 28
    assert one["_product"] == 4 * 28 + 1 and many["aten.mm"] >= 4 * 28 and "_product" not in many
    assert kernels["step, prompt of 1024"]["_extend_kernel"] == 28
    times = [found[f"step, {rows} × 1024"][0] for rows in (1, 8, 32, 256)]
    assert times == sorted(times) and times[0] > 0.2, "more rows take longer"
    for name, (ms, by_kernel, _, _) in found.items():
        assert sum(part for _, part in by_kernel.values()) == pytest.approx(ms), name
    # What is read: 0.44 B parameters of layers and 0.16 B of the head in 2 bytes, and 112 KiB of KV a position.
    read = {rows: found[f"step, {rows} × 1024"][3] for rows in (1, 256)}
    assert read[1] == pytest.approx(1.19e9 + 0.117e9, rel=0.05)
    assert read[256] == pytest.approx(1.19e9 + 30.1e9, rel=0.1)

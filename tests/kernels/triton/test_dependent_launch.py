"""Kernels that are launched early wait before they touch memory."""

import json
from pathlib import Path

import pytest

from pagewire.kernels.triton.compile import waits

GOLDEN = Path(__file__).with_name("golden.json")
EARLY = {"_norm", "_silu_mul", "_norm_rotary_write", "_decode_kernel", "_product"}


def sass(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/                   {each} ;" for i, each in enumerate(instructions))


BEFORE = ("LDC R1, c[0x0][0x28]", "ULDC.64 UR4, c[0x0][0x208]", "S2R R0, SR_CTAID.Y", "@P0 IADD3 R1, R2, R3, RZ")


def test_a_kernel_may_compute_addresses_before_it_waits() -> None:
    assert waits(sass(*BEFORE, "ACQBULK", "PREEXIT", "LDG.E.128 R4, desc[UR12][R12.64]", "EXIT"))


@pytest.mark.parametrize(
    "first",
    [
        "LDG.E.128 R4, desc[UR12][R12.64]",
        "@!P1 STG.E [R2], R4",
        "LDGSTS.E.BYPASS.128 [R5], [R6]",
        "UTMALDG.2D [UR8], [UR4]",
        "ATOMG.E.ADD.STRONG.GPU PT, R4, [R2], R5",
        "@P0 BRA 0x200",
        "@P0 EXIT",
        "@P0 ACQBULK",  # waits in some threads
    ],
)
def test_a_kernel_that_does_something_before_it_waits_is_found(first: str) -> None:
    assert not waits(sass(*BEFORE, first, "ACQBULK", "EXIT"))


def test_a_kernel_that_never_waits_is_found() -> None:
    assert not waits(sass(*BEFORE, "EXIT")) and not waits(sass("MOV R1, R2"))


def test_the_launches_of_a_layer_are_early_where_the_device_can_do_it() -> None:
    """By the golden numbers, which a test of `test_compiled.py` compares with the compiler."""
    reports = json.loads(GOLDEN.read_text())["reports"]
    by_name: dict[tuple[str, bool], set[tuple[bool, bool]]] = {}
    for title, kernels in reports.items():
        can = int(title.rpartition("sm_")[2]) >= 90
        for name, report in kernels.items():
            by_name.setdefault((name, can), set()).add((report["is_early"], report["waits"]))
    assert {name for (name, can), found in by_name.items() if can and (True, True) in found} == EARLY
    assert all(by_name[name, True] == {(True, True)} and by_name[name, False] == {(False, False)} for name in EARLY)
    assert all(found == {(False, False)} for (name, _), found in by_name.items() if name not in EARLY)

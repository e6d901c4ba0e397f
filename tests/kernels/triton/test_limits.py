"""Which kernels a device can run, by a table."""

import pytest

from pagewire.kernels.triton.limits import COMPILED, MAX_SHARED, Made, cell_name, misfit, read_table, table

SMALL, LARGE = Made(90_000, 0, 0, "HMMA 32"), Made(150_000, 8, 2, "HMMA 32")
REFUSED = Made(0, 0, 0, "", "type fp8e4nv not supported in this architecture")
TABLE = {
    "attend 64 bfloat16": dict.fromkeys(COMPILED, SMALL),
    "attend 64 bfloat16 fp8": {**dict.fromkeys(COMPILED, SMALL), 80: REFUSED},
    "attend 256 bfloat16": dict.fromkeys(COMPILED, LARGE),
}


def why(size: int, architecture: int, kv_dtype: str = "bfloat16", kernel: str = "attend") -> str:
    return misfit(kernel, size, architecture, "bfloat16", kv_dtype, of=TABLE)


@pytest.mark.parametrize("architecture", MAX_SHARED)
def test_a_kernel_fits_where_programs_have_its_shared_memory(architecture: int) -> None:
    assert why(64, architecture) == ""
    has = 1024 * MAX_SHARED[architecture]
    text = f"needs 150,000 bytes of shared memory, and sm_{architecture} has {has:,}"
    assert why(256, architecture) == (text if has < 150_000 else "")


def test_sizes_between_count_as_the_next_larger_one() -> None:
    assert why(128, 89) == why(256, 89) != ""
    assert why(16, 89) == "" == why(512, 89), "the table knows nothing larger"


def test_devices_between_count_as_the_next_older_one() -> None:
    assert why(256, 87) == why(256, 86) != "" == why(256, 80), "what is made for sm_80, with less shared memory"
    assert why(256, 103) == ""
    assert why(64, 75) == "is written for sm_80 and newer, and this device is sm_75"


def test_pages_of_another_type_have_cells_of_their_own() -> None:
    for architecture in (80, 86):
        text = f"does not compile for sm_{architecture} (type fp8e4nv not supported in this architecture)"
        assert why(64, architecture, "fp8") == text
    assert why(64, 90, "fp8") == ""
    assert why(16, 80, "fp8") == why(64, 80, "fp8"), "the next larger size"
    assert why(64, 90, kernel="unknown") == ""


def test_cells_are_read_as_they_are_written() -> None:
    text = '{"cells": {"attend 64 bfloat16": {"80": [1, 2, 3, "HMMA 4"], "90": [0, 0, 0, "", "no"]}}}'
    assert read_table(text) == {"attend 64 bfloat16": {80: Made(1, 2, 3, "HMMA 4"), 90: Made(0, 0, 0, "", "no")}}
    assert cell_name("attend", 64, "bfloat16") == cell_name("attend", 64, "bfloat16", "bfloat16")


def test_the_shipped_table_has_bfloat16_on_every_device() -> None:
    """Every head size, latents, products and experts; and fp8 keys and values from sm_89 on."""
    for name, made in table().items():
        for architecture, each in made.items():
            if "bfloat16" in name and ("fp8" not in name.split() or architecture >= 89):
                assert each.misfit(architecture) == "", (name, architecture, each)

"""The table of what the compiler makes of the kernels. `make grid` compiles all of it; here a sample is compiled, and
in `make test-long` a part that changes with the kernels' sources."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.engine.gpu.rules import Target
from pagewire.kernels.triton import limits
from pagewire.kernels.triton.compile import sources_key
from pagewire.kernels.triton.grid import cells, jobs, worse, written
from pagewire.kernels.triton.limits import COMPILED, MAX_SHARED, Made, read_table, table

ROOT = Path(__file__).resolve().parents[3]
PARTS = 40  # each takes at most half a minute of a core
TRIED = 2  # of them


def grid(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because this one runs Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / ".typing")
    command = [sys.executable, "-m", "pagewire.kernels.triton.grid", "--processes", "1", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize("number", range(TRIED))
def test_a_part_of_the_grid_is_as_in_the_table(number: int) -> None:
    """Which one, follows from the sources."""
    part = (TRIED * int(sources_key()[:8], 16) + number) % PARTS
    done = grid("--shard", f"{part}/{PARTS}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cell_that_is_worse_than_the_table_is_found(tmp_path: Path) -> None:
    """Compiles one cell twice, the second time beside a table in which it takes less."""
    every = jobs()
    number, architecture = next((n, a) for n, a in every if cells()[n].name == "rms_norm 1024 bfloat16" and a == 90)
    name, shard = cells()[number].name, f"{every.index((number, architecture))}/{len(every)}"
    done = grid("--shard", shard)
    assert done.returncode == 0 and f"{name} sm_90" in done.stdout, done.stdout + done.stderr
    changed = json.loads(limits.PATH.read_text())
    changed["cells"][name]["90"][0] -= 16
    other = tmp_path / "limits.json"
    other.write_text(json.dumps(changed))
    done = grid("--shard", shard, "--table", str(other))
    assert done.returncode == 1 and "WORSE" in done.stdout and "bytes of shared" in done.stdout, done.stdout


def test_the_table_has_no_other_cells() -> None:
    """What it lacks is taken to fit; `make grid` fails for it."""
    assert set(table()) <= {cell.name for cell in cells()}
    assert all(set(made) <= set(COMPILED) for made in table().values())
    for name, made in table().items():
        assert "fp8" not in name.split() or 80 in made, f"{name} would count as on sm_89"


def test_parts_of_the_grid_are_the_whole() -> None:
    parts = [job for part in range(PARTS) for job in jobs((part, PARTS))]
    assert sorted(parts) == sorted(jobs()) and len(set(parts)) == len(parts)


def test_rules_ask_for_every_cell_that_does_not_fit() -> None:
    """So that no program is launched whose kernels do not run."""
    asked = {*limits.ATTENTION, *limits.LATENT, *limits.EXPERTS, "small_product", "product"}
    asked |= {"scan_delta", "scan_mamba2", "scan_lightning"}
    for name, made in table().items():
        for architecture, each in made.items():
            assert name.split()[0] in asked or not each.misfit(architecture), (name, architecture, each)


def test_kernels_of_16_bits_use_tensor_cores() -> None:
    for name, made in table().items():
        kernel, _, *types = name.split()
        if "attention" in kernel or "product" in kernel or kernel.startswith(("latent_decode", "latent_extend", "moe")):
            for architecture, each in made.items():
                assert each.error or each.tensor_cores or "float32" in types, (name, architecture, each)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_attention_in_bfloat16_fits_on_every_device(size: int) -> None:
    for architecture in MAX_SHARED:
        target = Target(architecture, "bfloat16", "bfloat16")
        assert not any(target.misfit(kernel, size) for kernel in limits.ATTENTION)


def test_what_is_worse() -> None:
    before = Made(90_000, 0, 0, "HMMA 32")

    def found(made: Made, architecture: int = 89, *, same_compiler: bool = True, of: Made = before) -> str:
        return worse(made, of, architecture, same_compiler=same_compiler)

    assert found(before) == found(before._replace(shared=80_000)) == ""
    assert found(before._replace(shared=90_016)) == "90,016 bytes of shared; 90,000 in the table"
    assert found(before._replace(stack=8)) == "8 bytes of stack; 0 in the table"
    assert found(before._replace(stack=8), same_compiler=False) == ""
    assert found(before._replace(tensor_cores="")) == "no tensor cores; HMMA 32 in the table"
    large = before._replace(shared=110_000)
    assert "needs 110,000 bytes" in found(large, same_compiler=False) and "in the table it runs" in found(large)
    assert found(before, of=large).startswith("runs; in the table it needs 110,000")
    assert found(large, 90, of=large) == ""


def test_a_written_table_reads_the_same() -> None:
    found = {"attend 64 bfloat16": {80: Made(1, 2, 3, "HMMA 4"), 90: Made(0, 0, 0, "", 'no "fp8"')}}
    text = written(found)
    assert read_table(text) == found and len(text.splitlines()) == 7

"""The measurement of the memory's bandwidth: its pieces, its end, and how large it is."""

from pathlib import Path

import pytest

from pagewire.engine.device.bandwidth import ReadBandwidth, enough_to_miss

MB = 1 << 20


def test_it_is_measured_in_pieces_once_and_gives_its_memory_back() -> None:
    bandwidth = ReadBandwidth(24 * MB)
    num = 1
    while bandwidth.advance():
        assert bandwidth.bytes_per_s == 0.0, "it is not known before the last piece"
        num += 1
    assert num == 3 * (1 + 3), "each piece gets memory, and is read three times"
    assert 1e7 < bandwidth.bytes_per_s < 1e14
    found = bandwidth.bytes_per_s
    assert not bandwidth.advance() and bandwidth.bytes_per_s == found
    assert not bandwidth._pieces


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ([("0-1", "32768K")], 64 * MB),
        ([("0-7", "98304K"), ("0-7", "98304K"), ("8-15", "98304K")], 4 * 96 * MB),
        ([("0", "524288K"), ("1", "524288K")], 512 * MB),
        ([("0", "much")], 64 * MB),
        ([], 64 * MB),
    ],
)
def test_it_reads_more_than_the_last_caches_hold(tmp_path: Path, caches: list[tuple[str, str]], expected: int) -> None:
    for number, (shared, size) in enumerate(caches):
        folder = tmp_path / f"cpu{number}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
        (folder / "size").write_text(f"{size}\n")
    (tmp_path / "cpufreq").mkdir()
    assert enough_to_miss(tmp_path) == expected

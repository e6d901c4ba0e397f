"""What launches of one engine refuse and say before anything starts."""

from pathlib import Path

import pytest

from pagewire.procs.launch import main

NETWORK = ["core=tcp://127.0.0.1:1", "worker=tcp://127.0.0.1:2"]
SOCKETS = ["core=ipc:///core", "worker=ipc:///worker"]


@pytest.mark.parametrize("actors", ["worker", "core,grammar"])
@pytest.mark.parametrize(
    ("connector", "sentence"),
    [
        ("p2p,serve=/x,size=1M", "serve=/x is a socket of one machine, and --actors puts ranks on others; give tcp://"),
        ("disk,path=/d,size=1M", "--kv-connector disk is for engines whose first rank is on the core's machine"),
        ("shared,path=/s,size=1M", "--kv-connector shared: /s must be the same folder on all machines"),
    ],
)
def test_a_core_and_ranks_on_different_machines(
    actors: str, connector: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has no model, so it ends in any case."""

    def said(addresses: list[str]) -> str:
        flags = ["--actors", actors, "--key-file", str(tmp_path / "key"), "--kv-connector", connector]
        assert main([str(tmp_path), *flags, "--address", *addresses]) == 2
        return capfd.readouterr().err

    assert sentence in said(NETWORK)
    assert sentence not in said(SOCKETS)


def test_a_later_rank_elsewhere_leaves_the_folder_to_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--actors", "core,grammar", "--key-file", str(tmp_path / "key"), "--tensor-parallel-size", "2"]
    tier = ["--kv-connector", "disk,path=/d,size=1M"]
    assert main([str(tmp_path), *flags, *tier, "--address", *SOCKETS, "worker-1=tcp://127.0.0.1:3"]) == 2
    assert "--kv-connector disk" not in capfd.readouterr().err

"""A machine copies the model from the lead: over real sockets, with the lead's side as it is or one that the test
plays, which loses, repeats and damages what it sends."""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
import pytest
from msgspec.structs import replace
from waiting import until

from pagewire.config.config import ModelFacts
from pagewire.engine.checkpoint.spec import fingerprint
from pagewire.errors import CheckpointError
from pagewire.ipc.codec import Decoder, encode
from pagewire.ipc.file_messages import (
    PIECE_BYTES,
    Files,
    FromShare,
    ListFiles,
    ModelFile,
    Piece,
    ReadFile,
    ToShare,
    Unreadable,
)
from pagewire.ipc.zmq_channel import Keys, ZmqContext, read_keys
from pagewire.procs import model_copy
from pagewire.procs.model_copy import Interrupted, ModelCopy
from pagewire.procs.model_share import ModelShare

SIZE = 20 * PIECE_BYTES + 12_345  # more than a window, and no whole number of pieces


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return read_keys(tmp_path / "key")


@pytest.fixture
def model(tmp_path: Path) -> ModelFacts:
    """A model with weights of many pieces, an empty file, a file of a folder below, and some that are not its own."""
    folder = tmp_path / "lead" / "model"
    folder.mkdir(parents=True)
    header = b"{}      "
    weights = len(header).to_bytes(8, "little") + header + random.Random(1).randbytes(SIZE - 16)
    for name, data in {
        "config.json": b"{}",
        "a.safetensors": weights,
        "b.safetensors": weights[:1000],
        "empty.txt": b"",
        "1_Pooling/config.json": b"{}",
        ".cache/x.json": b"{}",
        "pytorch_model.bin": b"no",
        "notes.pdf": b"no",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    for file in folder.glob("*.*"):
        os.utime(file, ns=(0, 1_700_000_000_123_456_789))
    return facts(folder)


def facts(path: Path, adapter: Path | None = None) -> ModelFacts:
    return ModelFacts(
        path=str(path),
        name="org/the model",
        adapter=str(adapter or ""),
        max_position=1,
        vocab_size=1,
        eos_token_ids=(),
        checkpoint_dtype="float32",
        fingerprint=fingerprint(path, adapter),
    )


@pytest.fixture
def share(model: ModelFacts, keys: Keys) -> Iterator[ModelShare]:
    share = ModelShare("127.0.0.1", keys, model)
    yield share
    share.close()


class Copier:
    """Copies to a cache, and knows what was said of it."""

    def __init__(self, cache: Path, keys: Keys | None) -> None:
        self.cache, self.keys = cache, keys
        self.told: list[tuple[int, int]] = []
        self.is_over: Callable[[], bool] = lambda: False
        self.on_told: Callable[[int], None] = lambda done: None

    def copy(self, address: str, model: ModelFacts) -> ModelFacts:
        self.told.clear()
        return ModelCopy(
            address,
            self.keys,
            model,
            cache=self.cache,
            is_over=lambda: self.is_over(),
            on_progress=self._on_progress,
        ).run()

    def _on_progress(self, done: int, total: int) -> None:
        self.told.append((done, total))
        self.on_told(done)

    @property
    def num_copied(self) -> int:
        """The bytes that came while it was told of them."""
        return self.told[-1][0] - self.told[0][0]


@pytest.fixture
def copier(tmp_path: Path, keys: Keys) -> Copier:
    return Copier(tmp_path / "cache" / "models", keys)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Name → bytes and time of every file."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_a_copy_has_the_files_of_the_model_and_no_others(model: ModelFacts, share: ModelShare, copier: Copier) -> None:
    found = copier.copy(share.address, model)
    expected = contents(Path(model.path))
    for name in (".cache/x.json", "pytorch_model.bin", "notes.pdf"):
        del expected[name]
    assert contents(Path(found.path)) == expected and fingerprint(Path(found.path)) == model.fingerprint
    assert replace(found, path=model.path) == model and Path(found.path).parent.name.startswith("org-the-model-")
    dones, totals = zip(*copier.told, strict=True)
    assert list(dones) == sorted(dones) and len(dones) > SIZE // PIECE_BYTES
    assert set(totals) == {dones[-1]} == {sum(len(data) for data, _ in expected.values())}
    assert dones.count(dones[-1]) == 1, "the end is told when the folder has its name"
    shutil.rmtree(model.path)
    assert copier.copy(share.address, model) == found, "nothing is read a second time"


def test_a_copy_that_is_interrupted_goes_on_with_the_next_file(
    model: ModelFacts, share: ModelShare, copier: Copier
) -> None:
    copier.is_over = lambda: bool(copier.told) and copier.told[-1][0] > SIZE
    with pytest.raises(Interrupted):
        copier.copy(share.address, model)
    (part,) = copier.cache.glob(".*.part")
    assert not list(copier.cache.glob("org*")) and (part / "model" / "a.safetensors").stat().st_size == SIZE
    copier.is_over = lambda: False
    found = copier.copy(share.address, model)
    assert fingerprint(Path(found.path)) == model.fingerprint and not part.exists()
    assert copier.num_copied < PIECE_BYTES, "the large file was not read again"


def test_one_process_of_a_machine_copies_and_the_others_wait(
    model: ModelFacts, share: ModelShare, copier: Copier, keys: Keys
) -> None:
    others = [Copier(copier.cache, keys) for _ in range(3)]
    found: list[ModelFacts] = []
    threads = [threading.Thread(target=lambda o=one: found.append(o.copy(share.address, model))) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and len({one.path for one in found}) == 1
    assert fingerprint(Path(found[0].path)) == model.fingerprint
    steps = {2 + (i + 1) * PIECE_BYTES for i in range(SIZE // PIECE_BYTES)}  # after a file of two bytes
    assert [steps <= dict(one.told).keys() for one in others].count(True) == 1, "the others see a few of them at most"


def test_one_that_waits_for_another_can_be_interrupted(
    model: ModelFacts, share: ModelShare, copier: Copier, keys: Keys
) -> None:
    held, is_free = threading.Event(), threading.Event()

    def hold(done: int) -> None:
        held.set()
        is_free.wait(30)

    first, second = Copier(copier.cache, keys), copier
    first.on_told = hold
    second.is_over = lambda: bool(second.told)  # of the other one's progress
    thread = threading.Thread(target=first.copy, args=(share.address, model))
    thread.start()
    assert held.wait(30)
    with pytest.raises(Interrupted):
        second.copy(share.address, model)
    assert 0 < second.told[0][0] < SIZE and len(second.told) == 1
    is_free.set()
    thread.join(60)
    assert fingerprint(Path(first.copy(share.address, model).path)) == model.fingerprint


def test_an_adapter_is_copied_with_its_model(tmp_path: Path, model: ModelFacts, keys: Keys, copier: Copier) -> None:
    folder = Path(model.path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    shutil.copy(folder / "b.safetensors", adapter / "adapter_model.safetensors")
    model = facts(folder, adapter)
    share = ModelShare("127.0.0.1", keys, model)
    try:
        found = copier.copy(share.address, model)
    finally:
        share.close()
    assert fingerprint(Path(found.path), Path(found.adapter)) == model.fingerprint
    assert contents(Path(found.adapter)) == contents(adapter) and Path(found.adapter) != adapter


def test_a_gguf_file_is_copied_without_those_beside_it(tmp_path: Path, keys: Keys, copier: Copier) -> None:
    folder = tmp_path / "lead"
    folder.mkdir()
    path = folder / "M-F32.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "other.gguf").write_bytes(path.read_bytes())
    model = facts(path)
    share = ModelShare("127.0.0.1", keys, model)
    try:
        found = copier.copy(share.address, model)
    finally:
        share.close()
    assert list(contents(Path(found.path).parent)) == [path.name] and fingerprint(Path(found.path)) == model.fingerprint


def test_files_that_change_are_not_mixed(model: ModelFacts, share: ModelShare, copier: Copier) -> None:
    weights = Path(model.path) / "b.safetensors"

    def change(done: int) -> None:
        if SIZE // 2 < done < SIZE:  # while the file before it is copied
            weights.write_bytes(b"other")

    copier.on_told = change
    with pytest.raises(CheckpointError, match=r"b\.safetensors of the lead has been changed while it was copied"):
        copier.copy(share.address, model)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors of the lead has been removed"):
        copier.copy(share.address, model)


def test_files_that_changed_before_are_not_taken_for_the_model(model: ModelFacts, keys: Keys, copier: Copier) -> None:
    os.utime(Path(model.path) / "b.safetensors", ns=(0, 0))
    share = ModelShare("127.0.0.1", keys, model)
    try:
        with pytest.raises(CheckpointError, match="have been changed since it was started; start it again"):
            copier.copy(share.address, model)
    finally:
        share.close()
    assert not list(copier.cache.glob("org*"))


def test_a_machine_without_room_says_how_much_is_missing(
    model: ModelFacts, share: ModelShare, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(CheckpointError, match=r"has room for 0\.0 GB, and the model takes 0\.0 GB more"):
        copier.copy(share.address, model)


def test_a_cache_that_cannot_be_written_is_one_sentence(model: ModelFacts, share: ModelShare, copier: Copier) -> None:
    copier.cache.parent.mkdir(parents=True)
    copier.cache.touch()
    with pytest.raises(CheckpointError, match=r"The model cannot be copied to .*models: File exists\."):
        copier.copy(share.address, model)


def test_a_share_reads_nothing_but_the_files_of_its_list(share: ModelShare, keys: Keys) -> None:
    context = ZmqContext(keys)
    dealer = context.dealer(share.address)
    decoder: Decoder[FromShare] = Decoder(FromShare)

    def ask(*messages: ToShare) -> FromShare:
        for message in messages:
            dealer.send(message)
        answers = [until(dealer.receive, "the share answers") for _ in messages]
        return decoder.decode(answers[-1] or b"")

    try:
        assert ask(ReadFile(0, 0)) == Unreadable("There is no file 0."), "before it has listed them"
        files = ask(ListFiles())
        assert isinstance(files, Files) and len(files.files) == 5
        assert ask(ReadFile(5, 0)) == Unreadable("There is no file 5.")
        assert ask(ReadFile(0, 2**62)) == Piece(0, 2**62, sha256(b"").digest(), b"")
        dealer._socket.send(b"\xff")
        answer = decoder.decode(until(dealer.receive, "it answers") or b"")
        assert answer == Unreadable("The lead cannot read what was asked for.")
    finally:
        dealer.close()
        context.close()


class PlayedShare:
    """The lead's side, as a test wants it: `answer` is given the number of each request, and the request."""

    def __init__(self, keys: Keys, answer: Callable[[int, ToShare], list[FromShare]]) -> None:
        self._context = ZmqContext(keys)
        self._router = self._context.router("tcp://127.0.0.1:0")
        self.address = self._router.address
        self._answer = answer
        self._ends, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        decoder: Decoder[ToShare] = Decoder(ToShare)
        num, is_over = 0, False
        while not is_over:
            self._router.wait(60.0, self._ends)
            is_over = bool(self._router.has_mail()) is False
            while (frames := self._router.receive()) is not None:
                for answer in self._answer(num, decoder.decode(frames[-1])):
                    self._router.send(frames[0], encode(answer))
                num += 1

    def close(self) -> None:
        os.close(self._end)
        self._thread.join()
        os.close(self._ends)
        self._router.close()
        self._context.close()


def piece(number: int, offset: int, data: bytes, *, is_damaged: bool = False) -> Piece:
    return Piece(number, offset, sha256(b"" if is_damaged else data).digest(), data)


class Source:
    """A file of weights and a config, as a played share has them."""

    def __init__(self) -> None:
        self.data = [b"{}", bytes(8) + random.Random(2).randbytes(SIZE)]
        self.files = Files(
            (ModelFile("model/config.json", 2, 5), ModelFile("model/a.safetensors", len(self.data[1]), 7))
        )

    def give(self, asked: ToShare) -> FromShare:
        if isinstance(asked, ListFiles):
            return self.files
        return piece(asked.number, asked.offset, self.data[asked.number][asked.offset :][:PIECE_BYTES])


@pytest.fixture
def play(keys: Keys) -> Iterator[Callable[[Callable[[int, ToShare], list[FromShare]]], str]]:
    """Starts a played share. Returns its address."""
    played: list[PlayedShare] = []

    def start(answer: Callable[[int, ToShare], list[FromShare]]) -> str:
        played.append(PlayedShare(keys, answer))
        return played[-1].address

    yield start
    for one in played:
        one.close()


Play = Callable[[Callable[[int, ToShare], list[FromShare]]], str]


def test_lost_repeated_late_and_damaged_pieces_do_no_harm(
    model: ModelFacts, copier: Copier, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_copy, "_AGAIN_S", 0.05)
    source, rng = Source(), random.Random(3)
    held: list[FromShare] = []
    num_damaged = 0

    def answer(num: int, asked: ToShare) -> list[FromShare]:
        nonlocal num_damaged
        answers, chance = [source.give(asked)], rng.random()
        if chance < 0.2:
            return []
        if chance < 0.4:
            held.append(answers[0])  # it comes after later ones
            return []
        if chance < 0.6:
            return [*answers, *answers, *(held.pop() for _ in range(len(held)))]
        if chance < 0.7 and isinstance(asked, ReadFile) and num_damaged < 5:
            num_damaged += 1
            return [piece(asked.number, asked.offset, bytes(PIECE_BYTES), is_damaged=True)]
        return answers

    found = copier.copy(play(answer), replace(model, fingerprint=""))
    assert num_damaged and (Path(found.path) / "a.safetensors").read_bytes() == source.data[1]


def test_pieces_that_are_always_damaged_end_it(model: ModelFacts, copier: Copier, play: Play) -> None:
    source = Source()

    def answer(num: int, asked: ToShare) -> list[FromShare]:
        if isinstance(asked, ReadFile):
            return [piece(asked.number, asked.offset, b"??", is_damaged=True)]
        return [source.give(asked)]

    with pytest.raises(CheckpointError, match="what arrives is damaged"):
        copier.copy(play(answer), model)


def test_a_lead_that_falls_silent_ends_it(
    model: ModelFacts, copier: Copier, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_copy, "SILENCE_S", 0.3)
    with pytest.raises(CheckpointError, match=r"has sent nothing of the model for 0\.3 s"):
        copier.copy(play(lambda num, asked: []), model)


@pytest.mark.parametrize(
    "name", ["", "model", "/etc/x", "model/../../x", "../model/x", "other/x", "model/\0", "./x", "adapter"]
)
def test_a_name_outside_the_copy_is_refused(model: ModelFacts, copier: Copier, play: Play, name: str) -> None:
    files = Files((ModelFile("model/config.json", 2, 5), ModelFile(name, 2, 5)))
    with pytest.raises(CheckpointError, match="which is no file of a model"):
        copier.copy(play(lambda num, asked: [files]), model)
    assert not copier.cache.exists()


def test_a_lead_without_files_is_one_sentence(model: ModelFacts, copier: Copier, play: Play) -> None:
    with pytest.raises(CheckpointError, match="The lead has no files of the model"):
        copier.copy(play(lambda num, asked: [Files(())]), model)

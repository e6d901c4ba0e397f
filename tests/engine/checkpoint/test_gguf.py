"""The format of GGUF files: files of the `gguf` package are read back, and each kind of damage gets a sentence."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.engine.checkpoint.gguf import TYPES, is_gguf, parts_of, read_gguf, read_vector
from pagewire.errors import CheckpointError, ConfigError

TENSORS = {"a.weight": (3, 32), "b.weight": (2, 5, 64), "c.bias": (7,)}
ENTRIES = {
    "text": "Grüße\n",
    "texts": ["", "a b", "你好"],
    "numbers": [1, -2, 3],
    "floats": [0.5, -1.0],
    "flag": True,
    "size": 2**31,
    "negative": -5,
    "share": 0.7,
}


def write(path: Path, *, split: int = 0, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in ENTRIES.items():
        writer.add_key_value(
            key, value, gguf.GGUFValueType.get_type(value) if key != "size" else gguf.GGUFValueType.UINT64
        )
    for i, (name, shape) in enumerate(TENSORS.items()):
        writer.add_tensor(name, np.full(shape, i + 1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_a_file_is_read_back(alignment: int | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", alignment=alignment)
    model = read_gguf(path)
    assert is_gguf(path) and model.parts == (path,) and not is_gguf(tmp_path)
    for key, value in ENTRIES.items():
        assert model.metadata.entries[key] == (pytest.approx(value) if key == "share" else value), key
    assert model.metadata.number("share") == 0.7, "the shortest number, not float32's 0.699999988"
    data = path.read_bytes()
    for i, (name, shape) in enumerate(TENSORS.items()):
        tensor = model.tensors[name]
        assert (tensor.shape, tensor.type) == (shape, "F32")
        values = np.frombuffer(data[tensor.offset :][: tensor.num_bytes], np.float32)
        assert values.size == np.prod(shape) and (values == i + 1).all()
    assert read_vector(model.tensors["c.bias"]) == [3.0] * 7
    assert len(data[: model.header_bytes[0]]) <= model.tensors["a.weight"].offset


def test_without_the_vocabulary(tmp_path: Path) -> None:
    whole, part = (read_gguf(write(tmp_path / "m.gguf"), has_vocabulary=is_whole) for is_whole in (True, False))
    assert whole.tensors == part.tensors and whole.header_bytes == part.header_bytes
    assert whole.metadata.entries.keys() - part.metadata.entries.keys() == {"texts"}


def test_version_2_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    newer = read_gguf(path)
    change(path, 4, struct.pack("<I", 2))
    assert read_gguf(path).tensors == newer.tensors


def test_the_types_of_the_package(tmp_path: Path) -> None:
    for number, (name, values, num_bytes) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (values, num_bytes))


def test_typed_access_names_the_key(tmp_path: Path) -> None:
    metadata = read_gguf(write(tmp_path / "model.gguf")).metadata
    assert metadata.integer("none") is None and metadata.texts("texts") == ENTRIES["texts"]
    for access, key, wanted in (
        (metadata.text, "flag", "a text"),
        (metadata.integer, "flag", "a whole number"),
        (metadata.integer, "numbers", "the same for all layers"),
        (metadata.number, "text", "a number"),
        (metadata.flag, "size", "true or false"),
        (metadata.texts, "numbers", "a list of texts"),
        (metadata.numbers, "texts", "a list of numbers"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.gguf has {key} = .*, which should be .*{wanted}"):
            access(key)


def test_parts(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", split=1)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        assert parts_of(part) == tuple(parts)
        model = read_gguf(part)
        assert (
            model.path == parts[0] and [*model.tensors] == [*TENSORS] and model.metadata.text("text") == ENTRIES["text"]
        )
    parts[1].rename(tmp_path / "x.gguf")
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00003\.gguf is missing; all parts of a model must be in one"
    ):
        read_gguf(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"says that it is part 3 of 3, but its name makes it part 2 of 3"):
        read_gguf(parts[0])
    for name in ("m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"):
        with pytest.raises(CheckpointError, match="names itself part"):
            parts_of(tmp_path / name)


def test_parts_of_different_models(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", split=2)
    second = tmp_path / "m-00002-of-00002.gguf"
    data = second.read_bytes()
    second.write_bytes(data.replace(b"c.bias", b"a.bias"))
    assert [*read_gguf(second).tensors] == ["a.weight", "b.weight", "a.bias"]
    # The count of the first part is of another split.
    first = tmp_path / "m-00001-of-00002.gguf"
    key = b"split.tensors.count" + struct.pack("<I", 5)
    assert key in first.read_bytes()
    first.write_bytes(first.read_bytes().replace(key + struct.pack("<i", 3), key + struct.pack("<i", 9)))
    with pytest.raises(CheckpointError, match=r"the first of files with 9 tensors, but they hold 3\.$"):
        read_gguf(first)


# ── damage ─────────────────────────────────────────────────────────────────────────────────────────────


def change(path: Path, at: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def listed(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    num_bytes: int = 256,
) -> bytes:
    entries, tensors = entries or [], tensors or []
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries + tensors)
    return header + bytes(-len(header) % 32) + bytes(num_bytes)


STRING, ARRAY, UINT32, BOOL, UINT8 = 8, 9, 4, 7, 0
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "short": (b"GGUF", "is not a GGUF file"),
    "magic": (file(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (file(version=1), r"of version 1; pagewire reads versions 2 and 3"),
    "big-endian": (file(version=3 << 24), "a GGUF file big-endian"),
    "tensors": (file(counts=(2**40, 0)), r"1,099,511,627,776 tensors; 262,144 are allowed"),
    "entries": (file(counts=(0, 2**40)), "metadata entries; 65,536 are allowed"),
    "fewer entries": (file(counts=(0, 200)), "its metadata has  twice"),
    "a long key": (file([struct.pack("<Q", 2**20)]), "a metadata key has 1,048,576 bytes; 65,535 are allowed"),
    "a key that is no text": (file([text(b"\xff\xfe") + struct.pack("<IB", BOOL, 1)]), "not UTF-8 at byte 0"),
    "a text that is no text": (file([entry("a", STRING, text(b"ok\xff"))]), "a is not UTF-8 at byte 2"),
    "an endless text": (file([entry("a", STRING, struct.pack("<Q", 2**27))]), r"a should have 134,217,728 bytes, and"),
    "an overlong text": (file([entry("a", STRING, struct.pack("<Q", 2**63))]), "268,435,456 are allowed"),
    "twice": (file([entry("a", UINT32, b"1234")] * 2), "its metadata has a twice"),
    "a type": (file([entry("a", 13, b"1234")]), "a has the unknown type 13"),
    "a list of lists": (file([entry("a", ARRAY, listed(ARRAY, 1))]), "a is a list of the type 9"),
    "a list": (file([entry("a", ARRAY, listed(UINT32, 2**22))]), r"a should have 16,777,216 bytes, and \d+ are left"),
    "an endless list": (file([entry("a", ARRAY, listed(UINT8, 2**60))]), "8,388,608 are allowed"),
    "many texts": (file([entry("a", ARRAY, listed(STRING, 10**6))]), "a should have 8,000,000 bytes"),
    "a text in a list": (
        file([entry("a", ARRAY, listed(STRING, 1, struct.pack("<Q", 1000)))], num_bytes=0),
        "cut short",
    ),
    "bytes in a list": (file([entry("a", ARRAY, listed(STRING, 1, text(b"\xff")))]), "a text that is not UTF-8"),
    "truth": (file([entry("a", BOOL, b"\2")]), "a has a truth value that is neither 0 nor 1"),
    "alignment": (file([entry("general.alignment", UINT32, struct.pack("<I", 24))]), "general.alignment is 24, not a"),
    "alignment 0": (file([entry("general.alignment", UINT32, bytes(4))]), "general.alignment is 0, not a"),
    "no dimensions": (file(tensors=[tensor(shape=())]), "a has 0 dimensions"),
    "dimensions": (file(tensors=[tensor(shape=(1,) * 9)]), "a has 9 dimensions"),
    "no size": (file(tensors=[tensor(shape=(32, 0))]), r"a has the shape \[0, 32\]"),
    "size": (file(tensors=[tensor(shape=(2**40, 2**40))]), "a has the shape"),
    "a size that wraps": (file(tensors=[tensor(shape=(2**32, 2**32))]), "a has the shape"),
    "an unknown type": (file(tensors=[tensor(kind=4)]), "a in the unknown type 4; pagewire reads F32, F16, Q4_0"),
    "a type of others": (file(tensors=[tensor(kind=23)]), "a in IQ4_XS; pagewire reads"),
    "a row of half a block": (file(tensors=[tensor(shape=(48,), kind=8)]), r"a is Q8_0 \[48\], whose rows are no mult"),
    "offset": (file(tensors=[tensor(offset=4)]), "a begins at 4, no multiple of the alignment, 32"),
    "beyond": (file(tensors=[tensor(offset=256)]), r"a ends at byte \d+, and the file has \d+ bytes"),
    "far beyond": (file(tensors=[tensor(offset=2**63)]), "a ends at byte"),
    "the same name": (file(tensors=[tensor(), tensor(offset=128)]), "it names a twice"),
    "overlap": (file(tensors=[tensor(), tensor("b", offset=96)]), "the bytes of b overlap those of another tensor"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage(damage: str, tmp_path: Path) -> None:
    data, complaint = DAMAGED[damage]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=complaint) as raised:
        read_gguf(path)
    assert str(raised.value).startswith(str(path)) and str(raised.value).count(". ") == 0


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = write(tmp_path / "model.gguf").read_bytes()
    end = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(tmp_path / "model.gguf").tensors.values())
    for length in range(0, end, 7):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut short|is not a GGUF file"):
            read_gguf(tmp_path / "cut.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "model.gguf")


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_any_bytes_give_a_model_or_a_sentence(changes: list[tuple[int, bytes]], whole: Path) -> None:
    path = whole.with_name("changed.gguf")
    path.write_bytes(whole.read_bytes())
    for at, data in changes:
        change(path, at, data)
    try:
        model = read_gguf(path)
    except CheckpointError:
        return
    size = path.stat().st_size
    assert all(each.offset > 0 and each.offset + each.num_bytes <= size for each in model.tensors.values())


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no file .*none\.gguf"):
        read_gguf(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        read_gguf(tmp_path / "pipe.gguf")


def test_vectors_that_are_none(tmp_path: Path) -> None:
    tensors = read_gguf(write(tmp_path / "model.gguf")).tensors
    with pytest.raises(CheckpointError, match=r"a vector of F32 \[3, 32\] where pagewire reads a small one of F32"):
        read_vector(tensors["a.weight"])

"""Weight files that are damaged or missing."""

import json

import checkpoints
import programs
import pytest
from safetensors.torch import load_file, save_file

from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    return checkpoints.make_checkpoint(tmp_path, "qwen3")


def test_a_truncated_file_is_reported(folder):
    file = folder / "model.safetensors"
    for length in (file.stat().st_size - 100, 50, 4, 0):
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short: [^.]+\.$"):
            programs.load(folder)


def test_a_missing_shard_or_tensor_of_the_index_is_reported(tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "qwen2", shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    programs.load(folder)
    kept = load_file(shards[0])
    shards[0].unlink()
    with pytest.raises(
        CheckpointError, match=rf"{shards[0].name} is missing, although model\.safetensors\.index\.json"
    ):
        programs.load(folder)
    name = sorted(kept)[0]
    del kept[name]
    save_file(kept, shards[0])
    with pytest.raises(CheckpointError, match=rf"{shards[0].name} lacks {name}, which model\.safetensors\.index\.json"):
        programs.load(folder)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../model.safetensors"}}'])
def test_a_damaged_index_is_reported(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json (is damaged|names)"):
        programs.load(folder)


def test_a_folder_without_safetensors_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        programs.load(folder)
    (folder / "pytest_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle files only; convert them to safetensors"):
        programs.load(folder)


def test_the_reader_lists_tensors_only(folder):
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    with CheckpointReader(folder) as reader:
        assert all(name.startswith("model.") for name in reader.names())

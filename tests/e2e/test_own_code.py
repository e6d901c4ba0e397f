"""Code in a model's folder is never run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
import vocabulary

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"

# Records every file that is opened, compiled or imported after pagewire and transformers have been imported.
WATCH = """
import os, sys
folders = sys.argv[1:]
seen = []
def hook(event, args):
    if event in ("open", "import", "exec", "compile", "socket.connect", "os.system"):
        seen.append((event, [getattr(arg, "co_filename", arg) for arg in args if arg is not None]))
from pagewire import LLM
import transformers
from pagewire.errors import PagewireError
sys.addaudithook(hook)
for folder in folders:
    try:
        with LLM(folder, threads=1, kv_cache_memory="8M") as llm:
            llm.generate([5, 6], use_tqdm=False)
        print(os.path.basename(folder), "served")
    except PagewireError as error:
        print(os.path.basename(folder), error)
code = [(e, a) for e, a in seen if any(str(x).endswith((".py", ".pyc")) for x in a)]
print("inside", [(e, a) for e, a in code if any(str(x).startswith(folder) for x in a for folder in folders)])
print("outside", [(e, a) for e, a in seen if e.startswith(("socket", "os."))])
"""


def _folder(path: Path, kind: str, **config: object) -> Path:
    checkpoints.make_checkpoint(path, kind)
    vocabulary.add_tokenizer(path)
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    fields = json.loads((path / "config.json").read_text()) | {"auto_map": auto_map} | config
    (path / "config.json").write_text(json.dumps(fields))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("evil.py", "__init__.py", "sitecustomize.py", "torch.py", "json.py", "tokenizers.py"):
        (path / name).write_text(EVIL)
    return path


@pytest.mark.long
def test_no_code_in_a_model_folder_is_run(tmp_path: Path) -> None:
    folders = {
        "native": _folder(tmp_path / "native", "llama"),
        "unknown": _folder(tmp_path / "unknown", "llama", model_type="evil", architectures=["EvilForCausalLM"]),
        "fallback": _folder(tmp_path / "fallback", "persimmon"),
        "encoder": _folder(tmp_path / "encoder", "llama", model_type="evil", architectures=["EvilModel"]),
        "tokens": _folder(tmp_path / "tokens", "llama"),
    }
    (folders["tokens"] / "tokenizer.json").rename(folders["tokens"] / "vocab.json")
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".typing"), "HF_HOME": str(tmp_path / "hub")}
    result = subprocess.run(
        [sys.executable, "-c", WATCH, *map(str, folders.values())],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path / "native",  # where a user may start it
        env=environment | {"PYTHONSAFEPATH": "1"},
    )
    printed = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert printed["native"] == printed["fallback"] == "served"  # with classes of pagewire and of transformers
    for name in ("unknown", "encoder"):
        assert "auto_map in config.json" in printed[name] and "never runs code" in printed[name]
    assert "cannot load its tokenizer" in printed["tokens"]
    assert printed["inside"] == printed["outside"] == "[]"
    assert not list(tmp_path.rglob("ran")) and not list(tmp_path.glob("hub/modules/**/evil*"))

"""Damaged model folders, each with one change: every one must be refused in one sentence, or served.

`python -m pagewire.tests.stress.hostile_models` changes copies of the demo model, whole and in shards, loads each in a
process with a limit of ten seconds, and generates a few tokens; for some it also runs the real command. It ends with
exit code 1 if one crashes, hangs, or is neither served nor refused in one sentence. The seed is printed: mutant 17 of
seed 5 is always the same folder.
"""

import argparse
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.checkpoint.source import DEMO_MODEL
from ...tools.servers import Server, ServerError

LIMIT_S = 10.0
SERVE_LIMIT_S = 180.0  # of the command, which imports much, on a busy machine
_START_LIMIT_S = 60.0
_JUDGE_BYTES = 6 << 30  # memory limit of a load: a loader that trusts a false header allocates more
_JSON_FILES = ("config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_VALUES: tuple[object, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 1000, 2**20, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e308,
    "", "x", "x" * 100_000, "../../../etc/passwd", "\0", "\ud800", "{{", "(a+)+$", "[", "none", "float32",
    [], [[]], [-1], ["x"], [2**40], {}, {"x": {}}, {"type": "x"}, [None] * 1000,
)  # fmt: skip
_FILE_NAMES: tuple[object, ...] = (
    "../model.safetensors", "/etc/passwd", "..", ".", "", "\0", "x" * 300, "config.json", "none.safetensors", 3, None,
)  # fmt: skip
_SIZES = (-1, 0, 1, 2**31, 2**62, 2**64, 10**30, 1.5, "8", None, True)
_TEMPLATES = (
    "{{", "{% for %}", "{% include 'x' %}", "{% import '/etc/passwd' as x %}", "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}", "{{ undefined.x.y }}", "{{ 1 / 0 }}",
    "{{ raise_exception('no\n\x1b[31mno') }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "\ufeff", "(" * 5000,
    "{{ " + "(" * 5000, "{% extends messages %}", "{{ cycler.__init__.__globals__ }}", "{{ 'x' * 10 ** 10 }}",
    "{% for m in messages %}{% break %}",
)  # fmt: skip

Change = Callable[[Path, random.Random], str]
"""Changes a folder in one way. Returns what it did."""


@dataclass(frozen=True)
class Verdict:
    """The result for a folder."""

    kind: str  # served or refused; anything else is a fault
    text: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("served", "refused") or "\n" in self.text or not self.text.isprintable()


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _change_value(folder: Path, rng: random.Random) -> str:
    """Replaces or deletes one value of a JSON file."""
    file = folder / rng.choice(_JSON_FILES)
    tree = json.loads(file.read_text())
    holder, key, path = _somewhere(tree, rng)
    if rng.random() < 0.2:
        del holder[key]
        what = "is deleted"
    else:
        holder[key] = rng.choice(_VALUES)
        what = f"= {str(holder[key])[:30]!r}"
    file.write_text(json.dumps(tree))
    return f"{file.name}: {path} {what}"


def _somewhere(tree: Any, rng: random.Random) -> tuple[Any, Any, str]:
    """A random place in a tree: its container, its key there, and its path. A large container counts as one value."""
    path = ""
    while True:
        key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        path += f".{key}"
        inner = tree[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            return tree, key, path[:60]
        tree = inner


def _change_bytes(folder: Path, rng: random.Random) -> str:
    """Truncates a text file or changes some of its bytes."""
    file = folder / rng.choice(_JSON_FILES)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    how = rng.choice(("cut", "empty", "flip", "nul", "latin", "deep", "bom", "list", "twice"))
    match how:
        case "cut":
            del data[at:]
        case "empty":
            data.clear()
        case "flip":
            for _ in range(8):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "nul":
            data[at:at] = b"\0" * 16
        case "latin":
            data[at:at] = b"\xe9\xff"
        case "deep":
            data[:] = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
        case "bom":
            data[:0] = b"\xef\xbb\xbf"
        case "list":
            data[:] = b"[" + data + b"]"
        case "twice":
            data += bytes(data)
    file.write_bytes(data)
    return f"{file.name}: {how} at {at}"


def _weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _change_header(folder: Path, rng: random.Random) -> str:
    """Changes the description of a tensor in a safetensors header."""
    file = _weights(folder, rng)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.sample(names, 2)
    entry = header[name]
    how = rng.choice(("dtype", "shape", "rank", "offset", "swap", "overlap", "gone", "name", "field", "metadata"))
    match how:
        case "dtype":
            entry["dtype"] = rng.choice(["F64", "F32", "I8", "F4", "F8_E4M3", "BOOL", "C64", "", "x", 3, None])
        case "shape":
            entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(_SIZES)
        case "rank":
            entry["shape"] = rng.choice([[], [1] * 100, [2**32, 2**32], entry["shape"] * 2, "x"])
        case "offset":
            entry["data_offsets"][rng.randrange(2)] = rng.choice(_SIZES)
        case "swap":
            entry["data_offsets"].reverse()
        case "overlap":
            entry["data_offsets"] = header[other]["data_offsets"]
        case "gone":
            del header[name]
        case "name":
            header[rng.choice(["", "\0", "x" * 10_000, "__metadata__", "../x"])] = header.pop(name)
        case "field":
            del entry[rng.choice(sorted(entry))]
        case "metadata":
            header["__metadata__"] = rng.choice(_VALUES)
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = text[:-1] + b"," + text[1:]  # every name occurs twice
        how += " and twice"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{file.name}: {how} of {name}"


def _change_data(folder: Path, rng: random.Random) -> str:
    """Truncates or extends a safetensors file, changes its header's length, or makes its numbers not finite."""
    file = _weights(folder, rng)
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    how = rng.choice(("cut", "cut header", "more", "length", "nothing", "infinite", "text"))
    match how:
        case "cut":
            del data[rng.randrange(8 + length, len(data)) :]
        case "cut header":
            del data[rng.randrange(8 + length) :]
        case "more":
            data += b"\0" * rng.choice([1, 8, 4096])
        case "length":
            data[:8] = rng.choice([0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1]).to_bytes(
                8, "little"
            )
        case "nothing":
            data.clear()
        case "infinite":
            data[8 + length :] = b"\xff" * (len(data) - 8 - length)
        case "text":
            data[:] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3841392\n"
    file.write_bytes(data)
    return f"{file.name}: {how}"


def _change_index(folder: Path, rng: random.Random) -> str:
    """Changes the index of the shards."""
    file = folder / "model.safetensors.index.json"
    index: Any = (
        json.loads(file.read_text()) if file.exists() else {"weight_map": {"model.norm.weight": "model.safetensors"}}
    )
    names = sorted(index["weight_map"])
    name = rng.choice(names)
    file_name = rng.choice(_FILE_NAMES)
    how = rng.choice(("file", "all", "more", "less", "map", "list"))
    match how:
        case "file":
            index["weight_map"][name] = file_name
        case "all":
            index["weight_map"] = {name: file_name for name in names}
        case "more":
            index["weight_map"]["model.layers.9.extra"] = index["weight_map"][name]
        case "less":
            del index["weight_map"][name]
        case "map":
            index["weight_map"] = rng.choice(_VALUES)
        case _:
            index = rng.choice(_VALUES)
    file.write_text(json.dumps(index))
    return f"{file.name}: {how} {str(file_name)[:20]!r}"


def _change_kind(folder: Path, rng: random.Random) -> str:
    """Deletes a file or puts a folder, a pipe or a bad link in its place."""
    file = folder / rng.choice([*_JSON_FILES, _weights(folder, rng).name, "chat_template.jinja"])
    file.unlink(missing_ok=True)
    how = rng.choice(("gone", "folder", "pipe", "endless", "dangling", "loop", "unreadable"))
    match how:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "dangling":
            file.symlink_to("nowhere")
        case "loop":
            file.symlink_to(file)
        case "unreadable":
            file.symlink_to("/proc/self/mem")
    return f"{file.name}: {how}"


def _change_template(folder: Path, rng: random.Random) -> str:
    """Replaces the chat template."""
    source = rng.choice(_TEMPLATES)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return f"chat_template.jinja: {source[:40]!r}"


CHANGES: tuple[Change, ...] = (
    _change_value,
    _change_value,
    _change_value,
    _change_bytes,
    _change_header,
    _change_header,
    _change_data,
    _change_index,
    _change_kind,
    _change_template,
)


def make_mutant(bases: list[Path], folder: Path, seed: int, number: int) -> str:
    """Writes mutant `number` of this seed into `folder`, which is emptied first. Returns a text about the change."""
    rng = random.Random(f"{seed} {number}")
    base = bases[number % len(bases)]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    return f"{base.name}, {CHANGES[number // len(bases) % len(CHANGES)](folder, rng)}"


def write_shards(base: Path, folder: Path) -> Path:
    """A copy of a checkpoint with its weights in two files and an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map: dict[str, str] = {}
    for i, half in enumerate(halves, 1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file)
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(folder: str) -> Verdict:
    """Loads a folder and generates a few tokens, in this process."""
    from ...errors import PagewireError
    from ...offline.llm import LLM
    from ...offline.sampling_params import SamplingParams

    try:
        few = SamplingParams(max_tokens=2, temperature=0.0)
        with LLM(folder, threads=1, max_num_seqs=2, kv_cache_memory="8M", max_num_batched_tokens=64) as llm:
            llm.generate([5, 6, 7], few, use_tqdm=False)
            llm.generate("Hello", few, use_tqdm=False)
            llm.chat([{"role": "user", "content": "Count from 1 to 5"}], few, use_tqdm=False)
    except PagewireError as error:
        return Verdict("refused", str(error))
    except BaseException as error:
        import traceback

        return Verdict(type(error).__name__, "".join(traceback.format_exception(error)[-4:]))
    return Verdict("served")


class Judge:
    """A process that loads one folder after another; it is killed when it hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process, if there is none, and waits until it has imported everything."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--judge"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert self._ask(DEMO_MODEL, _START_LIMIT_S).kind == "served"

    def __call__(self, folder: Path) -> Verdict:
        return self._ask(folder, LIMIT_S)

    def _ask(self, folder: Path, limit_s: float) -> Verdict:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self.close()
            return Verdict("hangs", f"no answer within {limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            return Verdict("dies", f"exit code {code}")
        return Verdict(*json.loads(line))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # waits, and closes the pipes
                self._process = None


def serve(folder: Path) -> Verdict:
    """Runs `pagewire serve` with a folder until it ends or is ready."""
    with closing(Server(None, str(folder))) as server:
        try:
            server.wait_ready(timeout_s=SERVE_LIMIT_S)
            return Verdict("served")
        except ServerError:
            text = server.log.read_text()
            code = server.stop()
    if code != 2 or not text.startswith("pagewire: "):
        return Verdict("hangs" if code == 0 else f"ends with {code}", text[-1000:])
    return Verdict("refused", text.removeprefix("pagewire: ").rstrip("\n"))


def verdicts(bases: list[Path], scratch: Path, seed: int, numbers: range) -> Iterator[tuple[int, str, float, Verdict]]:
    """(number, change, seconds, verdict) of each mutant."""
    ask = Judge()
    try:
        for number in numbers:
            what = make_mutant(bases, scratch / "mutant", seed, number)
            ask.start()
            started = time.perf_counter()
            verdict = ask(scratch / "mutant")
            yield number, what, time.perf_counter() - started, verdict
    finally:
        ask.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--seed", type=int, default=1, help="seed of the changes")
    parser.add_argument("--serve", type=int, default=5, help="mutants for which the real command is run as well")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.judge:
        return _judge_lines()
    counts: Counter[str] = Counter()
    slowest, num_faults = 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        bases = [DEMO_MODEL, write_shards(DEMO_MODEL, scratch / "shards")]
        numbers = range(arguments.first, arguments.first + arguments.count)
        for number, what, seconds, verdict in verdicts(bases, scratch, arguments.seed, numbers):
            counts[verdict.kind] += 1
            slowest = max(slowest, seconds)
            num_faults += verdict.is_fault
            if verdict.is_fault or arguments.verbose:
                print(f"{number:5} {what} → {verdict.kind} after {seconds:.2f} s {verdict.text}", flush=True)
        # Spread over the kinds of changes.
        for number in [numbers[i * (len(bases) + 1) % len(numbers)] for i in range(arguments.serve)]:
            what = make_mutant(bases, scratch / "mutant", arguments.seed, number)
            verdict = serve(scratch / "mutant")
            num_faults += verdict.is_fault
            print(f"{number:5} pagewire serve: {what} → {verdict.kind} {verdict.text}", flush=True)
    print(f"seed {arguments.seed}: {dict(counts)}, the slowest {slowest:.2f} s, {num_faults} faults")
    return 1 if num_faults else 0


def _judge_lines() -> int:
    """Writes a verdict for each folder that is named on standard input."""
    resource.setrlimit(resource.RLIMIT_DATA, (_JUDGE_BYTES, _JUDGE_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for output of libraries
    for line in sys.stdin:
        verdict = judge(line.rstrip("\n"))
        answers.write(json.dumps([verdict.kind, verdict.text]) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

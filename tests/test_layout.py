"""The structure is what the documents say: packages, who imports whom, who needs torch, who talks to whom."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from pagewire.config.config import Config
from pagewire.ipc import messages
from pagewire.procs import topology

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {"tests", "bench", "tools", "build"}
FREE = {
    "config.access",
    "config.config",
    "errors",
    "procs.interpreter",
    "config.model_files",
    "version",
}  # anyone may import these, and they import nothing of ours

ALLOWED: dict[str, set[str]] = {
    "config.access": {"errors"},
    "config.config": {"config.access", "errors"},
    "errors": set(),
    "procs.interpreter": set(),
    "config.model_files": {"errors"},
    "version": set(),
    "config.flags": set(),
    "config.machine": {"kernels.cpu.build"},
    "config.resolve": set(),
    "config.plugins": set(),
    "procs.prepare": {
        "api.tls",
        "config.machine",
        "config.resolve",
        "engine.models.spec",
        "engine.parallel.shard",
        "engine.weights.source",
        "engine.core.speculation",
        "engine.kv_connector.registry",
        "engine.extension.load",
        "engine.text.template_files",
    },
    "ipc": {"ipc"},
    "kernels": {"kernels"},
    "api": {"api", "offline.beam", "ipc.messages", "ipc.reports"},
    "engine.core": {"engine.core", "engine.extension", "ipc.messages", "ipc.reports", "config.plugins"},
    "engine.text": {"engine.text", "ipc.messages"},
    "engine.cache": {"engine.cache", "engine.attention.base"},
    "engine.kv_connector": {
        "engine.kv_connector",
        "engine.core.eviction",
        "engine.core.kv_connector",
        "engine.attention.base",
        "engine.cache",
        "ipc.messages",
        "config.plugins",
    },
    "engine.extension": {"engine.extension", "engine.attention.base", "engine.cache", "config.plugins"},
    "engine.attention": {"engine.attention", "engine.cache", "kernels"},
    "engine.parallel": {"engine.parallel", "engine.models.spec"},
    "engine.layers": {"engine.layers", "engine.attention", "engine.models.spec", "engine.parallel", "kernels"},
    "engine.models": {
        "engine.models",
        "engine.layers",
        "engine.attention",
        "engine.cache",
        "engine.parallel",
        "engine.quantization.scheme",
        "engine.weights.mapping",
        "kernels",
    },
    "engine.quantization": {"engine.quantization", "engine.parallel.shard", "engine.weights.reader", "kernels"},
    "engine.weights": {
        "engine.weights",
        "engine.models.spec",
        "engine.parallel.shard",
        "engine.quantization",
        "kernels.quantized_weight",
    },
    "engine.device": {"engine.device", "engine.gpu.queue", "engine.parallel.place", "kernels"},
    "engine.gpu": {"engine.gpu", "engine.models", "engine.layers", "engine.cache", "kernels", "ipc.messages"},
    "engine.runner": {
        "engine.runner",
        "engine.models",
        "engine.layers",
        "engine.attention",
        "engine.cache",
        "engine.device",
        "engine.gpu",
        "engine.parallel",
        "engine.weights",
        "engine.kv_connector",
        "engine.extension",
        "kernels",
        "ipc.messages",
    },
    "procs": {"procs", "ipc", "engine", "api", "config.flags", "config.machine", "procs.prepare", "__init__"},
    "route": {
        "route",
        "api",
        "config.flags",
        "config.machine",
        "config.resolve",
        "ipc.zmq_channel",
        "procs.child",
        "procs.launch",
        "procs.listening",
        "procs.supervisor",
        "__init__",
    },
    "offline.beam": set(),
    "offline.pooled": {"ipc.messages"},
    "offline.llm": {
        "api.parsers.registry",
        "offline.beam",
        "engine.text.tokenizer",
        "ipc.messages",
        "offline.pooled",
        "procs.prepare",
        "procs",
        "offline.sampling_params",
    },
    "client.engine_client": {"ipc"},
    "offline.sampling_params": {"ipc.messages"},
    "offline.async_llm": {
        "api.parsers.registry",
        "engine.text.tokenizer",
        "client.engine_client",
        "ipc.messages",
        "offline.llm",
        "procs.prepare",
        "procs.detokenizer",
        "procs.tokenizer",
        "offline.sampling_params",
    },
    "commands": {
        "api.batches.format",
        "commands",
        "config.machine",
        "procs.prepare",
        "config.resolve",
        "engine.models.spec",
        "engine.runner.forecast",
        "engine.text",
        "engine.weights.source",
        "ipc.zmq_channel",
        "kernels.cpu.build",
    },
    "cli": {
        "config.resolve",
        "commands",
        "config.flags",
        "procs.prepare",
        "procs",
        "route",
        "engine.core.trace",
        "engine.runner.forecast",
        "__init__",
    },
    "__init__": {"offline.async_llm", "offline.beam", "offline.llm", "client.engine_client", "offline.sampling_params"},
    "__main__": {"cli"},
}


@cache
def sources() -> list[tuple[str, Path]]:
    """Dotted name inside the package (`engine.core.request`) and file, of everything that is shipped."""
    folders = [path.parent for path in ROOT.glob("[!.]*/__init__.py") if path.parent.name not in NOT_SHIPPED]
    found = []
    for path in [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts), path))
    return found


def imports_of_ours(name: str, path: Path) -> set[str]:
    """What a module imports of ours, lazily or for types included."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    if name == "__init__":
        package = []
    known = {module for module, _ in sources()}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{target}.{alias.name}".strip(".")
                found.add(inner if inner in known else target or "__init__")
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] == "pagewire" for n in names), (
                f"{path}: import relatively inside the package"
            )
    return found


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"pagewire"} | {
        "pagewire." + name for name, path in sources() if path.name == "__init__.py" and path.parent != ROOT
    }
    assert found == listed


def test_the_typing_folder_mirrors_the_root() -> None:
    tree = {path.name for path in (ROOT / ".typing" / "pagewire").iterdir()}
    wanted = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    wanted |= {path.name for path in ROOT.glob("*.py")} | {"py.typed"}
    assert wanted <= tree
    links = [path for path in (ROOT / ".typing").rglob("*") if path.is_symlink()]
    assert ROOT / ".typing" / "pagewire" / "tests" / "stress" in links
    assert all(path.exists() for path in links), "a dangling link"


def test_the_makefile_names_programs_that_exist_and_every_stress_program() -> None:
    loops = dict(re.findall(r"for (bench|program) in ([\w. \\\n\t]+); do", (ROOT / "Makefile").read_text()))
    benchmarks, programs = (loops[name].replace("\\", "").split() for name in ("bench", "program"))
    for name in benchmarks:
        path = ROOT / "bench" / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    stress = (ROOT / "tests" / "stress").glob("*.py")
    assert set(programs) == {path.stem for path in stress if "ArgumentParser" in path.read_text()}


def test_imports_go_only_where_they_may() -> None:
    wrong = []
    for name, path in sources():
        room = max((r for r in ALLOWED if name == r or name.startswith(r + ".")), key=len, default=None)
        if path.name == "__init__.py" and name in ("engine", "config", "offline", "client"):
            assert not imports_of_ours(name, path), f"{name} is a room, and imports nothing"
            continue
        assert room is not None, f"{name}: no rule says what it may import; add one to ALLOWED"
        for target in imports_of_ours(name, path):
            free = target in FREE and name not in FREE
            if not free and not any(target == a or target.startswith(a + ".") for a in ALLOWED[room]):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(sorted(wrong))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".typing")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    "modules",
    [
        "pagewire, pagewire.cli, pagewire.procs.prepare, pagewire.procs.supervisor, pagewire.procs.launch, "
        "pagewire.commands.doctor, pagewire.commands.explain, pagewire.commands.top",
        "pagewire.procs.child, pagewire.procs.core, pagewire.engine.core.scheduler",
        "pagewire.procs.tokenizer, pagewire.procs.detokenizer, pagewire.procs.grammar, pagewire.procs.trial",
        "pagewire.procs.api, pagewire.api.app",
        "pagewire.procs.worker",
    ],
)
def test_only_a_started_worker_needs_torch(modules: str) -> None:
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_grammars_cost_nothing_before_the_first() -> None:
    late = "{'numpy', 'llguidance', 'pagewire.engine.text.grammar'}"
    code = f"import sys, pagewire.procs.grammar; print(sorted({late} & set(sys.modules)))"
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_nothing_of_ours_is_imported_by_a_bare_name() -> None:
    code = (
        "import sys, pagewire.cli, pagewire.procs.core, pagewire.api.app;"
        "print(sorted({'engine', 'procs', 'kernels', 'ipc', 'api', 'config', 'errors'} & set(sys.modules)))"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_no_environment_variable_changes_what_is_served() -> None:
    """Folders, the C compiler, and keys, which are nothing for a command line; the GPUs that CUDA may see; and facts
    about the machine, which tests replace to get the defaults of another one. The rest is for flags and files."""
    read = set()
    for _, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("environ.get", "environment.get", "getenv")
            ):
                read.add(ast.literal_eval(node.args[0]))
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                read.add(ast.literal_eval(node.slice))
    folders = {"XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TRITON_CACHE_DIR", "HF_HOME"}
    assert read == folders | {"CC", "PAGEWIRE_API_KEY", "CUDA_VISIBLE_DEVICES", "PAGEWIRE_MACHINE"}


def test_mailboxes_accept_exactly_what_the_topology_sends() -> None:
    for name, accepts in topology.ACTORS.items():
        sent = {kind for (_, receiver), kinds in topology.EDGES.items() if receiver == name for kind in kinds}
        assert sent | set(topology.FROM_SUPERVISOR[name]) == set(accepts.__args__), name  # type: ignore[attr-defined]
    assert set(topology.TO_SUPERVISOR) == set(messages.ToSupervisor.__args__)  # type: ignore[attr-defined]


def test_every_rank_is_sent_the_plans_and_answers_nobody_but_the_core() -> None:
    config = Config(model="x", tensor_parallel_size=3, api_processes=2)
    others = ("core", "grammar", "tokenizer", "detokenizer")
    assert topology.names(config) == ("worker", "worker-1", "worker-2", *others, "api", "api-1")
    told = ("worker", "grammar", "detokenizer", "api", "worker-1", "worker-2", "api-1", "supervisor")
    assert topology.receivers("core", config) == told
    assert topology.receivers("worker-2", config) == ("core", "supervisor")
    assert [topology.index(name) for name in topology.workers(3)] == [0, 1, 2]


def test_the_readme_shows_the_topology() -> None:
    assert topology.picture() in (ROOT / "README.md").read_text()


def test_no_file_is_long_without_a_reason() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {n} lines"
        for _, path in sources()
        if (n := len(path.read_text().splitlines())) > 500
    ]
    assert not long, long

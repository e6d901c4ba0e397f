"""The structure is that of the documents: packages, imports between rooms, imports of torch, and the topology."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from pagewire.ipc import messages
from pagewire.procs import topology

ROOT = Path(__file__).resolve().parent.parent
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
NOT_SHIPPED = {"tests", "bench", "tools", "build"}

# Room → the rooms that it may import. A room is a folder, or a module of the root. Every room comes after those that it
# imports. `errors`, `version` and `config` have no behaviour, and all later rooms may import them.
ROOMS: dict[str, str] = {
    "errors": "",
    "version": "",
    "kernels": "",
    "kernels.triton": "kernels",
    "kernels.cpu": "kernels",
    "config": "errors kernels.cpu",
    "ipc": "config errors",
    "engine.core": "errors config ipc",
    "engine.models": "engine.core errors kernels kernels.cpu",
    "engine.models.families": "errors engine.models",
    "engine.checkpoint": "errors config engine.models engine.models.families",
    "engine.text": "errors config ipc engine.checkpoint",
    "engine.attention": "kernels kernels.cpu",
    "engine": "config engine.core engine.attention",
    "engine.kv_connector": "errors config ipc engine.core engine.attention",
    "engine.parallel": "errors ipc kernels.cpu",
    "engine.plugin": "errors config ipc engine.models engine.parallel",
    "engine.weights": "errors config engine.models engine.checkpoint kernels",
    "engine.device": "errors config engine.parallel kernels.triton",
    "engine.executors": (
        "errors engine.models engine.checkpoint engine.attention engine.parallel engine.weights kernels kernels.cpu"
    ),
    "engine.steps": (
        "config ipc engine.models engine.attention engine.parallel engine.plugin engine.weights engine.executors "
        "kernels"
    ),
    "engine.gpu": (
        "errors config ipc engine.models engine.attention engine.parallel engine.device engine.executors engine.steps "
        "kernels kernels.triton"
    ),
    "engine.runner": (
        "errors version config ipc engine engine.checkpoint engine.text engine.attention engine.kv_connector "
        "engine.parallel engine.plugin engine.weights engine.device engine.models engine.models.families "
        "engine.executors engine.steps engine.gpu kernels kernels.cpu"
    ),
    "api.http": "errors config ipc",
    "api.engines": "",
    "api.gateway": "errors config ipc api.engines api.http",
    "api.state": "api.http",
    "api.output.parsers": "errors config",
    "api.output.parsers.families": "api.output.parsers",
    "api.output": "errors config ipc api.http api.gateway api.state api.output.parsers",
    "api.openai": "errors config ipc api.http api.gateway api.output api.output.parsers",
    "api.anthropic": "errors config ipc api.http api.output api.output.parsers api.state api.openai",
    "api.responses": "errors ipc api.http api.state api.output api.output.parsers api.openai",
    "api.batches": "api.http api.output api.openai api.state",
    "api.llamacpp": "errors ipc api.gateway api.http api.output api.openai",
    "api.pooling": "config ipc api.http api.output api.openai",
    "api.ollama": (
        "errors config ipc api.gateway api.http api.output api.output.parsers api.openai api.llamacpp api.pooling"
    ),
    "api.admin": "errors config ipc api.http api.gateway api.output api.openai",
    "api.web": "api.http api.openai api.admin",
    "api": (
        "errors config api.http api.gateway api.output api.openai api.anthropic api.responses api.state "
        "api.batches api.pooling api.llamacpp api.ollama api.admin api.web"
    ),
    "procs": (
        "errors version config ipc engine engine.core engine.models engine.text engine.checkpoint engine.kv_connector "
        "engine.parallel engine.device engine.runner api.http api.gateway api.output.parsers api.state api.admin "
        "api.ollama api"
    ),
    "client": "errors config ipc procs",
    "dynamo": "client",
    "route": "errors version config api.engines api.http api.gateway api.output api procs",
    "commands": (
        "errors config ipc engine.checkpoint engine.text engine.runner kernels.cpu kernels.triton api.batches procs"
    ),
    "ray": "errors version config ipc api procs route commands",
    "offline": "errors config ipc engine.core engine.text api.output api.output.parsers procs client",
    "commands.bench": "errors config engine.checkpoint engine.text procs commands offline",
    "cli": "errors version config engine.core engine.runner procs route commands commands.bench ray",
    "__init__": "version engine.plugin api.output client offline",
    "__main__": "cli",
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
    """Our own modules that a module imports, also lazily or for types."""
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


def test_pyproject_lists_every_package() -> None:
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


def test_the_makefile_names_existing_benchmarks_and_every_stress_program() -> None:
    loops = dict(re.findall(r"for (bench|program) in ([\w. \\\n\t]+); do", (ROOT / "Makefile").read_text()))
    benchmarks, programs = (loops[name].replace("\\", "").split() for name in ("bench", "program"))
    for name in benchmarks:
        path = ROOT / "bench" / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    stress = (ROOT / "tests" / "stress").glob("*.py")
    assert set(programs) == {path.stem for path in stress if "ArgumentParser" in path.read_text()}


@cache
def imports() -> dict[str, set[str]]:
    """Module → the modules of ours that it imports."""
    return {name: imports_of_ours(name, path) for name, path in sources()}


def room_of(module: str) -> str:
    """The folder of a module. A module of the root is a room of its own."""
    is_folder = any(name == module and path.name == "__init__.py" for name, path in sources())
    return module if is_folder or "." not in module else module.rpartition(".")[0]


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        path.append(node)
        for target in graph.get(node, set()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in path:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def imports_of_rooms() -> dict[str, set[str]]:
    """Room → the other rooms that it imports."""
    rooms: dict[str, set[str]] = {}
    for name, targets in imports().items():
        room = room_of(name)
        rooms.setdefault(room, set()).update({room_of(target) for target in targets} - {room})
    return rooms


def test_import_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_neither_modules_nor_rooms_have_import_cycles() -> None:
    assert cycles(imports()) == []
    assert cycles(imports_of_rooms()) == []


def test_rooms_import_exactly_the_listed_rooms() -> None:
    assert imports_of_rooms() == {room: set(targets.split()) for room, targets in ROOMS.items()}


def test_every_room_comes_after_those_that_it_imports() -> None:
    order = {room: place for place, room in enumerate(ROOMS)}
    upward = [
        f"{room} imports {target}"
        for room, ts in ROOMS.items()
        for target in ts.split()
        if order[target] >= order[room]
    ]
    assert not upward


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".typing")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    "modules",
    [
        "pagewire, pagewire.cli, pagewire.procs.prepare, pagewire.procs.supervisor, pagewire.procs.launch, "
        "pagewire.commands.doctor, pagewire.commands.explain, pagewire.commands.top",
        "pagewire.procs.child, pagewire.procs.core, pagewire.engine.core.scheduler",
        "pagewire.procs.tokenizer, pagewire.procs.detokenizer, pagewire.procs.grammar, pagewire.procs.grammar_sandbox",
        "pagewire.procs.api, pagewire.api.app",
        "pagewire.procs.worker",
    ],
)
def test_no_module_imports_torch_before_a_worker_starts(modules: str) -> None:
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_grammar_libraries_are_not_imported_before_the_first_grammar() -> None:
    libraries = "{'numpy', 'llguidance', 'pagewire.engine.text.grammar'}"
    code = f"import sys, pagewire.procs.grammar; print(sorted({libraries} & set(sys.modules)))"
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_only_one_room_imports_ray_and_only_in_functions() -> None:
    for name, path in sources():
        tree = ast.parse(path.read_text())
        lazy = {node for one in ast.walk(tree) if isinstance(one, _FUNCTION) for node in ast.walk(one)}
        for node in ast.walk(tree):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                named = [node.module or ""]
            if any(one.split(".")[0] == "ray" for one in named):
                assert room_of(name) == "ray" and node in lazy, f"{path}: {named}"


def test_our_modules_are_imported_only_inside_the_package() -> None:
    code = (
        "import sys, pagewire.cli, pagewire.procs.core, pagewire.api.app;"
        "print(sorted({'engine', 'procs', 'kernels', 'ipc', 'api', 'config', 'errors'} & set(sys.modules)))"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_only_these_environment_variables_are_read() -> None:
    """Exceptions: folders, the C compiler, API keys (which do not belong on a command line), the GPUs that CUDA may
    use, and facts about the machine, which tests replace to get the defaults of another one."""
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
    assert read == folders | {"CC", "PAGEWIRE_API_KEY", "OPENAI_API_KEY", "CUDA_VISIBLE_DEVICES", "PAGEWIRE_MACHINE"}


def test_mailboxes_accept_exactly_what_the_topology_sends() -> None:
    for name, accepts in topology.ACTORS.items():
        sent = {kind for (_, receiver), kinds in topology.EDGES.items() if receiver == name for kind in kinds}
        assert sent | set(topology.FROM_SUPERVISOR[name]) == set(accepts.__args__), name  # type: ignore[attr-defined]
    assert set(topology.TO_SUPERVISOR) == set(messages.ToSupervisor.__args__)


def test_every_rank_gets_the_plans_and_answers_only_the_core() -> None:
    others = ("core", "grammar", "tokenizer", "detokenizer")
    assert topology.names(3, 2) == ("worker", "worker-1", "worker-2", *others, "api", "api-1")
    receivers = ("worker", "grammar", "detokenizer", "api", "worker-1", "worker-2", "api-1", "supervisor")
    assert topology.receivers("core", 3, 2) == receivers
    assert topology.receivers("worker-2", 3, 2) == ("core", "supervisor")
    assert [topology.index(name) for name in topology.workers(3)] == [0, 1, 2]


def test_the_readme_shows_the_topology() -> None:
    assert topology.picture() in (ROOT / "README.md").read_text()

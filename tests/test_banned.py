"""What no shipped file may do: make code or objects from bytes, match text with a pattern that may never finish, or
pass a library's error message on to a client."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_layout import sources

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "copyreg",
    "yaml",
    "code",
}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
ATTRIBUTES = {
    
        "literal_eval",
        "recv_pyobj",
        "send_pyobj",
        "unsafe_load",
        "full_load",
        "allow_pickle",
        "load_state_dict_from_url",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "popen", "mktemp",
}  # fmt: skip
CALLS = {"torch.load", "torch.save", "torch.hub.load", "np.load", "numpy.load", "os.system", "ctypes.PyDLL"}
KEYWORDS = {"allow_pickle", "shell"}
MODULES_BY_NAME = {
    "__init__": "our own, from a table",
    "engine.models.families": "our own, of its folder",
    "kernels.triton.compile": "our own, from a list",
    "config.plugins": "named by the operator's flags",
    "procs.grammar_sandbox": "named by our own code",
}
PROCESSES = {
    "kernels.triton.compile": "a tool for building wheels; its processes are forks of itself",
    "kernels.triton.grid": "a tool for developers; its processes are forks of itself",
    "procs.killable": "a pipe of which only send_bytes and recv_bytes are used",
}

REGEX = {
    "config.access": "flags of the operator",
    "config.config": "flags of the operator",
    "offline.sampling_params": "messages of msgspec",
    "commands.doctor": "files and tools of this machine",
    "engine.runner.scripted": "the operator's own script, for tests",
    "engine.weights.mapping": "patterns of the pages: names of tensors, with one repetition before and one after",
    "engine.checkpoint.source": "a flag of the operator",
    "engine.text.tokenizer": "alternatives of literal texts: no repetition, so no backtracking",
    "engine.text.grammar_text": "the beginning of each line; the library's error message, which is short",
    "engine.text.json_schema": "a few literal beginnings",
    "kernels.triton.compile": "the compiler's output",
    "kernels.triton.grid": "the compiler's output",
    "kernels.triton.cubins": "names within our own archive",
    "api.openai.kv_transfer": "a bounded host name against the operator's --kv-peers",
    "api.app": "one class of characters, of bounded length",
    "api.http.origins": "one class of characters, of bounded length",
    "api.web.openapi": "our own paths",
    "route.ask": "paths; one class of characters, of bounded length",
}

Finding = tuple[int, str]


def banned(tree: ast.AST, module: str) -> Iterator[Finding]:
    """(line, finding) of every banned use in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom(level=0):
                yield from ((node.lineno, what) for what in _banned_imports(node, module))
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield node.lineno, f"calls {name}"
            case ast.Call():
                yield from ((node.lineno, what) for what in _banned_calls(node, module))
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield node.lineno, f"uses {name}"


def _banned_imports(node: ast.Import | ast.ImportFrom, module: str) -> Iterator[str]:
    source = node.module if isinstance(node, ast.ImportFrom) else None
    for name in [alias.name for alias in node.names] if source is None else [source]:
        if name.split(".")[0] in MODULES:
            yield f"imports {name}"
        elif name.split(".")[0] == "multiprocessing" and module not in PROCESSES:
            yield "uses multiprocessing, which pickles"
    for alias in node.names if source is not None else ():
        if alias.name in ATTRIBUTES or f"{source}.{alias.name}" in CALLS:
            yield f"imports {source}.{alias.name}"


def _banned_calls(node: ast.Call, module: str) -> Iterator[str]:
    called = ast.unparse(node.func)
    if called in CALLS:
        yield f"calls {called}"
    if called.endswith("import_module") and module not in MODULES_BY_NAME:
        yield "imports a module by its name"
    if called.endswith(("connection.send", "connection.recv")):
        yield f"calls {called}, which pickles"
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS and not _is(keyword.value, False):
            yield f"passes {keyword.arg}"
        if keyword.arg == "trust_remote_code" and _is(keyword.value, True):
            yield "trusts remote code regardless of the operator's flags"
        if keyword.arg == "weights_only" and _is(keyword.value, False):
            yield "unpickles weights"


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@cache
def trees() -> list[tuple[str, Path, ast.AST]]:
    """(module, file, syntax tree) of everything that is shipped."""
    return [(module, path, ast.parse(path.read_text())) for module, path in sources()]


def test_nothing_is_unpickled_evaluated_or_run_in_a_shell() -> None:
    found = [f"{path}:{line} {what}" for module, path, tree in trees() for line, what in banned(tree, module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "import multiprocessing.pool",
        "from multiprocessing import Queue",
        "self._connection.send(x)",
        "eval(x)",
        "compile(x, y, z)",
        "ast.literal_eval(x)",
        "from ast import literal_eval",
        "torch.load(x, weights_only=True)",
        "from torch import load",
        "np.load(x)",
        "f(x, allow_pickle=True)",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(x)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "importlib.import_module(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_each_banned_use_is_found(code: str) -> None:
    assert list(banned(ast.parse(code), "procs.api"))


def test_regular_expressions_are_used_only_where_backtracking_is_bounded() -> None:
    """Python's regular expressions backtrack. Each use has a reason; parsers of model output have no use at all."""
    using = set()
    for module, _, tree in trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if {"re", "regex", "fnmatch", "sre_compile"} & set(names):
                using.add(module)
    assert using == set(REGEX)


# ── errors for clients ───────────────────────────────────────────────────────────────────────────────────────────────

CALLS_FOR_CLIENTS = {
    "HttpError",
    "RequestError",
    "Failed",
    "Outcome",
    "Goodbye",
    "BatchError",
    "ErrorFields",
    "complaint",
    "refusal",
    "unsupported",
}
OWN_ERRORS = {"PagewireError", "HttpError", "RequestError", "ConfigError", "CheckpointError", "CannotSpell"}
ALLOWED_MESSAGES = {
    ("api.batches.runner", "ValueError"): "our own message, raised a line above or by `read_request`",
    ("ray.broker", "Exception"): "received by the operator when the server starts, cut to 300 characters",
    ("client.engine_client", "*DecodeError"): "received by the program that uses the client",
    ("api.openai.translate", "ValidationError"): "names the field and what was expected, cut to 200 characters",
    ("engine.text.chat_template", "TemplateError"): "a template raises errors for the author of the chat",
    ("engine.text.grammar_text", "Exception"): "the error in the client's grammar, cut to 300 characters",
    ("api.state.database", "Error"): "a sentence of ours, by SQLite's error code",
}


def leaked_messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, kind) of exceptions of other libraries whose messages go into an error for a client."""
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
        kinds = [] if handler.type is None else [
            ast.unparse(kind).rpartition(".")[2]
            for kind in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
        ]  # fmt: skip
        foreign = [kind for kind in kinds if kind not in OWN_ERRORS]
        if handler.name is None or not foreign:
            continue
        tainted = {handler.name}
        for node in ast.walk(handler):
            if isinstance(node, ast.Assign) and _mentions(node.value, tainted):
                tainted |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(handler):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CALLS_FOR_CLIENTS:
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(_mentions(value, tainted) for value in arguments):
                    yield handler.lineno, foreign[0]


def _mentions(value: ast.AST, names: set[str]) -> bool:
    """Whether `value` uses one of these names, except for its type."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("type", "isinstance"):
        return False
    if isinstance(value, ast.Name):
        return value.id in names
    return any(_mentions(inner, names) for inner in ast.iter_child_nodes(value))


def test_errors_for_clients_do_not_contain_messages_of_libraries() -> None:
    found = {(module, kind): f"{path}:{line}" for module, path, tree in trees() for line, kind in leaked_messages(tree)}
    assert {place: found[place] for place in found.keys() - ALLOWED_MESSAGES.keys()} == {}
    assert found.keys() == ALLOWED_MESSAGES.keys(), "remove these from ALLOWED_MESSAGES"


LEAK = """
try:
    f()
except (KeyError, OSError) as error:
    why = str(error)
    raise HttpError(400, f'no: {why}')
"""


def test_a_leaked_message_is_found() -> None:
    assert list(leaked_messages(ast.parse(LEAK))) == [(4, "KeyError")]
    assert not list(leaked_messages(ast.parse(LEAK.replace("(KeyError, OSError)", "RequestError"))))
    assert not list(leaked_messages(ast.parse(LEAK.replace("str(error)", "type(error).__name__"))))

"""What no shipped file may do: make code or objects of bytes, match text with a pattern that may take for ever, or tell
a client what a library said."""

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
    "engine.models.registry": "our own, from a table",
    "kernels.triton.compile": "our own, from a list",
    "config.plugins": "what the operator's flags name",
    "procs.grammar_sandbox": "what our own code names",
}
PROCESSES = {
    "kernels.triton.compile": "a tool for those who build a wheel; its processes are forks of itself",
    "procs.killable": "a pipe, of which only send_bytes and recv_bytes are used",
}

REGEX = {
    "config.access": "flags of the operator",
    "config.config": "flags of the operator",
    "offline.sampling_params": "msgspec's own words",
    "commands.doctor": "files and tools of this machine",
    "engine.weights.loader": "names of tensors, one literal at their end",
    "engine.checkpoint.source": "a flag of the operator",
    "engine.text.tokenizer": "a tree of literal texts: no repetition, so no going back",
    "engine.text.grammar_text": "one look at each line's beginning; the library's complaint, which is short",
    "engine.text.json_schema": "a look for a few literal beginnings",
    "kernels.triton.compile": "the compiler's output",
    "kernels.triton.cubins": "names within our own archive",
    "api.app": "one class of characters, of bounded length",
    "api.http.origins": "one class of characters, of bounded length",
    "api.web.openapi": "our own paths",
    "route.ask": "paths; one class of characters, of bounded length",
}

Finding = tuple[int, str]


def banned(tree: ast.AST, module: str) -> Iterator[Finding]:
    """What is wrong, and on which line."""
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
            yield "trusts remote code whatever the operator says"
        if keyword.arg == "weights_only" and _is(keyword.value, False):
            yield "unpickles weights"


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@cache
def trees() -> list[tuple[str, Path, ast.AST]]:
    """Name, file and source of everything that is shipped."""
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
def test_each_of_them_would_be_seen(code: str) -> None:
    assert list(banned(ast.parse(code), "procs.api"))


def test_patterns_are_matched_only_where_they_cannot_take_for_ever() -> None:
    """Python's own go back and try again. Each use has a reason; parsers of what models write have none."""
    using = set()
    for module, _, tree in trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if {"re", "regex", "fnmatch", "sre_compile"} & set(names):
                using.add(module)
    assert using == set(REGEX)


# ── what clients are told ────────────────────────────────────────────────────────────────────────────────────────────

CLIENTS_HEAR = {
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
OURS = {"PagewireError", "HttpError", "RequestError", "ConfigError", "CheckpointError", "CannotSpell"}
WORDS_ARE_KEPT = {
    ("api.batches.runner", "ValueError"): "raised in our own words, a line above or by `read_request`",
    ("client.engine_client", "*DecodeError"): "is heard by the program that it is a part of",
    ("api.openai.translate", "ValidationError"): "names the field and what was expected, cut to 200 characters",
    ("engine.text.chat_template", "TemplateError"): "what a template raises is meant for whoever wrote the chat",
    ("engine.text.grammar_text", "Exception"): "what is wrong with the client's grammar, cut to 300 characters",
}


def retold(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Exceptions of others whose words go into something that a client hears."""
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
        kinds = [] if handler.type is None else [
            ast.unparse(kind).rpartition(".")[2]
            for kind in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
        ]  # fmt: skip
        foreign = [kind for kind in kinds if kind not in OURS]
        if handler.name is None or not foreign:
            continue
        tainted = {handler.name}
        for node in ast.walk(handler):
            if isinstance(node, ast.Assign) and _mentions(node.value, tainted):
                tainted |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(handler):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CLIENTS_HEAR:
                said = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(_mentions(value, tainted) for value in said):
                    yield handler.lineno, foreign[0]


def _mentions(value: ast.AST, names: set[str]) -> bool:
    """But for what type it is."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("type", "isinstance"):
        return False
    if isinstance(value, ast.Name):
        return value.id in names
    return any(_mentions(inner, names) for inner in ast.iter_child_nodes(value))


def test_clients_are_told_in_our_own_words() -> None:
    found = {(module, kind): f"{path}:{line}" for module, path, tree in trees() for line, kind in retold(tree)}
    assert {place: found[place] for place in found.keys() - WORDS_ARE_KEPT.keys()} == {}
    assert found.keys() == WORDS_ARE_KEPT.keys(), "an exception to the rule that is none any more"


LEAK = """
try:
    f()
except (KeyError, OSError) as error:
    why = str(error)
    raise HttpError(400, f'no: {why}')
"""


def test_a_leak_would_be_seen() -> None:
    assert list(retold(ast.parse(LEAK))) == [(4, "KeyError")]
    assert not list(retold(ast.parse(LEAK.replace("(KeyError, OSError)", "RequestError"))))
    assert not list(retold(ast.parse(LEAK.replace("str(error)", "type(error).__name__"))))

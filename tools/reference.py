"""Generates the reference pages of the documentation from the program: the command's parser, a server's /openapi.json,
the /metrics of servers and routers, and the messages between processes. `tools/site.py` adds the pages to the site.
"""

import argparse
import ast
import asyncio
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import msgspec
from msgspec import inspect as types
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from ..api.admin.endpoints import Sleeper
from ..api.admin.settings import Holding
from ..api.app import Served, create_app
from ..api.gateway.gateway import Gateway
from ..api.gateway.metrics import GPU_METRICS, Metrics
from ..api.gateway.residence import Residence
from ..api.gateway.stats import Stats
from ..cli import build_parser
from ..config.config import EngineConfig, HttpConfig, ServerConfig
from ..config.flags import make_config
from ..config.latency_classes import LatencyClass
from ..config.live import LIVE
from ..ipc.messages import (
    GroupSnapshot,
    ProcessUsage,
    Pulse,
    Settings,
    Snapshot,
    StageSeconds,
    StageSnapshot,
    Swapped,
    TierSnapshot,
    WorkerSnapshot,
    WorkerUsage,
)
from ..ipc.reports import SECONDS, Histogram
from ..procs import topology
from ..procs.prepare import prepare_server
from ..route.engines import Fleet
from ..route.metrics import render
from ..route.relay import RelayStats
from ..version import __version__

Json = dict[str, object]

_DEFAULT = re.compile(r" \(default: (.*)\)$", re.DOTALL)
_SCHEMAS = "#/components/schemas/"


def pages() -> dict[str, str]:
    """File name → Markdown of every page."""
    return {"flags.md": flags(), "http.md": http(), "metrics.md": metrics(), "messages.md": messages()}


# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def commands() -> dict[str, argparse.ArgumentParser]:
    """Name → parser of every subcommand, also of those of a subcommand."""
    return dict(_subcommands("", build_parser()))


def _subcommands(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield prefix + name, inner
                yield from _subcommands(f"{prefix}{name} ", inner)


def flags() -> str:
    """The page of all commands and their flags."""
    lines = ["# Commands and flags", "", "What `pagewire COMMAND --help` says."]
    for name, parser in commands().items():
        lines += ["", f"## pagewire {name}", "", _text(parser.description or "")]
        if parser.epilog:
            lines += ["", *_block(parser.epilog)]
        for group in parser._action_groups:
            actions = [one for one in group._group_actions if not isinstance(one, argparse._HelpAction)]
            if not actions:
                continue
            if group.title not in ("positional arguments", "options"):
                lines += ["", f"### {name}: {group.title}"]
            lines += ["", *_table(("flag", "value", "default", "meaning"), (_flag(one) for one in actions))]
    live = [(_code(one.flag), "any" if one.live == "any" else "up to that of the start") for one in LIVE]
    lines += ["", "## Settings that may change while a server runs", "", "By `PATCH /admin/settings`, or SIGHUP."]
    lines += ["", *_table(("flag", "value"), live)]
    return "\n".join([*lines, ""])


def _flag(action: argparse.Action) -> Sequence[str]:
    names = ", ".join(_code(one) for one in action.option_strings) or _code(str(action.metavar or action.dest))
    help = (action.help or "") % {**vars(action), "prog": "pagewire"}
    found = _DEFAULT.search(help)
    if action.choices is not None:
        value = ", ".join(_code(str(one)) for one in action.choices)
    elif action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) or not action.option_strings:
        value = ""
    else:
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        value = _code(f"{metavar} …" if action.nargs == "+" else metavar)
    return names, value, _cell(found[1]) if found else "", _cell(_DEFAULT.sub("", help))


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def config() -> ServerConfig:
    """The configuration of a server of the demo model with every endpoint."""
    return prepare_server(make_config(enable_sleep_mode=True, enable_model_swap=True, admin_api_key=["key"]))


def openapi() -> Json:
    """The /openapi.json of that server."""

    async def swap(changes: bytes, version: int | None, must_drain: bool) -> Swapped:
        raise AssertionError("nothing is asked for")

    async def change(changes: bytes, who: str) -> Swapped:
        raise AssertionError("nothing is asked for")

    served = Served(Gateway(lambda message: None), config().engine, Sleeper(lambda message: None), healthy=lambda: None)
    holding = Holding(config().engine, lambda: Settings(0, config().engine, config().http), change)
    app = create_app([served], config().http, version=__version__, swap=swap, holding=holding)
    parts: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        parts.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/openapi.json",
        "raw_path": b"/openapi.json",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    asyncio.run(app(scope, receive, send))
    assert parts[0]["status"] == 200, parts
    return msgspec.json.decode(b"".join(part.get("body", b"") for part in parts), type=Json)


def http() -> str:
    """The page of every endpoint, by section, and of every schema."""
    description = openapi()
    shapes = _Shapes(description)
    lines = [
        "# HTTP endpoints and fields",
        "",
        "What `/openapi.json` of a server says, with sleep mode and model swap enabled. A running server shows the",
        "same at `/docs`. [The HTTP API](../http-api.md) says what each field of a request does.",
    ]
    operations = [
        (path, method, operation)
        for path, methods in _object(description["paths"]).items()
        for method, operation in _object(methods).items()
    ]
    for tag in _list(description["tags"]):
        section = str(_object(tag)["name"])
        lines += ["", f"## {section}"]
        for path, method, value in operations:
            if section in _list(_object(value)["tags"]):
                lines += ["", f"### {method.upper()} {path}", "", *_operation(_object(value), shapes)]
    lines += ["", "## Objects"]
    for name, schema in shapes.schemas.items():
        lines += ["", f"### {name}", "", *shapes.section(_object(schema))]
    return "\n".join([*lines, ""])


def _operation(operation: Json, shapes: "_Shapes") -> Iterator[str]:
    yield f"{operation['summary']}."
    if parameters := _list(operation.get("parameters", [])):
        yield ""
        rows = (
            (_code(str(one["name"])), str(one["in"]), shapes.type(_object(one["schema"])))
            for one in map(_object, parameters)
        )
        yield from _table(("parameter", "in", "type"), rows)
    if "requestBody" in operation:
        for media, content in _object(_object(operation["requestBody"])["content"]).items():
            yield ""
            yield f"Body: {_code(media)}, {shapes.type(_object(_object(content)['schema']))}"
    answer = _object(_object(operation["responses"])["200"])
    for media, content in _object(answer["content"]).items():
        yield ""
        yield f"Answer: {_code(media)}, {shapes.type(_object(_object(content)['schema']))}"


class _Shapes:
    """The schemas of a description as Markdown."""

    def __init__(self, description: Json) -> None:
        self.schemas = _object(_object(description["components"])["schemas"])

    def section(self, schema: Json) -> Iterator[str]:
        """The description and the fields of one schema."""
        if "description" in schema:
            yield from _block(str(schema["description"]))
            yield ""
        fields = _object(schema.get("properties", {}))
        if not fields:
            yield f"Type: {self.type(schema)}"
            return
        required = _list(schema.get("required", []))
        rows = (
            (
                _code(name),
                self.type(_object(field)),
                "required" if name in required else _default(_object(field)),
                _cell(str(_object(field).get("description", ""))),
            )
            for name, field in fields.items()
        )
        yield from _table(("field", "type", "default", "meaning"), rows)

    def type(self, schema: Json) -> str:
        """A short name of the type, with links to the schemas that it refers to."""
        if "$ref" in schema:
            name = str(schema["$ref"]).removeprefix(_SCHEMAS)
            return f"[{name}](#{name.lower()})"
        if "enum" in schema:
            return " or ".join(_code(_json(value)) for value in _list(schema["enum"]))
        if "const" in schema:
            return _code(_json(schema["const"]))
        if several := _list(schema.get("anyOf", schema.get("oneOf", []))):
            return " or ".join(dict.fromkeys(self.type(_object(one)) for one in several))
        match schema.get("type"):
            case "array":
                if isinstance(places := schema.get("prefixItems"), list):  # a tuple: one type for each element
                    inner = " and ".join(self.type(_object(one)) for one in places)
                else:
                    inner = self.type(_object(schema.get("items", {})))
                return f"list of ({inner})" if " or " in inner or " and " in inner else f"list of {inner}"
            case "object" if isinstance(values := schema.get("additionalProperties"), dict) and values:
                return f"object of {self.type(values)}"
            case "object" if "data" in (fields := _object(schema.get("properties", {}))):  # one server-sent event
                return f"`data` of each event: {self.type(_object(_object(fields['data'])['contentSchema']))}"
            case None:
                return "anything"
            case kind:
                bounds = [
                    f"{sign} {schema[key]}"
                    for key, sign in (
                        ("minimum", "≥"),
                        ("maximum", "≤"),
                        ("exclusiveMinimum", ">"),
                        ("exclusiveMaximum", "<"),
                        ("minLength", "length ≥"),
                        ("maxLength", "length ≤"),
                    )
                    if key in schema
                ]
                return f"{kind} ({', '.join(bounds)})" if bounds else str(kind)


def _default(field: Json) -> str:
    return _code(_json(field["default"])) if "default" in field else ""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _object(value: object) -> Json:
    assert isinstance(value, dict), value
    return value


def _list(value: object) -> list[object]:
    assert isinstance(value, list), value
    return value


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def engine_metrics() -> list[Metric]:
    """Every metric family of a server, as if it had two engines and several models."""
    classes = {"chat": LatencyClass(ttft_ms=500, itl_ms=50)}
    gateway = Gateway(lambda message: None, lambda message: None, latency_classes=classes)
    nothing = Histogram(SECONDS).report()
    groups = (GroupSnapshot("full", 0, 0, 0, 0),)
    core = Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, tiers=(TierSnapshot("host", 0, 0, 0, 0, 0, 0),))
    core = replace(
        core,
        groups=groups,
        failed_kernels=("rms_norm",),
        stages=(StageSnapshot(StageSeconds(4.0, 2.0, 1.0, 0.5), 3.0),),
    )
    core = replace(core, expert_tokens=(0,), rank_sent_bytes=(0,), expert_imbalance={0: 1.0})
    process = ProcessUsage(1.0, 1)
    worker = WorkerUsage(0, process, {}, 1.0, "measured", dict.fromkeys(GPU_METRICS, 0.0), 1)
    core = replace(core, workers=(WorkerSnapshot(worker, {"weights": 0}),))
    gateway.late_beats = {"m": 0}
    gateway.handle([core, Pulse("core", nothing, usage=process)])
    engine = config().engine
    engine = replace(engine, model=replace(engine.model, adapter="lora"))  # whose metrics are listed as well
    residence = Residence(lambda is_open, keep_alive_s: None)
    return list(text_string_to_metric_families(Metrics(gateway, engine, residence=residence).render().decode()))


def router_metrics() -> list[Metric]:
    """Every metric family of a router, without those of its engines."""

    async def page() -> bytes:
        fleet, relay, edge = Fleet(["http://127.0.0.1:8000"]), RelayStats(), Stats()
        relay.requests["200"] += 1
        try:
            return render(fleet, relay, edge, num_open=0)
        finally:
            await fleet.stop()

    return list(text_string_to_metric_families(asyncio.run(page()).decode()))


def full_name(family: Metric) -> str:
    """The name in /metrics; the parser removes `_total`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics() -> str:
    """The page of all metrics of servers and routers."""
    lines = [
        "# Metrics",
        "",
        "What `/metrics` shows. [Metrics, logs and traces](../metrics.md) says how they are counted and used. Under",
        "`--metrics-prefix vllm` the names of an engine's metrics begin with `vllm:`, and some have vLLM's old name,",
        "too.",
        "",
        "## Of a server",
        "",
        "The label `engine` exists only with `--data-parallel-size`.",
        "",
        *_families(engine_metrics()),
        "",
        "## Of a router",
        "",
        "[Several engines](../routing.md) says what a router does. Its page has the metrics of its engines as well,",
        "each with the label `engine`.",
        "",
        *_families(router_metrics()),
    ]
    return "\n".join([*lines, ""])


def _families(families: Iterable[Metric]) -> Iterator[str]:
    def row(family: Metric) -> Sequence[str]:
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        return _code(full_name(family)), family.type, ", ".join(map(_code, sorted(labels))), _cell(family.documentation)

    yield from _table(("metric", "type", "labels", "meaning"), map(row, families))


# ── messages between processes ───────────────────────────────────────────────────────────────────────────────────────


def structs() -> list[type[msgspec.Struct]]:
    """Every message that a mailbox accepts, then every struct that is used in a field, but for the configurations."""
    ways = (*topology.EDGES.values(), *topology.FROM_SUPERVISOR.values(), topology.TO_SUPERVISOR)
    sent = dict.fromkeys(kind for kinds in (*ways, topology.FROM_CLIENT, topology.TO_CLIENT) for kind in kinds)
    found: dict[type, None] = {}

    def walk(kind: types.Type) -> None:
        if isinstance(kind, types.StructType):
            if kind.cls in found or kind.cls in (EngineConfig, HttpConfig):
                return
            found[kind.cls] = None
            for field in kind.fields:
                walk(field.type)
        for name in ("types", "item_types"):
            for inner in getattr(kind, name, ()):
                walk(inner)
        for name in ("item_type", "key_type", "value_type", "type"):
            if isinstance(inner := getattr(kind, name, None), types.Type):
                walk(inner)

    for kind in sent:
        walk(types.type_info(kind))
    return sorted(found, key=lambda kind: kind not in sent)


def messages() -> str:
    """The page of the messages: their senders, receivers and fields."""
    lines = [
        "# Messages between processes",
        "",
        "The messages that processes send each other, and the structs inside them. All are msgpack arrays: a message",
        "begins with its name, and the fields follow in this order. [The protocol](../ipc-protocol.md) explains the",
        "encoding and the messages of clients; [the architecture](../architecture.md) explains the processes.",
        "",
        "## Who sends what",
        "",
    ]
    ways = [*((pair, kinds) for pair, kinds in topology.EDGES.items())]
    ways += [(("supervisor", name), kinds) for name, kinds in topology.FROM_SUPERVISOR.items()]
    ways += [(("every process", "supervisor"), topology.TO_SUPERVISOR)]
    ways += [(("EngineClient", "core"), topology.FROM_CLIENT), (("core", "EngineClient"), topology.TO_CLIENT)]
    rows = ((a, b, ", ".join(f"[{k.__name__}](#{k.__name__.lower()})" for k in kinds)) for (a, b), kinds in ways)
    lines += _table(("from", "to", "messages"), rows)
    lines += ["", "## What they hold"]
    for kind in structs():
        lines += ["", f"### {kind.__name__}", "", *_block(inspect.getdoc(kind) or "")]
        if kind.__struct_fields__:
            lines += ["", *_table(("field", "type", "default", "meaning"), fields(kind))]
    return "\n".join([*lines, ""])


def fields(struct: type[msgspec.Struct]) -> list[Sequence[str]]:
    """Name, type, default and comment of each field, as the source has them: comments hold units and shapes."""
    source = textwrap.dedent(inspect.getsource(struct))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    code = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, Sequence[str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        said = [comments[line] for line in range(first, last + 1) if line in comments]
        while first > 1 and code[first - 2].lstrip().startswith("#"):  # above the field
            first -= 1
            said.insert(0, comments[first])
        name = ast.unparse(node.target)
        default = "" if node.value is None else _code(ast.unparse(node.value))
        found[name] = (_code(name), _code(ast.unparse(node.annotation)), default, _cell(" ".join(said)))
    assert tuple(found) == struct.__struct_fields__, f"{struct.__name__} inherits fields"
    return list(found.values())


# ── Markdown ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return _text(" ".join(text.split())).replace("|", "\\|")


def _text(text: str) -> str:
    """Escapes Markdown, except for code between backquotes."""
    parts = text.split("`")
    return "`".join(re.sub(r"([*_<\[])", r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts))


def _block(text: str) -> Iterator[str]:
    for line in inspect.cleandoc(text).splitlines():
        yield _text(line)

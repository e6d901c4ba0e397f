"""The generated reference pages are complete. The tests list flags, endpoints, metrics and messages in another way than
the generator does, so that they notice what it misses."""

import re
import subprocess
import sys
from types import ModuleType

import msgspec
import pytest
from harness import FakeEngine, request
from metrics_page import families, page
from msgspec.structs import fields as struct_fields

from pagewire.config.config import Config
from pagewire.ipc import client_messages, messages, reports
from pagewire.tools import reference

FLAG = re.compile(r"^ +(-[-\w]+)", re.MULTILINE)
ROW = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)


def section(text: str, title: str) -> str:
    """The text under a heading, up to the next heading of the same or a higher level."""
    level = title.partition(" ")[0]
    found = re.search(rf"^{re.escape(title)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def help_of(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "pagewire", *command, "--help"], capture_output=True, text=True, check=True
    )
    return result.stdout


def test_every_command_and_every_flag_is_listed() -> None:
    text = reference.flags()
    names = re.findall(r"^    ([a-z-]+)(?: |$)", help_of(), re.MULTILINE)
    assert len(names) == 11 and re.findall("^## pagewire (.+)$", text, re.MULTILINE) == names
    for name in names:
        listed = set(re.findall("`(-[-a-z0-9]+)`", section(text, f"## pagewire {name}")))
        assert set(FLAG.findall(help_of(name))) - {"-h"} <= listed, name


def test_flags_are_listed_with_defaults_and_help() -> None:
    rows = {}
    for line in section(reference.flags(), "## pagewire serve").splitlines():
        if line.startswith("| `"):
            names, value, default, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            rows[names.partition(",")[0].strip("`").removeprefix("--").replace("-", "_")] = value, default, meaning
    assert rows["port"] == ("`N`", "8000", "port to listen on; 0: any free one")
    for section_field in struct_fields(Config):
        for field in struct_fields(section_field.type):
            if field.name != "model":
                _, default, meaning = rows[field.name]
                assert meaning
                if field.default not in (None, "", ()):
                    shown = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
                    assert default == shown, field.name


def test_every_endpoint_and_every_field_is_listed() -> None:
    text = reference.http()
    described = request(FakeEngine(), "/openapi.json", enable_sleep_mode=True).json
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            part = section(text, f"### {method.upper()} {path}")
            assert operation["summary"] in part
            assert {parameter["name"] for parameter in operation.get("parameters", [])} <= set(ROW.findall(part))
    for name, schema in described["components"]["schemas"].items():
        assert ROW.findall(section(text, f"### {name}")) == list(schema["properties"]), name
    assert "### POST /admin/models\n" in text


def test_links_of_the_endpoints_lead_to_headings() -> None:
    text = reference.http()
    headings = {name.lower() for name in re.findall("^### (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_every_metric_is_listed_with_its_labels() -> None:
    text = section(reference.metrics(), "## Of a server")
    rows = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            name, kind, labels, meaning = (cell.strip() for cell in line.split("|")[1:-1])
            rows[name.strip("`")] = kind, set(re.findall(r"`(\w+)`", labels)), meaning
    shown = {
        reference.full_name(family): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in families(page(num_engines=2)).values()
    }
    assert {name: (kind, labels) for name, (kind, labels, _) in rows.items()} == shown
    assert all(meaning.endswith(".") for _, _, meaning in rows.values())


def tagged(module: ModuleType) -> set[type[msgspec.Struct]]:
    """The messages that a module defines."""
    structs = (
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)
    )
    return {kind for kind in structs if kind.__module__ == module.__name__ and kind.__struct_config__.tag}


@pytest.mark.parametrize("module", [client_messages, messages, reports])
def test_every_message_is_listed_with_its_fields_in_order(module: ModuleType) -> None:
    text = section(reference.messages(), "## What they hold")
    for kind in tagged(module):
        part = section(text, f"### {kind.__name__}")
        assert tuple(ROW.findall(part)) == kind.__struct_fields__, kind


def test_fields_are_listed_with_units_shapes_and_defaults() -> None:
    fields = {name: (kind, default, meaning) for name, kind, default, meaning in reference.fields(messages.StepPlan)}
    assert fields["`rows`"] == ("`bytes`", "", "int32, each row at most once")
    assert fields["`break_even`"][:2] == ("`float`", "`0.5`")
    assert "int32, usually one" in next(m for n, _, _, m in reference.fields(messages.Tokens) if n == "`ids`")


def test_inherited_fields_raise_instead_of_being_omitted() -> None:
    class Child(messages.Cancel, frozen=True):
        more: int = 0

    with pytest.raises(AssertionError, match="inherits"):
        reference.fields(Child)

"""The alerts of deploy/chart/prometheus-rules.yaml and the queries of the Grafana dashboard: they parse, name metrics
and labels that a server has, and fire when they should. Prometheus' own `promtool` decides the latter; the tests that
need it are skipped without it (`apt-get install prometheus`), as is Grafana's schema (`make test-deploy`)."""

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

from pagewire.tools.reference import engine_metrics

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy/chart/prometheus-rules.yaml"
UNIT_TESTS = ROOT / "tests/alerts/unit_tests.yaml"
DASHBOARD = ROOT / "docs/grafana.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
OF_TARGETS = {"job", "instance"}  # labels that Prometheus adds
VARIABLES = {"${prefix}": "pagewire", "$model": "m", "$__rate_interval": "5m"}  # of the dashboard


def loaded(path: Path) -> Any:
    yaml: Any = importlib.import_module("yaml")  # has no type stubs
    return yaml.safe_load(path.read_text())


@cache
def labels_of() -> dict[str, set[str]]:
    """Sample → its labels, of everything that a server can have."""
    found: dict[str, set[str]] = {"up": set(OF_TARGETS)}
    for family in engine_metrics():
        for sample in family.samples:
            found.setdefault(sample.name, set(OF_TARGETS)).update(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in loaded(RULES)["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    """Of the dashboard, with values for its variables."""
    found = [t["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def parts(node: Any) -> Iterator[Any]:
    """An expression and everything in it."""
    yield node
    inner = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    for part in (*inner, *(getattr(node, "args", None) or ())):
        if part is not None:
            yield from parts(part)


def named_labels(node: Any) -> set[str]:
    """The labels by which this expression aggregates or matches."""
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql.AggregateExpr):
        return set() if modifier is None else set(modifier.labels)
    matching = getattr(modifier, "matching", None)
    return set() if matching is None else set(matching.labels)


def check(query: str) -> None:
    """It parses, and its metrics have the labels that it names."""
    everything = list(parts(promql.parse(query)))
    selectors = [part for part in everything if isinstance(part, promql.VectorSelector)]
    assert selectors, query
    for selector in selectors:
        assert selector.name is not None and selector.name in labels_of(), f"{selector.name} in {query}"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= labels_of()[selector.name], (selector.name, asked)
    for part in everything:
        inside = [x.name for x in parts(part) if isinstance(x, promql.VectorSelector) and x.name is not None]
        for name in inside:
            assert named_labels(part) - {"le"} <= labels_of()[name], (name, named_labels(part), query)


def test_a_query_that_names_nothing_is_found() -> None:
    for wrong in (
        "sum(rate(pagewire:no_such_metric_total[5m]))",
        'pagewire:kv_cache_usage_perc{colour="red"}',
        "sum by (process) (pagewire:kv_cache_usage_perc)",
        "up and on (process) pagewire:kv_cache_usage_perc",
    ):
        with pytest.raises(AssertionError):
            check(wrong)
    with pytest.raises(ValueError):
        check("sum(rate(pagewire:generation_tokens_total[5m])")


def test_alerts_name_metrics_and_labels_that_exist() -> None:
    for rule in rules():
        check(rule["expr"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"], rule
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 10 and all(name.startswith("Pagewire") for name in names)


def test_the_dashboard_names_metrics_and_labels_that_exist() -> None:
    assert len(queries()) > 80
    for query in queries():
        check(query)


def test_the_operations_document_says_what_to_do_about_each_alert() -> None:
    table = (ROOT / "docs/operations.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(Pagewire\w+)` \|", table, re.MULTILINE) == [rule["alert"] for rule in rules()]


def test_each_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    fires, rests = set[str](), set[str]()
    for case in loaded(UNIT_TESTS)["tests"]:
        for test in case["alert_rule_test"]:
            (fires if test.get("exp_alerts") else rests).add(test["alertname"])
    assert fires == rests == {rule["alert"] for rule in rules()}


@needs_promtool
def test_prometheus_evaluates_the_alerts_as_expected(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    for path in (RULES, UNIT_TESTS):
        shutil.copy(path, tmp_path)
    for command in (("check", "rules", RULES.name), ("test", "rules", UNIT_TESTS.name)):
        run = subprocess.run([PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert not run.returncode, run.stdout + run.stderr


# What Grafana's schema of 11.6 lacks and its page for variables writes.
NOT_IN_THE_SCHEMA = {"templating.list.2.definition"}


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The places where a document is not the same any more."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            at = f"{path}.{key}".lstrip(".")
            yield from lost(value, after[key], at) if key in after else (at,)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}.{i}")
    elif before != after:
        yield path


def test_grafanas_schema_has_every_field_of_the_dashboard() -> None:
    """Grafana's types, which it generates from its schema, read the dashboard and write it again without a loss."""
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's schema is not installed: make test-deploy")
    schema, encoder, plugins = (
        importlib.import_module(f"grafana_foundation_sdk.{name}")
        for name in ("models.dashboard", "cog.encoder", "cog.plugins")
    )
    plugins.register_default_plugins()
    found = json.loads(DASHBOARD.read_text())
    again = json.loads(encoder.JSONEncoder().encode(schema.Dashboard.from_json(found)))
    assert set(lost(found, again)) == NOT_IN_THE_SCHEMA
    found["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    wrong = json.loads(encoder.JSONEncoder().encode(schema.Dashboard.from_json(found)))
    assert set(lost(found, wrong)) - NOT_IN_THE_SCHEMA == {"panels.1.fieldConfig.defaults.unti"}

"""What a router's /metrics says, and that Prometheus can read it."""

from harness import FakeEngine, request
from prometheus_client.parser import text_string_to_metric_families

from pagewire.route.metrics import together

from .routed import Behind, Routed


def test_the_page_is_prometheus_and_the_docs_have_every_name() -> None:
    with Behind(FakeEngine(["Hi"])) as engine, Routed(engine) as router:
        assert router.complete().status == 200 and router.complete(max_tokens=-1).status == 400
        families = {f.name: f for f in text_string_to_metric_families(router.ask("/metrics").body.decode())}
        docs = router_metrics_in_the_docs()
    assert {name.removeprefix("pagewire_router_") for name in families} == docs
    answered = {s.labels["status"]: s.value for s in families["pagewire_router_requests"].samples}
    assert answered == {"200": 1.0, "400": 1.0}
    assert families["pagewire_router_engine_requests"].samples[0].labels == {"engine": engine.address}


def router_metrics_in_the_docs() -> set[str]:
    import re
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "routing.md").read_text().partition("## Metrics")[2]
    names = re.findall(r"`([a-z_]+)(?:\{[a-z]+\})?`", text)
    reasons = {"no_engine", "fruitless", "broken_off", "pagewire_router_"}
    return {name.removesuffix("_total") for name in names if name not in reasons}


def test_pages_of_several_engines_become_one() -> None:
    page = request(FakeEngine(["Hi"]), "/metrics").body.decode()
    both = list(text_string_to_metric_families(together({"unix:/a": page, "unix:/b": page}).decode()))
    alone = list(text_string_to_metric_families(page))
    assert [family.name for family in both] == [family.name for family in alone]
    for one, two in zip(alone, both, strict=True):
        assert len(two.samples) == 2 * len(one.samples)
        assert {sample.labels["engine"] for sample in two.samples} == {"unix:/a", "unix:/b"} or not one.samples

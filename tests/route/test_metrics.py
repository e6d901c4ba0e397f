"""A router's /metrics: Prometheus parses it, and the reference lists its names."""

from harness import FakeEngine, request
from prometheus_client.parser import text_string_to_metric_families

from pagewire.route.metrics import merge_pages
from pagewire.tools import reference

from .routed import Behind, Routed


def test_prometheus_parses_the_page_and_the_reference_has_every_name() -> None:
    with Behind(FakeEngine(["Hi"])) as engine, Routed(engine) as router:
        assert router.complete().status == 200 and router.complete(max_tokens=-1).status == 400
        families = {f.name: f for f in text_string_to_metric_families(router.ask("/metrics").body.decode())}
    assert set(families) == {family.name for family in reference.router_metrics()}
    answered = {s.labels["status"]: s.value for s in families["pagewire_router_requests"].samples}
    assert answered == {"200": 1.0, "400": 1.0}
    assert families["pagewire_router_engine_requests"].samples[0].labels == {"engine": engine.address}


def test_pages_of_several_engines_become_one() -> None:
    page = request(FakeEngine(["Hi"]), "/metrics").body.decode()
    both = list(text_string_to_metric_families(merge_pages({"unix:/a": page, "unix:/b": page}).decode()))
    alone = list(text_string_to_metric_families(page))
    assert [family.name for family in both] == [family.name for family in alone]
    for one, two in zip(alone, both, strict=True):
        assert len(two.samples) == 2 * len(one.samples)
        assert {sample.labels["engine"] for sample in two.samples} == {"unix:/a", "unix:/b"} or not one.samples

"""Which engines get a request for a model; `test_choice.py` has the choice among them."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from msgspec import Struct

from pagewire.api.engines.presence import Presence, best_for

LOADED, FITS, UNLOADED, FAILED = Presence


class Host(Struct):
    name: str
    models: Mapping[str, Presence]
    load: int = 0


def best(hosts: list[Host], *, busy: tuple[str, ...] = ()) -> list[str]:
    return [host.name for host in best_for("m", hosts, lambda host: host.name not in busy)]


@pytest.mark.parametrize("worse", [FITS, UNLOADED, FAILED])
def test_the_engines_that_have_it_are_the_only_ones(worse: Presence) -> None:
    hosts = [Host("a", {"m": worse}), Host("b", {"m": LOADED}), Host("c", {"m": LOADED}), Host("d", {"n": LOADED})]
    assert best(hosts) == best(hosts, busy=("b",)) == ["b", "c"]


def test_if_they_are_busy_another_one_loads_it_unless_a_model_would_have_to_go() -> None:
    loaded, room = Host("a", {"m": LOADED}), Host("b", {"m": FITS})
    assert best([loaded, room], busy=("a",)) == ["b"]
    for worse in (UNLOADED, FAILED):
        assert best([loaded, Host("b", {"m": worse})], busy=("a",)) == ["a"]


def test_of_those_with_room_the_one_with_the_fewest_models_loads_it() -> None:
    assert best([Host("a", {"m": FITS, "n": LOADED}), Host("b", {"m": FITS, "n": FITS})]) == ["b"]


def test_a_model_goes_where_nobody_works_and_not_where_it_failed() -> None:
    hosts = [Host("a", {"m": UNLOADED}, load=1), Host("b", {"m": UNLOADED}), Host("c", {"m": FAILED})]
    assert best(hosts) == ["b"]
    assert best(hosts[2:]) == ["c"], "it says why"
    assert best([Host("d", {"n": LOADED})]) == best([]) == []


def test_an_engine_that_says_nothing_of_models_counts_as_one_that_has_it() -> None:
    hosts = [Host("a", {}), Host("b", {"m": LOADED}), Host("c", {"m": FITS})]
    assert best(hosts) == ["a", "b"]


def test_routers_agree_on_one_engine_and_models_are_spread() -> None:
    hosts = [Host(f"http://e{i}", {f"m{j}": UNLOADED for j in range(300)}) for i in range(3)]
    found: Counter[str] = Counter()
    for j in range(300):
        shuffled = random.Random(j).sample(hosts, 3)
        (one,), (other,) = (best_for(f"m{j}", some, lambda host: True) for some in (hosts, shuffled))
        assert one is other
        found[one.name] += 1
    assert min(found.values()) > 60

"""The options behind a connector's name in `--kv-connector`."""

from collections.abc import Callable

import pytest

from pagewire.engine.kv_connector.options import check_names, eviction_of, num_blocks_of, size_of
from pagewire.errors import ConfigError


def test_valid_options() -> None:
    check_names("disk", {"path": "/x", "size": "4G"}, required=["path", "size"], optional=["eviction"])
    assert size_of("host", {"size": "4K"}) == 4096 and num_blocks_of("host", 4096, 1000) == 4
    assert len(eviction_of("host", {"eviction": "lru"})) == len(eviction_of("host", {})) == 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: check_names("host", {"sise": "1"}, required=["size"]), "has no option 'sise'; it has size"),
        (lambda: check_names("host", {}, required=["size"]), "needs size=…, such as host,size=4G"),
        (lambda: check_names("disk", {"path": ""}, required=["path"]), "needs path=…"),
        (lambda: size_of("host", {"size": "much"}), "--kv-connector host,size=much: "),
        (lambda: size_of("host", {"size": "0"}), "it must be more than 0"),
        (lambda: eviction_of("host", {"eviction": "oldest"}), "eviction=oldest: it must be one of lru"),
        (lambda: num_blocks_of("host", 999, 1000), "one block of this model takes 1000 bytes"),
    ],
)
def test_an_invalid_option_gives_a_one_sentence_error(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()

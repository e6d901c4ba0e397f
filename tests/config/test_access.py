"""Access to the server: the key file, rates, origins and certificates, valid and invalid."""

from pathlib import Path

import pytest

from pagewire.config.access import ApiKey, check_key_classes, read_key_file
from pagewire.config.config import HttpConfig
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve_http
from pagewire.errors import ConfigError


def decide(*file_keys: ApiKey, **settings: object) -> HttpConfig:
    return resolve_http(make_config(**settings), file_keys, ())


def test_a_key_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\n\nsk-a\n  sk-b   tokens_per_minute=5 requests_per_minute=7\n#sk-c\nsk#d\n")
    assert read_key_file(file) == (ApiKey("sk-a"), ApiKey("sk-b", 7, 5), ApiKey("sk#d"))


def test_a_key_has_latency_classes_and_a_bound_of_its_priority(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a latency_classes=chat,batch min_priority=-1\nsk-b latency_classes=batch\n")
    keys = read_key_file(file)
    assert keys == (ApiKey("sk-a", None, None, ("chat", "batch"), -1), ApiKey("sk-b", latency_classes=("batch",)))
    assert decide(*keys, tokens_per_minute=9).api_keys[0] == ApiKey("sk-a", None, 9, ("chat", "batch"), -1)
    check_key_classes(keys, ("default", "chat", "batch"))
    with pytest.raises(ConfigError, match="'batch' is none of --latency-classes"):
        check_key_classes(keys, ("default", "chat"))


@pytest.mark.parametrize(
    "line", ["sk-secret 5", "sk-secret rpm=5", "sk-secret requests_per_minute=", "sk-secret tokens_per_minute=0"]
)
def test_an_invalid_line_is_named_without_its_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sk-a\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: after the key there may be") as wrong:
        read_key_file(file)
    assert "secret" not in str(wrong.value)


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"# none\n", "holds no key"), (b"\xff", "not UTF-8"), (None, "No such file")]
)
def test_an_unusable_key_file_is_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file .*{sentence}"):
        read_key_file(file)


def test_general_rates_are_for_keys_without_their_own() -> None:
    http = decide(ApiKey("b", 7), ApiKey("c", None, 8), api_key=("a",), requests_per_minute=1, tokens_per_minute=2)
    assert http.api_keys == (ApiKey("a", 1, 2), ApiKey("b", 7, 2), ApiKey("c", 1, 8))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"api_key": ("",)}, "An API key must be printable ASCII"),
        ({"api_key": ("a b",)}, "An API key must be printable ASCII"),
        ({"api_key": ("é",)}, "An API key must be printable ASCII"),
        ({"api_key": ("a", "a")}, "An API key is given twice"),
        ({"ssl_keyfile": "k"}, "TLS needs a certificate"),
        ({"ssl_cert_reqs": 2}, "TLS needs a certificate"),
        ({"ssl_certfile": "c", "ssl_ca_certs": "a"}, "give both or neither"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 1}, "give both or neither"),
        ({"allowed_origins": ("example.com",)}, "--allowed-origins example.com is not an origin"),
        ({"allowed_origins": ("https://a/b",)}, "--allowed-origins https://a/b is not an origin"),
        ({"root_path": "llm"}, "--root-path llm must begin with a slash"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        decide(**settings)


def test_valid_settings_are_accepted() -> None:
    http = decide(ssl_certfile="c", ssl_ca_certs="a", ssl_cert_reqs=1, allowed_origins=("*", "http://localhost:3000"))
    assert http.listen.ssl_certfile == "c" and len(http.clients.allowed_origins) == 2
    assert [decide(root_path=path).listen.root_path for path in ("", "/", "/a/b/")] == ["", "", "/a/b"]

"""TLS and Unix sockets, with common clients and with pagewire's own commands."""

import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from certificates import make_certificate, needs_openssl
from served import Served

from pagewire import cli
from pagewire.api.http.tls import tls_context
from pagewire.config.config import ListenOptions
from pagewire.errors import ConfigError


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificate(folder, "authority")
    make_certificate(folder, "server", "authority")
    make_certificate(folder, "client", "authority")
    (folder / "nonsense.pem").write_text("nonsense")
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", "server.key", "-out", "locked.key"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


def tls(folder: Path) -> dict[str, Any]:
    return {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key")}


@needs_openssl
def test_tls(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = str(certificates / "authority.pem")
    trust = ssl.create_default_context(cafile=authority)
    with Served(**tls(certificates), api_keys=("key",)) as served, httpx.Client(verify=trust) as http:
        url = served.url.replace("http:", "https:")
        with openai.OpenAI(base_url=url, api_key="key", max_retries=0, http_client=cast(Any, http)) as client:
            with client.completions.create(model="demo", prompt="x", stream=True) as stream:
                assert "".join(chunk.choices[0].text for chunk in stream) == "Hello 🙂"
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="other").models.list()
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/models")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{served.url}/models")
        assert cli.main(["complete", "x", "--url", url, "--api-key", "key", "--cacert", authority]) == 0
        assert capsys.readouterr().out == "Hello 🙂\n"
        assert cli.main(["complete", "x", "--url", url, "--api-key", "key"]) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
        assert cli.main(["complete", "x", "--url", url, "--cacert", "/nowhere"]) == 1
        assert "--cacert /nowhere cannot be used: No such file" in capsys.readouterr().err


@needs_openssl
def test_client_certificates(certificates: Path) -> None:
    authority = str(certificates / "authority.pem")
    trust = ssl.create_default_context(cafile=authority)
    known = ssl.create_default_context(cafile=authority)
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    for required in (1, 2):
        with Served(**tls(certificates), ssl_ca_certs=authority, ssl_cert_reqs=required) as served:
            url = served.url.replace("http:", "https:") + "/models"
            with httpx.Client(verify=known) as client:
                assert client.get(url).status_code == 200
            with httpx.Client(verify=trust) as client:
                if required == 2:
                    with pytest.raises(httpx.TransportError):
                        client.get(url)
                else:
                    assert client.get(url).status_code == 200


@needs_openssl
@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"ssl_certfile": "nowhere.pem"}, "nowhere.pem cannot be used: No such file or directory."),
        ({"ssl_certfile": "nonsense.pem"}, "nonsense.pem cannot be used: "),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "client.key"}, "cannot be used: key values mismatch."),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key"}, "the private key is encrypted"),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "nonsense.pem"},
            "--ssl-ca-certs .*nonsense.pem cannot be used: ",
        ),
    ],
)
def test_unusable_files_are_refused(certificates: Path, files: dict[str, str], sentence: str) -> None:
    paths: dict[str, Any] = {name: str(certificates / file) for name, file in files.items()}
    with pytest.raises(ConfigError, match=sentence):
        tls_context(ListenOptions(**paths, ssl_cert_reqs=2))


def test_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)  # the paths of Unix sockets are short
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("s")
    with (
        Served(listener, uds="s", root_path="/llm") as served,
        httpx.Client(transport=httpx.HTTPTransport(uds="s")) as http,
        openai.OpenAI(
            base_url="http://localhost/llm/v1", api_key="any", max_retries=0, http_client=cast(Any, http)
        ) as client,
    ):
        assert client.completions.create(model="demo", prompt="x").choices[0].text == "Hello 🙂"
        assert cli.main(["complete", "x", "--url", "unix:s"]) == 0
        assert capsys.readouterr().out == "Hello 🙂\n"
        assert served.engine.gateway.num_open == 0
    assert cli.main(["complete", "x", "--url", "unix:nowhere"]) == 1
    assert "No server answers at unix:nowhere" in capsys.readouterr().err


def test_a_server_below_a_root_path(capsys: pytest.CaptureFixture[str]) -> None:
    with Served(root_path="/llm") as served:
        for path in ("/llm", "/llm/v1", ""):
            assert cli.main(["complete", "x", "--url", f"http://127.0.0.1:{served.port}{path}"]) == 0
        assert capsys.readouterr().out == "Hello 🙂\n" * 3

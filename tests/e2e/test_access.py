"""Network access to a real server: a Unix socket with a file of API keys, and TLS on a port."""

import os
import shlex
import shutil
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from waiting import until

from pagewire.tools.servers import START_TIMEOUT_S, Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, because the path of a Unix socket is limited to about 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="pw-"))
    yield folder
    shutil.rmtree(folder)


def wait_ready(server: Server) -> None:
    def is_ready() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        return "listening on" in server.log.read_text()

    until(is_ready, "the server is ready", START_TIMEOUT_S)


def test_a_unix_socket_serves_with_rate_limits_per_api_key(start: Callable[..., Server], short_folder: Path) -> None:
    """The socket file has mode 0600, is removed at the end, and does not prevent a start after a SIGKILL."""
    file, keys = short_folder / "s", short_folder / "keys"
    keys.write_text("# who may\nsk-small requests_per_minute=2\nsk-large\n")
    flags = ("--uds", str(file), "--api-key-file", str(keys), "--tokens-per-minute", "5000", "--root-path", "/llm")
    for is_last in (False, True):
        server = start(*flags)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(file)), base_url="http://localhost") as http:
            wait_ready(server)
            assert file.stat().st_mode & 0o777 == 0o600
            client = openai.OpenAI(
                base_url="http://localhost/llm/v1",
                api_key="sk-small",
                max_retries=0,
                http_client=http,  # type: ignore[arg-type]  # httpx clients work, too
            )
            ask = client.completions.with_raw_response.create
            first, second = (ask(model="pagewire-demo", prompt="Count", max_tokens=5) for _ in range(2))
            assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second)] == ["1", "0"]
            assert first.headers["x-ratelimit-limit-tokens"] == "5000"
            with pytest.raises(openai.RateLimitError):
                ask(model="pagewire-demo", prompt="Count", max_tokens=5)
            other = client.with_options(api_key="sk-large").completions.with_raw_response
            large = other.create(model="pagewire-demo", prompt="Count", max_tokens=5)
            assert "x-ratelimit-limit-requests" not in large.headers
            assert large.headers["x-ratelimit-limit-tokens"] == "5000"
        if is_last:
            assert server.stop() == 0
        else:  # leaves the socket file, which must not prevent the next start
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(60)
        assert file.exists() != is_last
        log = server.log.read_text()
        assert "POST /llm/v1/completions 429" in log and "sk-" not in log and "Count from" in log


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls_works_and_a_missing_certificate_ends_the_start(start: Callable[..., Server], short_folder: Path) -> None:
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
            "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
        ),
        cwd=short_folder,
        check=True,
        capture_output=True,
    )
    certificate = str(short_folder / "cert.pem")
    server = start("--ssl-certfile", certificate, "--ssl-keyfile", str(short_folder / "key.pem"))
    url = f"https://127.0.0.1:{server.port}"
    with httpx.Client(verify=ssl.create_default_context(cafile=certificate), base_url=url) as http:
        wait_ready(server)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http)  # type: ignore[arg-type]  # httpx clients work, too
        with client.completions.create(model="pagewire-demo", prompt="Count", max_tokens=5, stream=True) as stream:
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert f"listening on {url}" in server.log.read_text()
    assert server.stop() == 0
    os.remove(certificate)
    again = start("--ssl-certfile", certificate)
    assert again.process.wait(60) == 2
    assert "cert.pem cannot be used: No such file or directory." in again.log.read_text()

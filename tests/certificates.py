"""Certificates for tests of TLS, made with openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def make_certificate(folder: Path, name: str, signer: str | None = None) -> None:
    """Write {name}.pem and {name}.key; without a signer the certificate is self-signed."""
    by = f"-CA {signer}.pem -CAkey {signer}.key" if signer is not None else ""
    names = "-addext subjectAltName=IP:127.0.0.1,DNS:localhost" if signer is not None else ""
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} "
        f"-keyout {name}.key -out {name}.pem {names} {by}".split(),
        cwd=folder,
        check=True,
        capture_output=True,
    )

"""The server's side of TLS, from the operator's files."""

import ssl

from ...config.config import ListenOptions
from ...errors import ConfigError


def tls_context(options: ListenOptions) -> ssl.SSLContext | None:
    """None without a certificate. Raises ConfigError, which names the file that cannot be used."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 or newer
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError, too
        files = ", ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {_reason(error)}.") from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {options.ssl_ca_certs} cannot be used: {_reason(error)}.") from error
        context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted; use one without a password")


def _reason(error: Exception) -> str:
    """OpenSSL's reasons look like KEY_VALUES_MISMATCH."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is not a PEM file of this kind").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

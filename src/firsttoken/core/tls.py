"""What a client of https trusts. One place, so that each command takes the same certificates."""

from __future__ import annotations

import ssl

from firsttoken.core.errors import ConfigError


def client_context(ca_file: str | None = None, *, verify: bool = True) -> ssl.SSLContext:
    """Trusts the system's authorities, or those of ``ca_file`` alone, or (without ``verify``) anybody; TLS 1.2 or
    newer, HTTP/1.1. Raises `ConfigError` that names ``--ca-file``."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--ca-file {ca_file}: {reason}; it must hold certificates in PEM") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

"""A certificate, made when it is needed."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A self-signed one for localhost and 127.0.0.1, and a server's context with it."""

    file: Path
    key: Path
    context: ssl.SSLContext


def make_certificate(folder: Path) -> Certificate:
    """Skips the test where there is no openssl to make it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate")
    key, file = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(file)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return Certificate(file, key, context)

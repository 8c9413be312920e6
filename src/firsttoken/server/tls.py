"""The certificate that the port answers https with, and its key."""

from __future__ import annotations

import logging
import shlex
import ssl
import stat
from pathlib import Path

from firsttoken.core.errors import ConfigError
from firsttoken.server.config import ServerConfig

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # a chain of certificates takes some thousands
_CERTIFICATE, _KEY, _ENCRYPTED = "-----BEGIN CERTIFICATE-----", "PRIVATE KEY-----", "ENCRYPTED"


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the files of ``config``; None where it names none. Warns of a key that every user of the
    machine can read. Raises `ConfigError` that names the option at fault."""
    if config.ssl_certfile is None:
        return None
    certificate, key = config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile
    key_flag = "--ssl-certfile" if config.ssl_keyfile is None else "--ssl-keyfile"
    if _CERTIFICATE not in _text("--ssl-certfile", certificate):
        raise ConfigError(f"--ssl-certfile {certificate} holds no certificate in PEM (BEGIN CERTIFICATE)")
    found = _text(key_flag, key)
    if _KEY not in found:
        more = "" if config.ssl_keyfile else ": name the file that does with --ssl-keyfile"
        raise ConfigError(f"{key_flag} {key} holds no private key in PEM (BEGIN PRIVATE KEY){more}")
    if _ENCRYPTED in found:
        raise ConfigError(
            f"{key_flag} {key}: the key is encrypted, and nobody is asked for a passphrase here; write it without one, "
            "as by openssl pkey -in KEY -out PLAIN, for this server's user alone"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key_flag} {key} is not the key of the first certificate in --ssl-certfile {certificate}: "
                "the server's own comes first, then those that vouch for it"
            ) from None
        why = (error.reason or str(error)).lower().replace("_", " ")
        raise ConfigError(
            f"--ssl-certfile {certificate} with the key in {key} cannot be used ({why}): are both whole?"
        ) from None
    if Path(key).stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("%s %s can be read by every user of this machine: chmod o-rw it", key_flag, key)
    return context


def curl_trust(server: ssl.SSLContext, certfile: str, host: str) -> str:
    """What ``curl`` must be told to trust the server as ``host``: nothing where the system knows its certificate, the
    certificate's own file, or, where it does not name the host, to trust anybody. Takes milliseconds."""
    if _trusts(ssl.create_default_context(), server, host):
        return ""
    own = ssl.create_default_context(cafile=certfile)
    own.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as curl does: it need not be an authority's
    return f"--cacert {shlex.quote(certfile)}" if _trusts(own, server, host) else "-k"


def _trusts(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    """Whether a handshake between the two, in memory, ends well."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there, server_hostname=host), server.wrap_bio(there, back, server_side=True))
    for end in ends + ends[:1]:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except (ssl.SSLError, ssl.CertificateError):
            return False
    return True


def _text(flag: str, path: str) -> str:
    """What is in a file of certificates or keys. Raises `ConfigError`."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_BYTES).decode("latin-1")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}; it must be a file in PEM") from None

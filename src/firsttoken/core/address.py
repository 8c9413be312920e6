"""What is said of a server's address that cannot be right: the one that was probably meant."""

from __future__ import annotations

import re

_HOST_AND_PORT = re.compile(r"(?:[a-z0-9._-]+|\[[0-9a-f:]+\]):[0-9]{1,5}(?:/\S*)?", re.IGNORECASE)
# What OpenSSL calls the answer of a server that speaks HTTP without TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def lacks_scheme(text: str) -> bool:
    """Whether ``text`` is a host with a port, as in ``127.0.0.1:8000/v1``."""
    return _HOST_AND_PORT.fullmatch(text) is not None


def how_to_write(text: str, example: str) -> str:
    """The end of the message that refuses ``text``: the address that was meant, else how one looks."""
    return f"did you mean http://{text}?" if lacks_scheme(text) else f"write it as in {example}"


def without_tls(url: str) -> str:
    """The end of the message that ``url``, of https, is answered in plain HTTP."""
    return f"it does not speak TLS (https): try http://{url.partition('://')[2]}"


def is_without_tls(error: object) -> bool:
    """Whether ``error`` came of a TLS handshake with a server that speaks none."""
    import ssl  # commands name addresses before an engine is launched, and that must not wait for it

    return isinstance(error, ssl.SSLError) and error.reason in _NO_TLS

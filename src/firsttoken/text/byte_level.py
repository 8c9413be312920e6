"""The printable alphabet in which byte-level BPE vocabularies spell bytes (GPT-2's `bytes_to_unicode`)."""

from __future__ import annotations


def _alphabet() -> dict[int, int]:
    """Code point -> byte. Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table |= {0x100 + position: byte for position, byte in enumerate(others)}
    # A character below U+0100 that spells no byte must not slip through as itself.
    return table | {code: 0xFFFD for code in range(256) if code not in table}


_TO_BYTE = _alphabet()


def token_to_bytes(token: str) -> bytes:
    """The bytes that a byte-level ``token`` spells; an added token with other characters is plain UTF-8."""
    try:
        return token.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")

"""What makes two equal token sequences *not* share KV: the root of the prefix chain."""

from __future__ import annotations

import hashlib

import msgspec


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the tokens that KV content depends on, plus the tenant's salt.

    ``model`` is the checkpoint's fingerprint (never its alias: a reloaded alias must miss), ``kv_format`` is
    `KVFormat.key`, ``salt`` isolates tenants from each other.
    """

    model: str
    kv_format: str
    adapter: str = ""
    salt: str = ""

    def root(self) -> bytes:
        """SHA-256 over the fields, each length-prefixed so that no two identities can run together."""
        digest = hashlib.sha256(b"firsttoken/kv/1")
        for part in (self.model, self.kv_format, self.adapter, self.salt):
            raw = part.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        return digest.digest()

    def salted_root(self, salt: str) -> bytes:
        """The root of the same with another salt."""
        return msgspec.structs.replace(self, salt=salt).root()

"""The page's files: read once, sent with strict headers, not sent again to who has them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and data from this server alone, nothing inline, and nobody else's page around ours.
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src 'self'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for again each time, and answered with 304: a new version of the server shows its own page at once.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page, plain and compressed."""

    media_type: str
    body: bytes
    packed: bytes
    etag: str

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        body = path.read_bytes()
        # The time is left out, so that the same file has the same bytes everywhere.
        return cls(TYPES[path.suffix], body, gzip.compress(body, 6, mtime=0), hashlib.sha256(body).hexdigest()[:20])

    def answer(self, request: Request) -> Response:
        """200, or 304 to who has it."""
        packed = "gzip" in request.headers.get("accept-encoding", "")
        # The two forms are different bytes, so they have different names.
        etag = f'"{self.etag}{"-gzip" if packed else ""}"'
        headers = {**HEADERS, "etag": etag}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if packed:
            headers["content-encoding"] = "gzip"
        return Response(self.packed if packed else self.body, headers=headers, media_type=self.media_type)


def read_files() -> dict[str, StaticFile]:
    """All files of the page by their path below ``static/``. Reads and compresses: some milliseconds."""
    return {
        path.relative_to(FOLDER).as_posix(): StaticFile.read(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in TYPES
    }

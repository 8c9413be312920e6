"""What the text of an answer must look like."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from firsttoken.core.errors import InvalidRequest

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
# Bytes of a source; one that is larger than this says nothing that a model could follow.
MAX_SOURCE = 256 << 10


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """``source`` is a JSON schema as JSON, "" for any JSON object, a regular expression, a JSON list of the texts to
    choose from, or a grammar in llguidance's dialect of Lark. Hashable, so that what is compiled is found again.

    Only kind, type and size are checked here, what it says where it is compiled. Raises `InvalidRequest`.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"grammar: kind must be one of {', '.join(KINDS)}, got {self.kind!r}", param="grammar")
        if not isinstance(self.source, str):
            raise InvalidRequest(f"grammar: source must be a text, got {self.source!r:.80}", param="grammar")
        if (self.kind == "json_object") != (not self.source):
            need = "takes no source" if self.source else "needs a source"
            raise InvalidRequest(f"grammar: kind {self.kind} {need}", param="grammar")
        if len(self.source) > MAX_SOURCE:
            raise InvalidRequest(
                f"grammar: {len(self.source)} characters are too many, at most {MAX_SOURCE}", param="grammar"
            )

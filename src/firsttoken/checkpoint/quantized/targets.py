"""Which linears ``quantization_config`` names: in full, by patterns, by parts of names, or all.

Names and patterns come with a model from anybody. RE2 matches in time linear in the name, whatever the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.scheme import LinearScheme
from firsttoken.core.errors import CheckpointError

REGEX = "re:"
CLASS = "Linear"
_MAX_PATTERN = 1000
# A pattern is read in a tenth of a millisecond and compared in some microseconds: no load is held up for long.
_MOST_PATTERNS = 1000
_MOST_MATCHES = 500_000


class Pattern(Protocol):
    def match(self, text: str) -> object:
        """None where no beginning of ``text`` matches."""
        ...


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """``parts`` name every linear whose name they are a part of, ``patterns`` those whose name begins so."""

    names: frozenset[str] = frozenset()
    patterns: tuple[Pattern, ...] = ()
    parts: tuple[str, ...] = ()
    everything: bool = False

    @property
    def tries(self) -> int:
        """What a linear may have to be compared with."""
        return len(self.patterns) + len(self.parts)

    def rank(self, linear: str) -> int | None:
        """How specific the target is that names it, 0 most; None: none does."""
        if linear in self.names:
            return 0
        if any(pattern.match(linear) for pattern in self.patterns) or any(part in linear for part in self.parts):
            return 1
        return 2 if self.everything else None


ALL = Targets(everything=True)
HEAD = Targets(names=frozenset({"lm_head"}))


class TargetScheme(msgspec.Struct, frozen=True):
    """What a writer says: the scheme of each group of targets, and what of them is stored in full nevertheless."""

    groups: tuple[tuple[Targets, LinearScheme], ...]
    ignore: Targets

    def resolve(self, config: JSONObject, linears: Iterable[str]) -> Mapping[str, LinearScheme]:
        """The scheme of each of ``linears`` that is rounded. Raises `CheckpointError` for more targets than can be
        compared with so many."""
        names = list(linears)
        tries = self.ignore.tries + sum(targets.tries for targets, _ in self.groups)
        if tries * len(names) > _MOST_MATCHES:
            raise CheckpointError(
                f"has {tries} patterns or parts of names for {len(names)} linears, at most "
                f"{_MOST_MATCHES // len(names)} are taken: name the linears in full",
                file=config.file,
                field=config.field,
            )
        found = ((name, self._of(name)) for name in names)
        return {name: scheme for name, scheme in found if scheme is not None}

    def _of(self, linear: str) -> LinearScheme | None:
        if self.ignore.rank(linear) is not None:
            return None
        # The most specific target decides, as for the writers of such files.
        ranks = [
            (rank, index)
            for index, (targets, _) in enumerate(self.groups)
            if (rank := targets.rank(linear)) is not None
        ]
        return self.groups[min(ranks)[1]][1] if ranks else None


def read_targets(config: JSONObject, key: str, *, strict: bool = True) -> Targets:
    """A list of targets, or nothing: names, patterns behind "re:" or, for all, "Linear". Raises `CheckpointError` for
    what names no linear in a way that is known; a name that could be a class's is one where ``strict``."""
    found = read_names(config, key)
    patterns = dict.fromkeys(target for target in found if target.startswith(REGEX))
    if len(patterns) > _MOST_PATTERNS:
        raise config.fail(
            key, f"has {len(patterns)} patterns, at most {_MOST_PATTERNS} are taken: name the linears in full"
        )
    for target in found:
        if strict and "." not in target and target not in (CLASS, "lm_head") and target not in patterns:
            raise config.fail(key, f"{target!r:.80} is neither {CLASS} nor a linear's name nor a pattern (re:...)")
    return Targets(
        names=frozenset(found),
        patterns=tuple(_pattern(config, key, target) for target in patterns),
        everything=CLASS in found,
    )


def read_names(config: JSONObject, key: str) -> tuple[str, ...]:
    """A list of strings, or nothing. Raises `CheckpointError`."""
    found: Any = config.get(key)
    if found is None:
        return ()
    if not isinstance(found, list):
        raise config.fail(key, f"must be a list, got {found!r:.80}")
    for target in found:
        if not isinstance(target, str):
            raise config.fail(key, f"must hold names, got {target!r:.80}")
    return tuple(found)


def _pattern(config: JSONObject, key: str, target: str) -> Pattern:
    # Not at the top: few models have patterns, and a start that does not need it should not wait for it.
    import re2

    pattern = target.removeprefix(REGEX)
    options = re2.Options()
    options.log_errors = False
    try:
        if len(pattern) > _MAX_PATTERN:
            raise re2.error(f"it is longer than {_MAX_PATTERN} characters")
        compiled: Pattern = re2.compile(pattern, options)
        return compiled
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        raise config.fail(
            key,
            f"{target!r:.80} is not a pattern that is taken ({why:.80}): say it in RE2's syntax, or name the linears",
        ) from None

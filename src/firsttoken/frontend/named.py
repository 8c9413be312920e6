"""Generations by the id that their caller gave them, which several may share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Generation


class NamedGenerations:
    """Those that run."""

    def __init__(self) -> None:
        self._named: dict[str, list[Generation]] = {}

    def __len__(self) -> int:
        return len(self._named)

    def add(self, generation: Generation) -> None:
        self._named.setdefault(generation.id, []).append(generation)

    def remove(self, generation: Generation) -> None:
        same = self._named[generation.id]
        same.remove(generation)
        if not same:
            del self._named[generation.id]

    def cancel(self, name: str) -> None:
        """End all of this id; one that is not known is ignored."""
        for generation in self._named.get(name, ()):
            generation.cancel()

"""Who gets how many of a step's prefill tokens."""

from __future__ import annotations

from collections.abc import Iterator

from firsttoken.core.request import Request


class PrefillShares:
    """Divides a step's prefill tokens so that a long prompt neither blocks short ones nor stands still.

    The first running prefill (best class, then oldest) is sure of half; the other half goes to the shortest
    remainders, running ones first, then newly admitted requests; what nobody takes goes back to the first. So the
    oldest prompt takes at most twice as long as alone, and a short prompt does not wait for it to end.
    """

    def __init__(self, prefills: list[Request], tokens: int, *, contended: bool, outranked: bool) -> None:
        """``prefills`` are the running ones in order of rank. ``contended``: requests wait. ``outranked``: the one
        waiting first is of a better class than all of ``prefills``, and takes what it wants before them."""
        self.left = tokens
        self._grants: dict[Request, int] = dict.fromkeys(prefills, 0)
        self._wanted = {request: request.num_wanted for request in prefills}
        self._first = prefills[0] if prefills else None
        if self._first is None or outranked:
            return
        others = prefills[1:]
        self._give(self._first, tokens - tokens // 2 if others or contended else tokens)
        for request in sorted(others, key=lambda each: (each.priority, self._wanted[each])):
            self._give(request, self.left)

    def may_enter(self, request: Request) -> bool:
        """False for a request that would only delay the first running prefill: one of no better class that could
        not end before it."""
        first = self._first
        if first is None or request.priority < first.priority:
            return True
        wanted = self._wanted[first]
        return self._grants[first] == wanted or request.num_tokens < wanted

    def enter(self, request: Request) -> None:
        """A newly admitted request takes what it wants of the tokens left."""
        self._grants[request] = 0
        self._wanted[request] = request.num_wanted
        self._give(request, self.left)

    def settle(self) -> Iterator[tuple[Request, int]]:
        """Hand out the tokens left, in order of rank; yields each request that has any, with its tokens."""
        for request in self._grants:
            self._give(request, self.left)
        return ((request, count) for request, count in self._grants.items() if count)

    def _give(self, request: Request, most: int) -> None:
        count = min(self._wanted[request] - self._grants[request], most, self.left)
        self._grants[request] += count
        self.left -= count

"""How much of a class's queue is each tenant's, and how much of it goes before a tenant's next request."""

from __future__ import annotations

from typing import NamedTuple

ROUNDING = 1e-9


class Ahead(NamedTuple):
    """What goes before a request, of its own class's queue."""

    requests: float
    tokens: float


class _Owed:
    __slots__ = ("requests", "share", "tokens")

    def __init__(self, share: float) -> None:
        self.share = share
        self.requests = self.tokens = 0


class TenantQueue:
    """The waiting requests of a class by tenant, as running sums. A tenant is known while it has any; its ``share`` is
    that of the first of them.

    Tenants are served in proportion to their shares (`TenantTags`), so a tenant's next request comes after its own and
    as much of the others' as is served meanwhile: what one tenant piles up is no wait for another.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Owed] = {}
        self._requests = self._tokens = 0
        self._shares = 0.0  # of all that are known

    def __len__(self) -> int:
        """Tenants that have waiting requests."""
        return len(self._tenants)

    def add(self, tenant: str, share: float, tokens: int) -> None:
        owed = self._tenants.get(tenant)
        if owed is None:
            owed = self._tenants[tenant] = _Owed(share)
            self._shares += share
        owed.requests += 1
        owed.tokens += tokens
        self._requests += 1
        self._tokens += tokens

    def remove(self, tenant: str, tokens: int) -> None:
        """Of one that was added with so many tokens."""
        owed = self._tenants[tenant]
        owed.requests -= 1
        owed.tokens -= tokens
        self._requests -= 1
        self._tokens -= tokens
        if not owed.requests:
            del self._tenants[tenant]
            self._shares = sum([other.share for other in self._tenants.values()])  # a difference would drift

    def ahead_of(self, tenant: str) -> Ahead:
        """Of a new request of the tenant."""
        owed = self._tenants.get(tenant)
        if owed is None:
            return Ahead(0.0, 0.0)
        rounds = self._shares / owed.share
        return Ahead(min(owed.requests * rounds, self._requests), min(owed.tokens * rounds, self._tokens))

    def has_less_than_its_part(self, tenant: str, most: int) -> bool:
        """Whether the tenant has fewer of ``most`` places than are its by its share among those that wait."""
        owed = self._tenants.get(tenant)
        if owed is None:
            return bool(self._tenants)
        return owed.requests < most * owed.share / self._shares - ROUNDING

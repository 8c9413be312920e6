"""Fair shares between the tenants of a service class, by start-time fair queueing."""

from __future__ import annotations

from firsttoken.core.request import Request

# What a request is taken to put out, at most: few use up their ``max_tokens``.
EXPECTED_OUTPUT = 128
_SWEEP_BEYOND = 64
# Sums of tags stay exact enough, whatever the shares.
_MOST_CHARGE = 1e9


def cost_of(request: Request) -> int:
    """Tokens that a request is taken to need, prompt and output."""
    return request.num_prompt + min(request.max_tokens, EXPECTED_OUTPUT)


class TenantTags:
    """The virtual time of a class, and how far each tenant's requests reach into it.

    A request starts at ``max(virtual time, its tenant's finish)`` and moves that finish on by its cost over the
    tenant's share, so the requests of a tenant that sends much lie far ahead, and one that comes later begins now.
    Virtual time is the tag of the request that started last. The tags are static, so a sorted list serves them in
    order; one tenant alone is served in order of arrival.

    A tenant is remembered as long as its finish lies ahead while others of the class wait.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._finish: dict[str, float] = {}
        self._sweep_at = _SWEEP_BEYOND

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._finish)

    def charge(self, request: Request) -> tuple[float, float]:
        """A new request's start tag, and what its tenant is charged for it."""
        charge = min(cost_of(request) / request.share, _MOST_CHARGE)
        tag = max(self._now, self._finish.get(request.tenant, 0.0))
        self._finish[request.tenant] = tag + charge
        if len(self._finish) > self._sweep_at:
            self._sweep()
        return tag, charge

    def start(self, tag: float) -> None:
        """A request starts for the first time: virtual time is its tag."""
        self._now = max(self._now, tag)

    def refund(self, request: Request, charge: float) -> None:
        """A request ends that never started."""
        finish = self._finish.get(request.tenant)
        if finish is not None:
            self._finish[request.tenant] = finish - charge

    def forget(self) -> None:
        """Nobody of the class waits: there is nothing to share, and all that was charged has started. Virtual time goes
        on with it, or a long prompt that runs would be passed for ever by short ones that never wait."""
        self._now = max(self._now, max(self._finish.values(), default=0.0))
        self._finish.clear()
        self._sweep_at = _SWEEP_BEYOND

    def _sweep(self) -> None:
        """A finish that is not ahead says no more than none does."""
        self._finish = {tenant: finish for tenant, finish in self._finish.items() if finish > self._now}
        self._sweep_at = 2 * len(self._finish) + _SWEEP_BEYOND

"""Service classes, and what the callers of each are promised. Times in ms."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.errors import ConfigError, InvalidRequest
from firsttoken.core.retention import Retention


class ServiceClass(IntEnum):
    """Lower goes first."""

    P0 = 0  # real time
    P1 = 1  # guaranteed
    P2 = 2  # the default

    @property
    def label(self) -> str:
        """As callers, files and metrics write it: "p0", "p1" or "p2"."""
        return CLASS_NAMES[self]


CLASS_NAMES = ("p0", "p1", "p2")


def class_named(name: str) -> ServiceClass:
    """The class of that name. Raises `InvalidRequest`."""
    if name in CLASS_NAMES:
        return ServiceClass(CLASS_NAMES.index(name))
    known = ", ".join(CLASS_NAMES)
    raise InvalidRequest(f"service_class must be one of {known}, got {name!r:.80}", param="service_class")


# Thirty years in ms. Far larger ones are no finite number of ns.
_MOST = 1e12


class ClassTargets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a class is promised; None for no promise.

    ``ttft_p99`` and ``itl_p99`` are what 99 % of the first tokens and of the gaps are to stay within. A request that
    has waited for ``max_queue`` joins the next step, at the cost of worse classes if it must. One that was let in
    starts ``starts_within`` of its arrival whatever better classes send. ``weight`` is the class's share of
    contended prefill relative to others. No more than ``max_waiting`` of its requests wait; further ones are turned
    away. Raises `ConfigError`.
    """

    ttft_p99: float | None = None
    itl_p99: float | None = None
    max_queue: float | None = None
    starts_within: float = 30_000.0
    weight: float = 1.0
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in ("ttft_p99", "itl_p99", "max_queue", "starts_within", "weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _MOST:
                raise ConfigError(f"{name} of a class must be more than 0 and at most {_MOST:.0e}, got {value!r}")
        if self.max_queue is not None and self.ttft_p99 is not None and self.max_queue >= self.ttft_p99:
            raise ConfigError(
                f"max_queue of a class ({self.max_queue:g} ms) must be less than its ttft_p99 ({self.ttft_p99:g} ms): "
                "a request that waits so long has missed its first token; give a shorter max_queue"
            )
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting of a class must be 1 or more, got {self.max_waiting!r}")


class KeyRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an API key may ask for: no class better than ``max_class``, and ``service_class`` where a request names
    none (by default P2, or ``max_class`` where that is worse). Inside a class, keys are served in proportion to their
    ``share``. Keys of one ``cache_group`` share cached prefixes; "": none with others. The other fields are quotas, of
    all keys of one name together; None for no bound. Raises `ConfigError`."""

    max_class: ServiceClass = ServiceClass.P0
    service_class: ServiceClass | None = None
    share: float = 1.0
    cache_group: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < float("inf"):
            raise ConfigError(f"the share of a key must be more than 0, got {self.share!r}")
        if self.service_class is not None and self.service_class < self.max_class:
            raise ConfigError(
                f"a key's class {self.service_class.name.lower()} is better than its max_class "
                f"{self.max_class.name.lower()}"
            )

    @property
    def has_quota(self) -> bool:
        return any(one is not None for one in (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent))

    @property
    def usual_class(self) -> ServiceClass:
        """The class of a request that names none."""
        return ServiceClass.P2 if self.service_class is None else self.service_class


class Targets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The promises of all classes, and the rules of keys by their names."""

    p0: ClassTargets = ClassTargets(max_queue=10.0, weight=4.0)
    p1: ClassTargets = ClassTargets(weight=2.0)
    p2: ClassTargets = ClassTargets()
    keys: dict[str, KeyRule] = {}

    def of(self, service: int) -> ClassTargets:
        return (self.p0, self.p1, self.p2)[service]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms a request is served; the fields as in `EngineRequest`, ``salt`` separates prefix caches."""

    service: ServiceClass = ServiceClass.P2
    priority: int = 0
    tenant: str = ""
    share: float = 1.0
    salt: str = ""
    deadline_ns: int = 0
    retention: Retention | None = None


DEFAULT_TERMS = Terms()
MAX_DEADLINE_MS = 24 * 3600e3


def deadline_after(arrived_ns: int, ms: float) -> int:
    """The ``deadline_ns`` of a request that must start within ``ms`` of its arrival. Raises `InvalidRequest`."""
    if not 0 < ms <= MAX_DEADLINE_MS:
        raise InvalidRequest(f"deadline_ms must be more than 0 and at most a day, got {ms!r:.80}", param="deadline_ms")
    return arrived_ns + int(ms * NS_PER_MS)

"""On which terms a request is served: its service class, its place inside it, the time by which it must start.

``service_tier`` takes OpenAI's words and our own. Whoever asks in OpenAI's, or not at all, is answered in OpenAI's:
some clients take no other.
"""

from __future__ import annotations

from firsttoken.core.retention import Retention
from firsttoken.core.service import CLASS_NAMES, ServiceClass, Terms, class_named, deadline_after
from firsttoken.server.call import Caller
from firsttoken.server.errors import ApiError, bad_request
from firsttoken.server.sampling import whole
from firsttoken.server.schema import TermsRequest

MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31

# Left out, "auto" and "default": what the caller's key has by default.
_USUAL = (None, "auto", "default")
_TIERS = {
    "fast": ServiceClass.P1,  # OpenAI's other word for "priority"
    "flex": ServiceClass.P2,
    "priority": ServiceClass.P1,
    **{name: class_named(name) for name in CLASS_NAMES},
}


def agree(request: TermsRequest, caller: Caller, arrived_ns: int) -> tuple[Terms, str]:
    """The terms for a request that arrived at ``arrived_ns``, and the ``service_tier`` of its answer.

    Raises `ApiError`: 400 naming a field, 403 for a class that is better than the key may have.
    """
    service = _service(request.service_tier, caller)
    retention = _retention(request, caller)
    terms = Terms(
        service=service,
        priority=_priority(request),
        tenant=caller.tenant,
        share=caller.rule.share,
        salt=_cache_salt(request, caller.salt),
        deadline_ns=0 if request.deadline_ms is None else deadline_after(arrived_ns, request.deadline_ms),
        retention=retention,
    )
    return terms, _answered(request.service_tier, service)


def _retention(request: TermsRequest, caller: Caller) -> Retention | None:
    if request.cache_hint is None:
        return None
    retention = request.cache_hint.retention()
    best = caller.rule.max_class
    if retention.service is not None and retention.service < best:
        raise ApiError(
            403,
            f"cache_hint.priority {request.cache_hint.priority!r} is a better class than this API key may have: send "
            f"{best.label!r}, or leave it out",
            type_="permission_error",
            param="cache_hint.priority",
            code="cache_priority_not_allowed",
        )
    return retention


def _service(tier: str | None, caller: Caller) -> ServiceClass:
    if tier in _USUAL:
        return caller.rule.usual_class
    service = _TIERS.get(tier or "")
    if service is None:
        known = ", ".join(["auto", "default", *_TIERS])
        raise bad_request(
            f"service_tier {tier!r:.80} is not supported: send one of {known}", "service_tier", "unsupported_parameter"
        )
    best = caller.rule.max_class
    if service < best:
        raise ApiError(
            403,
            f"service_tier {tier!r} asks for class {service.label}, and this API key may have {best.label} at best: "
            f"send {best.label!r}, or leave service_tier out",
            type_="permission_error",
            param="service_tier",
            code="service_tier_not_allowed",
        )
    return service


def _answered(tier: str | None, service: ServiceClass) -> str:
    """The class that is used, in the caller's words."""
    if tier == "flex" or tier in CLASS_NAMES:
        return tier
    return "default" if service is ServiceClass.P2 else "priority"


def _priority(request: TermsRequest) -> int:
    """Lower goes first, as in vLLM."""
    value = whole("priority", request.priority) or 0
    if not -MAX_PRIORITY <= value < MAX_PRIORITY:
        raise bad_request(f"priority must fit 32 bits, got {value!r}", "priority")
    return value


def _cache_salt(request: TermsRequest, salt: str) -> str:
    """What isolates this request's cached prefixes: its key's salt (`salts`) and the caller's own."""
    own = request.cache_salt
    if own is None:
        return salt
    if not 1 <= len(own) <= MAX_SALT_CHARS:
        raise bad_request(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(own)}", "cache_salt")
    return f"{salt}/{own}"

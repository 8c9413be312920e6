"""What a policy finds on a load, and how much of p0's share of it a flood leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import POLICY_NAMES, EvictionConfig, EvictionPolicy, make_policy
from firsttoken.simulate.cache import run_cache
from firsttoken.simulate.cache_bound import CLAIRVOYANT, Clairvoyant
from firsttoken.simulate.workload import Job

CACHE_POLICY_NAMES = (*POLICY_NAMES, CLAIRVOYANT)
ALL = "all"


def named_policies(text: str) -> list[str]:
    """``NAME,..`` or ``all``. Raises `ConfigError` for a name that is not known."""
    if text == ALL:
        return list(CACHE_POLICY_NAMES)
    names = text.split(",")
    for name in names:
        if name not in CACHE_POLICY_NAMES:
            known = ", ".join((*CACHE_POLICY_NAMES, ALL))
            raise ConfigError(f"{name!r:.80} is no eviction policy: known are {known}")
    return names


def compare_cache(
    jobs: Sequence[Job], name: str, num_blocks: int, config: EvictionConfig | None = None
) -> dict[str, Any]:
    """``policy, blocks, hit_ratio, evictions`` of one policy, and where there are several classes ``classes``:
    ``hit_ratio`` of each, ``alone`` (what the class finds when no other sends) and ``kept``, the ratio of the two.
    ``early`` counts p0's, p1's and p2's blocks that went before their class's time, where the policy keeps any."""
    outcome = run_cache(jobs, _policy(name, jobs, config), num_blocks)
    result: dict[str, Any] = {
        "policy": name,
        "blocks": num_blocks,
        "hit_ratio": outcome.all.ratio,
        "evictions": outcome.evictions,
    }
    if outcome.early is not None:
        result["early"] = list(outcome.early)
    if len(outcome.classes) > 1:
        result["classes"] = {}
        for service, count in sorted(outcome.classes.items()):
            alone = _alone(jobs, service, name, num_blocks, config)
            kept = count.ratio / alone if alone else None
            result["classes"][service.label] = {"hit_ratio": count.ratio, "alone": alone, "kept": kept}
    return result


def _alone(
    jobs: Sequence[Job], service: ServiceClass, name: str, num_blocks: int, config: EvictionConfig | None
) -> float:
    own = [job for job in jobs if job.service == service]
    return run_cache(own, _policy(name, own, config), num_blocks).all.ratio


def _policy(name: str, jobs: Sequence[Job], config: EvictionConfig | None) -> EvictionPolicy:
    return Clairvoyant(jobs) if name == CLAIRVOYANT else make_policy(name, config)

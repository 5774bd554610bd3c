"""What a replay found, as a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import UsageError
from kvstore.replay import policies
from kvstore.replay.optimum import optimum
from kvstore.replay.tiers import Plan, Tiers

if TYPE_CHECKING:
    from kvstore.replay.trace import Trace

_DAY = 86_400.0

Document = dict[str, object]


@dataclass(frozen=True, slots=True)
class Drive:
    """Bytes of a block and of the drive, for what the writes mean; None where nobody said."""

    block_bytes: int | None = None
    drive_bytes: int | None = None


def plan_for(name: str, disk: int, memory: int, write: str, rule: str | None) -> Plan:
    """Return a plan; without ``rule`` the one by which a policy is commonly counted. Raises
    UsageError."""
    if disk < 1 or memory < 0:
        raise UsageError(
            f"{disk} blocks on disk and {memory} in memory", "the disk needs room for one at least"
        )
    policies.check(name)
    return Plan(name, disk, memory, write, rule or policies.usual_rule(name))


def run(trace: Trace, plan: Plan, drive: Drive, *, best: bool = False) -> Document:
    """Replay once; ``best``: find what no policy can surpass, too."""
    counts = Tiers(trace, plan, policies.make(plan.policy, plan.disk)).run()
    stop = trace.requests if plan.count_to is None else min(plan.count_to, trace.requests)
    return {
        "trace": trace.name,
        "requests": trace.requests,
        "policy": plan.policy,
        "config": {"write": plan.write, "rule": plan.rule, "block_tokens": trace.block_tokens},
        "ssd_blocks": plan.disk,
        "dram_blocks": plan.memory,
        "count_from": plan.count_from,
        "count_to": stop,
        "refs": counts.refs,
        "hits": counts.hits,
        "hits_dram": counts.memory_hits,
        "hits_ssd": counts.hits - counts.memory_hits,
        "hit_ratio": counts.hits / max(counts.refs, 1),
        "ssd_writes": counts.writes,
        "peak_ghosts": counts.peak_ghosts,
        "policy_bytes": counts.policy_bytes,
        "orphans": counts.orphans,
        **_endurance(trace, plan.count_from, stop, counts.writes, drive),
        **_beside(trace, plan, counts.hits, best=best),
    }


def _beside(trace: Trace, plan: Plan, hits: int, *, best: bool) -> Document:
    """Return the most hits that are possible, where somebody wants to know."""
    if not best:
        return {"optimum": None, "percent_of_optimum": None}
    most = optimum(trace, plan.disk + plan.memory, plan.count_from, plan.count_to)
    return {"optimum": most, "percent_of_optimum": 100 * hits / most if most else None}


def _endurance(trace: Trace, start: int, stop: int, writes: int, drive: Drive) -> Document:
    """Return bytes written a day, and how often a day that writes the whole drive."""
    part = trace.arrivals[start:stop]
    seconds = float(part[-1] - part[0]) / 1000 if len(part) else 0.0
    daily = None
    if drive.block_bytes is not None and seconds > 0:
        daily = writes * drive.block_bytes * _DAY / seconds
    times = daily / drive.drive_bytes if daily is not None and drive.drive_bytes else None
    return {"bytes_per_day": daily, "drive_writes_per_day": times}

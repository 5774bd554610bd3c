"""The daemon's figures as Prometheus metrics: made from a status when somebody asks.

Names are ``kvstore_<noun>_<unit>``, counters end in ``_total``. A label never holds a key or a
namespace. docs/metrics.md is made from the table here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric as Family

STATES = ("recovering", "ready", "degraded", "draining")


class Metric(NamedTuple):
    """``samples`` gives for each value of the label the fields of the status that are added up; a
    field of an object is written with a dot, one to subtract with a minus before it."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    label: str
    samples: Mapping[str, tuple[str, ...]]


def _one(name: str, kind: Literal["gauge", "counter"], meaning: str, field: str) -> Metric:
    return Metric(name, kind, meaning, "", {"": (field,)})


METRICS = (
    Metric(
        "kvstore_blocks", "gauge", "Blocks that a tier holds", "tier",
        {"disk": ("blocks",), "memory": ("memory_blocks",)},
    ),
    Metric(
        "kvstore_tier_bytes", "gauge", "What the records of a tier take", "tier",
        {"disk": ("live_bytes",), "memory": ("memory_bytes",)},
    ),
    Metric(
        "kvstore_capacity_bytes", "gauge", "What a tier may take", "tier",
        {"disk": ("capacity_bytes",), "memory": ("memory_capacity_bytes",)},
    ),
    _one("kvstore_used_bytes", "gauge", "What the store takes on disk, as du counts", "used_bytes"),
    _one("kvstore_free_bytes", "gauge", "What is free on the filesystem", "free_bytes"),
    _one("kvstore_min_free_bytes", "gauge", "What must stay free there", "min_free_bytes"),
    _one("kvstore_journal_bytes", "gauge", "Journal and checkpoint", "journal_bytes"),
    _one("kvstore_quarantine_bytes", "gauge", "Copies of damaged records", "quarantine_bytes"),
    _one("kvstore_dirty_blocks", "gauge", "Blocks in memory only", "dirty_blocks"),
    _one("kvstore_dirty_bytes", "gauge", "What they take", "dirty_bytes"),
    _one("kvstore_write_queue_blocks", "gauge", "Blocks that wait to be written", "queued_blocks"),
    _one("kvstore_pinned_blocks", "gauge", "Blocks under a pin", "pinned_blocks"),
    _one("kvstore_pinned_bytes", "gauge", "What they take", "pinned_bytes"),
    _one("kvstore_ghost_blocks", "gauge", "Blocks not here that others follow", "ghosts"),
    _one("kvstore_namespaces", "gauge", "Namespaces", "namespaces"),
    _one("kvstore_index_block_bytes", "gauge", "Memory of the index for each block",
         "index_bytes_per_block"),
    _one("kvstore_clients", "gauge", "Connections", "clients"),
    _one("kvstore_region_bytes", "gauge", "Memory that clients share", "region_bytes"),
    Metric(
        "kvstore_lookup_blocks_total", "counter", "Blocks that were asked for", "result",
        {"memory": ("memory_hits",), "disk": ("hits", "-memory_hits"), "miss": ("misses",)},
    ),
    Metric(
        "kvstore_put_blocks_total", "counter", "Blocks that were put", "result",
        {
            "stored": ("stored",), "present": ("already_present",), "conflict": ("conflicts",),
            "full": ("refused_full",), "refused": ("refused_admission",),
            "failed": ("write_errors",),
        },
    ),
    _one("kvstore_read_bytes_total", "counter", "Bytes of blocks found", "read_bytes"),
    _one("kvstore_written_bytes_total", "counter", "Bytes of blocks written", "written_bytes"),
    _one("kvstore_evicted_blocks_total", "counter", "Blocks evicted", "evictions"),
    _one("kvstore_evicted_bytes_total", "counter", "What they took", "evicted_bytes"),
    _one("kvstore_deleted_blocks_total", "counter", "Blocks deleted by name", "deleted"),
    _one("kvstore_warmed_blocks_total", "counter", "Blocks read into memory by warm", "warmed"),
    Metric(
        "kvstore_bad_blocks_total", "counter", "Blocks whose record was no good", "kind",
        {
            "damaged": ("corrupt_blocks",), "stale": ("stale_blocks",),
            "missing": ("missing_blocks",), "unsynced": ("unsynced_blocks",),
            "repaired": ("repaired_blocks",),
        },
    ),
    _one("kvstore_read_errors_total", "counter", "Reads that the device refused", "read_errors"),
    _one("kvstore_memory_errors_total", "counter", "Copies in memory that had changed",
         "memory_errors"),
    Metric(
        "kvstore_failures_total", "counter", "Faults of the daemon itself", "of",
        {"request": ("failed_requests",), "job": ("failed_jobs",)},
    ),
    _one("kvstore_scrub_blocks", "gauge", "Blocks that the scrub has looked at", "scrub.blocks"),
    _one("kvstore_scrub_bytes", "gauge", "What they take", "scrub.bytes"),
    _one("kvstore_scrub_finished_timestamp_seconds", "gauge", "When a scrub was over last",
         "scrub.finished"),
    _one("kvstore_uptime_seconds", "gauge", "Since the store was opened", "uptime_seconds"),
)  # fmt: skip
OTHERS = {
    "kvstore_build_info": ("gauge", "1; labels: version, engine"),
    "kvstore_state": ("gauge", "1 for the state it is in; label: state"),
    "kvstore_problems": ("gauge", "What makes it degraded: how many things"),
    "kvstore_loop_age_seconds": ("gauge", "Since the event loop was heard of last"),
    "kvstore_request_seconds": ("histogram", "Time of requests; label: op (get, put)"),
}
"""Metrics that are more than a field of the status, with kind and meaning."""


class StatusCollector(Collector):
    """Yields the metrics of one status; those whose fields it has not (yet) are left out."""

    def __init__(self, status: Mapping[str, Any], loop_age: float) -> None:
        self._status, self._loop_age = status, loop_age

    def collect(self) -> Iterator[Family]:
        yield from self._about_the_daemon()
        for metric in METRICS:
            values = {label: self._sum(fields) for label, fields in metric.samples.items()}
            if all(value is None for value in values.values()):
                continue
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = kind(metric.name, metric.meaning, labels=[metric.label] * bool(metric.label))
            for label, value in values.items():
                if value is not None:
                    family.add_metric([label] * bool(label), value)
            yield family
        for op in ("get", "put"):
            if f"{op}_us_buckets" in self._status:
                yield self._durations(op)

    def _about_the_daemon(self) -> Iterator[Family]:
        status = self._status
        info = GaugeMetricFamily("kvstore_build_info", "1", labels=["version", "engine"])
        info.add_metric([str(status.get("version")), str(status.get("engine"))], 1)
        state = GaugeMetricFamily("kvstore_state", "1 for the state it is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], int(status.get("state") == name))
        problems, age = len(status.get("problems", ())), round(self._loop_age, 3)
        yield from (info, state)
        yield GaugeMetricFamily("kvstore_problems", OTHERS["kvstore_problems"][1], problems)
        yield GaugeMetricFamily(
            "kvstore_loop_age_seconds", OTHERS["kvstore_loop_age_seconds"][1], age
        )

    def _sum(self, fields: tuple[str, ...]) -> float | None:
        total = 0.0
        for field in fields:
            sign = -1 if field.startswith("-") else 1
            value: Any = self._status
            for part in field.removeprefix("-").split("."):
                value = value.get(part) if value is not None else None
            if value is None:
                return None
            total += sign * value
        return total

    def _durations(self, op: str) -> Family:
        """``buckets[i]`` counts what took less than 2**i microseconds."""
        family = HistogramMetricFamily(
            "kvstore_request_seconds", OTHERS["kvstore_request_seconds"][1], labels=["op"]
        )
        total, bounds = 0, []
        for number, count in enumerate(self._status[f"{op}_us_buckets"]):
            total += count
            bounds.append((repr((1 << number) / 1e6), total))
        family.add_metric([op], [*bounds[:-1], ("+Inf", total)], sum_value=None)
        return family


def expose(status: Mapping[str, Any], loop_age: float) -> bytes:
    """Return the metrics of a status as text; ``loop_age`` in seconds."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, loop_age))
    text: bytes = generate_latest(registry)
    return text

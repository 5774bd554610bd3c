"""The figures of ``kvstore bench engines``: collected, compared with what is wanted, as text."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore import render
from kvstore.bench import environment
from kvstore.bench.churn import written
from kvstore.bench.timing import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PUT, DURABLE, COLD, WARM = "put", "durable put", "cold get", "warm get"
COPY = "copy"
REFERENCE_THREADS = (1, 4, 8)
GIB = 1 << 30


def reference_name(threads: int) -> str:
    return f"reference, {render.count(threads, 'thread')}"


BEST_REFERENCE = reference_name(REFERENCE_THREADS[-1])
BARS = (
    ("superblock", COLD, BEST_REFERENCE, 0.85),
    ("superblock", PUT, BEST_REFERENCE, 0.8),
    ("mmap", WARM, COPY, 0.65),
    ("lmdb", WARM, COPY, 0.65),
)
"""Subject, operation, what it is measured by, and the least share of its speed, which was set for
blocks of 2 MiB; at least half of that are compared."""
LEAST_BLOCK = 1 << 20
MOST_CPU = 0.1
"""Seconds of processor time for a GiB that O_DIRECT moves, by the same bars."""


@dataclass
class Subject:
    """What was measured of a copy, of the reference or of an engine: a row for each operation."""

    name: str
    io: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    copies: Row = field(default_factory=lambda: Row(COPY))
    """Copies of the same blocks, each just before a warm get."""
    space: float = 0.0
    """The most bytes on disk for a byte of payload."""
    put_bytes: int = 0
    written_bytes: int = 0
    cpu_seconds: float = 0.0
    """Both of all puts, with the evictions before and the closing after them."""

    def row(self, operation: str) -> Row:
        return self.rows.setdefault(operation, Row(operation))

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Add up what is used inside."""
        begun, cpu = written(), time.process_time()
        yield
        self.written_bytes += written() - begun
        self.cpu_seconds += time.process_time() - cpu

    def document(self, data_bytes: int) -> dict[str, Any]:
        """Return it for JSON; every row moved ``data_bytes``."""
        gib, put_gib = data_bytes / GIB, self.put_bytes / GIB
        shares = self._shares(self.copies, WARM) if self.copies.seconds else []
        return {
            "subject": self.name,
            "io": self.io,
            "rows": [
                {
                    **row.document(),
                    "gib_per_second": gib / row.median,
                    "cpu_seconds_per_gib": statistics.median(row.client_cpu) / gib,
                }
                for row in self.rows.values()
            ],
            "warm_get_of_copy": statistics.median(shares) if shares else None,
            "space_amplification": self.space or None,
            "write_amplification": self.written_bytes / self.put_bytes if self.put_bytes else None,
            "put_cpu_seconds_per_gib": self.cpu_seconds / put_gib if self.put_bytes else None,
        }

    def _shares(self, measure: Row, operation: str) -> list[float]:
        pairs = zip(measure.seconds, self.row(operation).seconds, strict=True)
        return [by / own for by, own in pairs]

    def bar(self, operation: str, measure: Subject, least: float, cpu: float) -> dict[str, Any]:
        """Return the share of another one's speed, round by round, beside what is wanted."""
        by = self.copies if measure.name == COPY else measure.row(operation)
        shares = self._shares(by, operation)
        return {
            "subject": self.name,
            "row": operation,
            "by": measure.name,
            "least": least,
            "median": statistics.median(shares),
            "best": max(shares),
            "cpu_seconds_per_gib": cpu,
            "most_cpu_seconds_per_gib": MOST_CPU if self.io == "direct" else None,
        }


def document(block_bytes: int, blocks: int, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return what was measured with blocks of one size."""
    data_bytes = blocks * block_bytes
    return {
        "block_bytes": block_bytes,
        "blocks": blocks,
        "subjects": [subject.document(data_bytes) for subject in subjects],
        "bars": list(_bars({one.name: one for one in subjects}, data_bytes))
        if block_bytes >= LEAST_BLOCK
        else [],
    }


def _bars(subjects: Mapping[str, Subject], data_bytes: int) -> Iterator[dict[str, Any]]:
    for name, operation, by, least in BARS:
        subject = subjects.get(name)
        if subject is not None and (subject.io == "direct" or by == COPY):
            cpu = statistics.median(subject.row(operation).client_cpu) / data_bytes * GIB
            yield subject.bar(operation, subjects[by], least, cpu)


# -- as text --------------------------------------------------------------------------------------

HEAD = (
    *("subject", "io", PUT, DURABLE, COLD, WARM, "of copy"),
    *("disk/live", "written/put", "put CPU", "get CPU"),
)
LEGEND = (
    "put, get: GiB/s, medians; durable: a sync for each 64 blocks; cold: not in the page cache",
    "of copy: speed of a warm get as a part of a copy's, which one thread made just before",
    "disk/live: the most bytes on disk for a byte of payload, after all were evicted and put",
    "again; kvstore bench churn measures what comes and goes in parts",
    "written/put: bytes that Linux counts for a byte put (write_bytes in /proc/PID/io); what is",
    "overwritten before it goes to the device counts once",
    "put CPU, get CPU: s/GiB; of puts with evictions before and closing after, of cold gets",
)


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Return a document of :func:`kvstore.bench.engines.run` as text."""
    yield from environment.lines(result["environment"])
    for size in result["sizes"]:
        yield ""
        yield (
            f"{size['blocks']:,} blocks of {render.size(size['block_bytes'])}, median of "
            f"{render.count(result['rounds'], 'round')}"
        )
        yield from render.table(HEAD, [_cells(subject) for subject in size["subjects"]])
        yield from map(_verdict, size["bars"])
    yield ""
    yield from LEGEND
    if not result["huge_pages"]:
        yield "note: measured without huge pages"
    yield from (f"not measured: {reason}" for reason in result["not_measured"])


def _cells(subject: Mapping[str, Any]) -> list[str]:
    rows = {row["name"]: row for row in subject["rows"]}
    speeds = [
        f"{rows[name]['gib_per_second']:.2f}" if name in rows else "-"
        for name in (PUT, DURABLE, COLD, WARM)
    ]
    keys = ("warm_get_of_copy", "space_amplification", "write_amplification")
    get_cpu = rows[COLD]["cpu_seconds_per_gib"] if COLD in rows else None
    return [
        subject["subject"],
        subject["io"] or "-",
        *speeds,
        *(_number(subject[key]) for key in keys),
        _number(subject["put_cpu_seconds_per_gib"]),
        _number(get_cpu),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _verdict(bar: Mapping[str, Any]) -> str:
    most = bar["most_cpu_seconds_per_gib"]
    met = bar["median"] >= bar["least"] and (most is None or bar["cpu_seconds_per_gib"] <= most)
    cpu = "" if most is None else f", {bar['cpu_seconds_per_gib']:.3f} CPU s/GiB, at most {most}"
    return (
        f"{bar['subject']}, {bar['row']}: {bar['median']:.2f} of {bar['by']} (best round "
        f"{bar['best']:.2f}), at least {bar['least']}{cpu} wanted: {'met' if met else 'NOT met'}"
    )

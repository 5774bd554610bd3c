"""How a scan gathers what it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.backends.base import Scanned
from kvstore.keys import MAX_KEY_BYTES, NAMESPACE_ID_BYTES

if TYPE_CHECKING:
    from kvstore.backends.base import U8, Finding
    from kvstore.record import Header


class ScanBatch:
    """Collects what a scan finds until it makes a :class:`Scanned`."""

    def __init__(self) -> None:
        self._headers: list[Header] = []
        self._places: list[int] = []
        self._strange: list[Finding] = []

    def __len__(self) -> int:
        """Return the larger of records and findings: neither may pass SCAN_BATCH."""
        return max(len(self._headers), len(self._strange))

    def add(self, header: Header, place: int = 0) -> None:
        self._headers.append(header)
        self._places.append(place)

    def report(self, finding: Finding) -> None:
        self._strange.append(finding)

    def take(self) -> Scanned:
        """Return what was collected as columns, and start again."""
        found, places, strange = self._headers, self._places, self._strange
        self._headers, self._places, self._strange = [], [], []
        return Scanned(
            namespaces=_rows([header.namespace for header in found], NAMESPACE_ID_BYTES),
            shards=np.array([header.shard for header in found], np.uint16),
            key_lengths=np.array([len(header.key) for header in found], np.uint8),
            keys=_rows([header.key for header in found], MAX_KEY_BYTES),
            parent_lengths=np.array([len(header.parent) for header in found], np.uint8),
            parents=_rows([header.parent for header in found], MAX_KEY_BYTES),
            lengths=np.array([header.stored_length for header in found], np.uint32),
            places=np.array(places, np.uint64),
            generations=np.array([header.generation for header in found], np.uint64),
            written_ns=np.array([header.written_ns for header in found], np.uint64),
            labelled=np.array([bool(header.label) for header in found], np.bool_),
            strange=tuple(strange),
        )


def _rows(values: list[bytes], width: int) -> U8:
    blob = b"".join(value.ljust(width, b"\0") for value in values)
    return np.frombuffer(blob, np.uint8).reshape(len(values), width)

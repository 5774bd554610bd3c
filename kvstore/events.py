"""The one record form of journal and checkpoint: 128 bytes with a checksum, as a numpy dtype.

An event says what happened to a row of the index. Arrays of events are written, read, verified and
replayed without a Python object per event. The byte table is in docs/formats.md.

``row`` is the index's row id; ``parent`` the row id of the parent or :data:`NONE`. ``last_use`` is
a stamp: microseconds since 1970, made unique and increasing by the index, so that stamps are also
the order of use. Integers are little endian.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

NONE = 0xFFFFFFFF
"""No row."""

RECORD_BYTES = 128
TOUCH_ROWS = 20
"""Row ids that fit one TOUCH."""


class Kind(IntEnum):
    """What an event says; which fields it uses besides ``row``."""

    EMPTY = 0
    """Reserve not written yet: 128 zero bytes."""
    BEGIN = 1
    """A version (``generation``, key and all), or a child of it, is about to be written: it may be
    on disk."""
    PUT = 2
    """The engine has the version at ``place``."""
    FREE = 3
    """The version ``generation`` of the row is given up; its bytes may still be there.

    Key and namespace are given where known, so that replay can delete them."""
    TOUCH = 4
    """``length`` rows, oldest first, in the last 80 bytes; row i was used at ``last_use`` + i."""
    GHOST = 5
    """The row stands for a key without bytes, so that its children keep their link."""
    PIN = 6
    """Not to be evicted until ``last_use`` (microseconds since 1970); 0 = unpinned."""
    SYNC = 7
    """Every version up to ``generation`` survives power loss."""
    OPEN = 8
    """The store was opened: boot id in ``namespace`` (zeros = unreadable), base ``generation``."""
    CLOSE = 9
    """A finished drain; ``place`` is the offset of this record in its file."""
    LEFTOVER = 10
    """Only in checkpoints: like BEGIN, a version that may be on disk and is no live row."""


RECORD = np.dtype(
    [
        ("checksum", "<u8"),
        ("kind", "u1"),
        ("key_length", "u1"),
        ("shard", "<u2"),
        ("row", "<u4"),
        ("parent", "<u4"),
        ("length", "<u4"),
        ("place", "<u8"),
        ("generation", "<u8"),
        ("last_use", "<u8"),
        ("namespace", "u1", (16,)),
        ("key", "u1", (64,)),
    ]
)

Records = npt.NDArray[np.void]
"""Array of RECORD, shape (n,)."""

_SEED = 0x9E3779B97F4A7C15
_FACTOR = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_WORDS = struct.Struct("<15Q")
_FEW = 16
"""Up to here Python integers beat numpy's cost per call."""
_CHUNK = 4096
"""512 KiB of records: their words stay in the second-level cache while they are mixed."""


def blank(count: int, kind: Kind) -> Records:
    """Return ``count`` zeroed events of one kind, without row and parent."""
    events = np.zeros(count, RECORD)
    events["kind"] = kind
    events["row"] = NONE
    events["parent"] = NONE
    return events


def seal(events: Records) -> Records:
    """Set the checksum of every event, in place; return the same array."""
    events["checksum"] = checksums(events)
    return events


def intact(events: Records) -> npt.NDArray[np.bool_]:
    """Tell for each event whether its checksum matches; an empty one (all zero) never does."""
    return np.asarray(events["checksum"] == checksums(events))


def checksums(events: Records) -> npt.NDArray[np.uint64]:
    """Return the checksum that each event should have.

    Over the 15 little-endian u64 words w at offsets 8 to 120, modulo 2^64::

        s = 0x9E3779B97F4A7C15
        for w in words: s = (s ^ w) * 0xD6E8FEB86659FD93; s = s ^ (s >> 32)

    Each step is a bijection of s and of w, so damage within one word is always found, any other
    with probability 1 - 2^-64. A hash library would cost a Python call per event.
    """
    if len(events) <= _FEW:
        return np.fromiter(map(_checksum, _byte_rows(events)), np.uint64, len(events))
    words = np.ascontiguousarray(events).view("<u8").reshape(-1, RECORD_BYTES // 8)
    sums = np.full(len(events), _SEED, np.uint64)
    for start in range(0, len(events), _CHUNK):
        # Transposed, each word of all events is one contiguous run.
        _mix(sums[start : start + _CHUNK], words[start : start + _CHUNK, 1:].T.copy())
    return sums


def _mix(sums: npt.NDArray[np.uint64], lanes: npt.NDArray[np.uint64]) -> None:
    shifted = np.empty_like(sums)
    for lane in lanes:
        np.bitwise_xor(sums, lane, out=sums)
        np.multiply(sums, np.uint64(_FACTOR), out=sums)
        np.right_shift(sums, np.uint64(32), out=shifted)
        np.bitwise_xor(sums, shifted, out=sums)


def _byte_rows(events: Records) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(events).view(np.uint8).reshape(-1, RECORD_BYTES)


def _checksum(event: npt.NDArray[np.uint8]) -> int:
    mixed = _SEED
    for word in _WORDS.unpack_from(event.data, 8):
        mixed = (mixed ^ word) * _FACTOR & _MASK
        mixed ^= mixed >> 32
    return mixed


def touch_records(rows: npt.NDArray[np.uint32], stamps: npt.NDArray[np.uint64]) -> Records:
    """Return TOUCH events for rows, oldest first, with their increasing stamps (both shape (n,)).

    A new event begins where the stamps leave a gap or after 20 rows, so that replay gives every
    row its exact stamp.
    """
    if not len(rows):
        return blank(0, Kind.TOUCH)
    breaks = np.flatnonzero(np.diff(stamps) != 1) + 1
    run_starts = np.concatenate([[0], breaks])
    run_of = np.repeat(np.arange(len(run_starts)), np.diff(np.append(run_starts, len(rows))))
    column = (np.arange(len(rows)) - run_starts[run_of]) % TOUCH_ROWS
    starts = np.flatnonzero(column == 0)
    events = blank(len(starts), Kind.TOUCH)
    events["last_use"] = stamps[starts]
    events["length"] = np.diff(np.append(starts, len(rows)))
    touched_rows(events)[np.cumsum(column == 0) - 1, column] = rows
    return events


def touched_rows(touches: Records) -> npt.NDArray[np.uint32]:
    """Return the row ids of contiguous TOUCH events as a view of shape (n, 20)."""
    return touches.view("<u4").reshape(-1, RECORD_BYTES // 4)[:, -TOUCH_ROWS:]

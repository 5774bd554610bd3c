"""The way from a key to its row: an extendible hash table of u32 rows, driven by numpy.

Rows lie in *buckets* of 16 slots; beside each slot stands one byte of its key's hash, its *print*
(0 = empty slot). A look-up gathers the 16 prints of a bucket, compares them all at once, and
compares the full identity only where a print agrees, so answers are exact. A row whose bucket is
full goes to the next one; ``passed`` counts, per bucket, the rows that went on, and goes down again
when they leave, so there are no tombstones and a miss stops at the first bucket nobody passed.

512 buckets make a *segment*; a directory of 2^depth entries maps the top bits of a hash to its
segment (Fagin et al., Extendible Hashing, ACM TODS 4(3), 1979). The table grows by splitting one
segment at a time: 5,300 to 7,000 rows are placed anew, which takes 0.5 to 1 ms. A small insert
rarely meets more than one split; none of 64 keys took over 2 ms on the way to 3 million rows.
Segments split at different loads (65 to 85 %), so that they do not all split at once and the
table's bytes per row stay between 8 and 11 instead of jumping from 6 to 13.

The hash is multilinear over the identity's u32 words with random 64-bit multipliers (Lemire and
Kaser, Strongly universal string hashing is fast, 2014), then mixed, so a client that chooses its
keys cannot choose their buckets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.columns import NONE, U8, U32, U64, Arrays, Bools, Columns, identity_words
from kvstore.keys import MAX_KEY_BYTES

Positions = npt.NDArray[np.intp]

SLOTS = 16
BUCKETS = 512
SEGMENT_SLOTS = SLOTS * BUCKETS
_MAX_DEPTH = 20
_CHUNK = 1 << 14
_LEAST_LOAD, _LOAD_SPREAD = 0.65, 0.20
_GOLDEN = 0.6180339887498949
# Made once: a numpy scalar costs as much as a small operation, and look-ups of one key count.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_BITS_29, _BITS_32 = np.uint64(29), np.uint64(32)
_BUCKET_BITS = np.uint64(16)
_ONE = np.uint8(1)
_SEGMENT_BYTES = SEGMENT_SLOTS * 5 + BUCKETS


class HashTable(Arrays):
    """Rows of ``columns`` by their identity. It holds row ids only; keys stay in the columns."""

    rows: U32
    prints: U8
    passed: U8

    def __init__(self, columns: Columns, seed: int) -> None:
        self._room = 1
        shapes = {
            "rows": (np.uint32, (BUCKETS * SLOTS,)),
            "prints": (np.uint8, (BUCKETS, SLOTS)),
            "passed": (np.uint8, (BUCKETS,)),
        }
        super().__init__(dict(shapes), self._room)
        self._columns = columns
        self._multipliers = _multipliers(seed, identity_words(MAX_KEY_BYTES))
        self._depth = 1
        self._shift = np.uint64(63)
        self._directory = np.zeros(2, np.intp)
        self._local_depth = np.zeros(1, np.int64)
        self._counts = np.zeros(1, np.int64)
        self._limits = np.array([_limit(0)])

    def _bind(self, name: str) -> None:
        # Seen flat: a bucket's number is segment * 512 + bucket, a slot's is bucket * 16 + slot.
        super()._bind(name)
        flat = {"rows": (-1,), "prints": (-1, SLOTS), "passed": (-1,)}[name]
        setattr(self, name, getattr(self, name).reshape(flat))

    @property
    def bytes(self) -> int:
        """Resident bytes of all segments and the directory."""
        return len(self._counts) * (_SEGMENT_BYTES + 24) + self._directory.nbytes

    def __len__(self) -> int:
        return int(self._counts.sum())

    def digest(self, identities: U32) -> U64:
        """Return the 64-bit hash of each identity, shape (n, words). Zero words add nothing, so
        wider columns do not change it."""
        multipliers = self._multipliers[: identities.shape[1]]
        hashes: U64 = identities.astype(np.uint64) @ multipliers
        hashes ^= hashes >> _BITS_32
        hashes *= _MIX
        hashes ^= hashes >> _BITS_29
        return hashes

    def _home(self, hashes: U64) -> tuple[Positions, U8]:
        bucket = (hashes >> _BUCKET_BITS).astype(np.intp)
        bucket &= BUCKETS - 1
        bucket += self._segment(hashes) * BUCKETS
        return bucket, np.maximum(hashes.astype(np.uint8), _ONE)

    def _segment(self, hashes: U64) -> Positions:
        return self._directory.take((hashes >> self._shift).astype(np.intp))

    def find(self, identities: U32) -> U32:
        """Return the row of each identity, NONE where there is none. Duplicates are fine."""
        if len(identities) <= _CHUNK:
            return self._find(identities)
        pieces = range(0, len(identities), _CHUNK)
        return np.concatenate([self._find(identities[at : at + _CHUNK]) for at in pieces])

    def _find(self, identities: U32) -> U32:
        found = np.full(len(identities), NONE, np.uint32)
        bucket, prints = self._home(self.digest(identities))
        which = np.arange(len(identities))
        for _ in range(BUCKETS):
            agree = self.prints.take(bucket, axis=0) == prints[:, None]
            hits = agree.ravel().nonzero()[0]
            at = hits >> 4
            rows = self.rows.take((bucket.take(at) << 4) + (hits & 15))
            asked = which.take(at)
            same = self._equal(rows, identities.take(asked, axis=0))
            found[asked[same]] = rows[same]
            passed = self.passed.take(bucket)
            if not passed.any():
                break
            on = ((passed != 0) & (found.take(which) == NONE)).nonzero()[0]
            which, prints, bucket = which.take(on), prints.take(on), _next(bucket.take(on))
        return found

    def _equal(self, rows: U32, identities: U32) -> Bools:
        differ = self._columns.identities.take(rows, axis=0).view(np.uint64)
        differ ^= identities.view(np.uint64)
        either: U64 = differ[:, 0]
        # Short rows: or-ing column by column is faster than a reduction along each row.
        for word in range(1, differ.shape[1]):
            either |= differ[:, word]
        same: Bools = either == 0
        return same

    def insert(self, rows: U32, identities: U32) -> None:
        """File new rows. Their identities must be distinct and absent."""
        hashes = self.digest(identities)
        self._make_room(hashes)
        self._place(rows, hashes)
        self._counts += np.bincount(self._segment(hashes), minlength=len(self._counts))

    def _make_room(self, hashes: U64) -> None:
        while True:
            coming = np.bincount(self._segment(hashes), minlength=len(self._counts))
            over = np.flatnonzero((self._counts + coming > self._limits) & (coming > 0))
            if not len(over):
                return
            for segment in over.tolist():
                self._split(segment)

    def _split(self, segment: int) -> None:
        depth = int(self._local_depth[segment])
        if depth >= _MAX_DEPTH:
            raise MemoryError("the index is full: too many keys share the start of their hash")
        if depth == self._depth:
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
            self._shift = np.uint64(64 - self._depth)
        new = self._append_segment(depth + 1)
        entries = np.flatnonzero(self._directory == segment)
        self._directory[entries[len(entries) // 2 :]] = new
        self._local_depth[segment] = depth + 1
        self._refile(segment)

    def _append_segment(self, depth: int) -> int:
        new = len(self._counts)
        if new == self._room:
            larger = new + max(1, new // 8)
            self._grow(larger)
            self._room = larger
        self._counts = np.append(self._counts, 0)
        self._local_depth = np.append(self._local_depth, depth)
        self._limits = np.append(self._limits, _limit(new))
        return new

    def _refile(self, segment: int) -> None:
        buckets = slice(segment * BUCKETS, (segment + 1) * BUCKETS)
        slots = slice(segment * SEGMENT_SLOTS, (segment + 1) * SEGMENT_SLOTS)
        rows = self.rows[slots][self.prints[buckets].reshape(-1) != 0]
        self.prints[buckets] = 0
        self.passed[buckets] = 0
        self._counts[segment] = 0
        hashes = self.digest(self._columns.identities.take(rows, axis=0))
        self._fill(rows, *self._home(hashes))
        self._counts += np.bincount(self._segment(hashes), minlength=len(self._counts))

    def _fill(self, rows: U32, bucket: Positions, prints: U8) -> None:
        """Place rows into buckets that are empty: the n-th row of a bucket takes its n-th slot."""
        order = np.argsort(bucket, kind="stable")
        rows, bucket, prints = rows[order], bucket[order], prints[order]
        at = np.arange(len(rows))
        first = np.append(True, bucket[1:] != bucket[:-1])[: len(rows)]
        rank = at - np.maximum.accumulate(np.where(first, at, 0))
        fits = rank < SLOTS
        slot = (bucket * SLOTS + rank)[fits]
        self.rows[slot] = rows[fits]
        self.prints.reshape(-1)[slot] = prints[fits]
        self._settle(rows[~fits], bucket[~fits], prints[~fits])

    def _place(self, rows: U32, hashes: U64) -> None:
        for at in range(0, len(rows), _CHUNK):
            self._settle(rows[at : at + _CHUNK], *self._home(hashes[at : at + _CHUNK]))

    def _settle(self, rows: U32, bucket: Positions, prints: U8) -> None:
        while len(rows):
            free = self.prints.take(bucket, axis=0) == 0
            slot = bucket * SLOTS + free.argmax(axis=1)
            full = self.prints.reshape(-1).take(slot) != 0
            # Everybody writes to the slot it saw free; who finds itself there afterwards has won.
            self.rows[slot[~full]] = rows[~full]
            won = ~full & (self.rows.take(slot) == rows)
            self.prints.reshape(-1)[slot[won]] = prints[won]
            if full.any():
                self._pass(bucket[full], 1)
                bucket = np.where(full, _next(bucket), bucket)
            left = ~won
            rows, bucket, prints = rows[left], bucket[left], prints[left]

    def _pass(self, bucket: Positions, change: int) -> None:
        """Add ``change`` to the count of rows that went past these buckets."""
        unique, times = np.unique(bucket, return_counts=True)
        counts = self.passed[unique].astype(np.int64) + change * times
        # A segment splits at 85 %, so 255 rows past one bucket cannot happen short of a bad hash;
        # if it does, the count stays there and costs time, never an answer.
        stuck = self.passed[unique] == 255
        self.passed[unique] = np.where(stuck, 255, np.minimum(counts, 255)).astype(np.uint8)

    def delete(self, rows: U32) -> None:
        """Take rows out. Each must be filed, and named once; raises KeyError otherwise."""
        hashes = self.digest(self._columns.identities.take(rows, axis=0))
        bucket, _ = self._home(hashes)
        segments = self._segment(hashes)
        for _ in range(BUCKETS):
            slots = self.rows.reshape(-1, SLOTS).take(bucket, axis=0) == rows[:, None]
            slots &= self.prints.take(bucket, axis=0) != 0
            hits = np.flatnonzero(slots)
            self.prints.reshape(-1)[bucket[hits >> 4] * SLOTS + (hits & 15)] = 0
            if len(hits) == len(rows):
                break
            on = ~slots.any(axis=1)
            rows, bucket = rows[on], bucket[on]
            self._pass(bucket, -1)
            bucket = _next(bucket)
        else:
            raise KeyError(f"row {rows[0]} is not filed")
        self._counts -= np.bincount(segments, minlength=len(self._counts))


def _next(bucket: Positions) -> Positions:
    """Return the bucket after each, within its segment."""
    return (bucket & ~(BUCKETS - 1)) | (bucket + 1 & BUCKETS - 1)


def _limit(segment: int) -> int:
    """Return the rows at which a segment splits, spread evenly over the segments."""
    share = segment * _GOLDEN % 1.0
    return int(SEGMENT_SLOTS * (_LEAST_LOAD + _LOAD_SPREAD * share))


def _multipliers(seed: int, count: int) -> U64:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)

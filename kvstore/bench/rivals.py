"""What the index is measured against: the same operations on a dict, an OrderedDict and LMDB.

Every structure answers in the same terms, so that answers can be compared before anything is timed.
``prepare`` turns keys off the wire, an array of shape (n, length), into the form that a structure
works on: for ours the array itself, for the others a list of ``bytes``.
"""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import lmdb
import numpy as np

from kvstore.eviction import Policy, make
from kvstore.index import Index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.columns import U32
    from kvstore.keys import KeyArray

Keys = TypeVar("Keys")

SPACE = 1 << 16
PAYLOAD_BYTES = 1 << 20
_MAP_BYTES = 8 << 30


class Structure(ABC, Generic[Keys]):
    """One way to know which blocks are cached. ``note`` says what its figures leave out."""

    name: ClassVar[str]
    note: ClassVar[str] = ""
    evicts: ClassVar[bool] = True

    @abstractmethod
    def prepare(self, keys: KeyArray) -> Keys:
        """Return the keys in the form that the other methods take."""

    @abstractmethod
    def insert(self, keys: Keys) -> None:
        """File keys that are distinct and absent."""

    @abstractmethod
    def contains(self, keys: Keys) -> Sequence[bool]:
        """Tell which keys are filed."""

    @abstractmethod
    def prefix(self, keys: Keys) -> int:
        """Count keys up to the first that is not filed."""

    def touch(self, keys: Keys) -> None:
        """Note a use of filed keys; the first becomes the newest."""
        raise NotImplementedError

    def evict(self, count: int) -> None:
        """Forget the keys that were used longest ago."""
        raise NotImplementedError

    @abstractmethod
    def bytes_per_block(self) -> float:
        """Return the memory of all that is filed, divided by the number of keys."""

    @abstractmethod
    def look_up(self, keys: Keys) -> int:
        """Do what a request for a chain does: count the prefix, note its use."""

    @abstractmethod
    def extend(self, keys: Keys, found: int) -> None:
        """Add the rest of the chain that was just looked up, and note the use of all of it, so that
        its end is older than its start."""

    def close(self) -> None:
        """Let go of files, if there are any."""
        return


class OurIndex(Structure["KeyArray"]):
    """kvstore.index with the LRU policy. It does more than the others: it keeps size, place,
    generation, parent and leases of each block, and evicts leaves only."""

    name = "kvstore index"
    note = "size, place, parent, lease ... of each block and the leaf rule included"

    def __init__(self) -> None:
        self.policy: Policy = make("lru")
        self.index = Index(policy=self.policy)
        self._filed = 0
        self._looked_up: U32 = np.zeros(0, np.uint32)

    def prepare(self, keys: KeyArray) -> KeyArray:
        return keys

    def insert(self, keys: KeyArray) -> None:
        self._insert(keys)

    def _insert(self, keys: KeyArray) -> U32:
        count = len(keys)
        sizes = np.full(count, PAYLOAD_BYTES, np.uint32)
        numbers = np.arange(self._filed, self._filed + count, dtype=np.uint64)
        rows = self.index.insert(SPACE, keys, sizes, numbers, 0)
        self.index.commit(rows, numbers, numbers)
        self._filed += count
        return rows

    def contains(self, keys: KeyArray) -> Sequence[bool]:
        return cast("Sequence[bool]", self.index.contains(SPACE, keys))

    def prefix(self, keys: KeyArray) -> int:
        return self.index.prefix(SPACE, keys)

    def touch(self, keys: KeyArray) -> None:
        self.index.touch(self.index.find(SPACE, keys), 0)

    def look_up(self, keys: KeyArray) -> int:
        rows = self.index.find(SPACE, keys)
        there = self.index.readable(rows)
        found = len(rows) if there.all() else int(there.argmin())
        self._looked_up = rows[:found]
        self.index.touch(self._looked_up, 0)
        return found

    def extend(self, keys: KeyArray, found: int) -> None:
        new = self._insert(keys[found:])
        rows = np.concatenate([self._looked_up, new])
        first = max(found, 1)
        self.index.link(rows[first:], rows[first - 1 : -1])
        self.index.touch(rows, 0)

    def choose(self, count: int) -> U32:
        """Return the ``count`` rows that LRU and the leaf rule would evict."""
        index = self.index
        need = count * int(index.live_bytes // max(index.blocks, 1))
        window = count
        while True:
            candidates = self.policy.candidates(index, window, 0.0)
            victims = index.victims(candidates, need, 0.0)
            if len(victims) >= count or len(candidates) < window:
                return victims
            window *= 2

    def evict(self, count: int) -> None:
        self.index.free(self.index.remove(self.choose(count)))

    def bytes_per_block(self) -> float:
        self.choose(1)  # Now the policy remembers what it ever will.
        return self.index.index_bytes_per_block


class Rival(Structure[list[bytes]]):
    """A structure of Python's or of somebody else's: keys are objects."""

    def prepare(self, keys: KeyArray) -> list[bytes]:
        blob, length = keys.tobytes(), keys.shape[1]
        return [blob[at : at + length] for at in range(0, len(blob), length)]

    def look_up(self, keys: list[bytes]) -> int:
        found = self.prefix(keys)
        if self.evicts:
            self.touch(keys[:found])
        return found

    def extend(self, keys: list[bytes], found: int) -> None:
        self.insert(keys[found:])
        if self.evicts:
            self.touch(keys)


class PlainDict(Rival):
    """dict of bytes to int."""

    name = "dict"
    note = "no order of use, no eviction"
    evicts = False

    def __init__(self) -> None:
        self.filed: dict[bytes, int] = {}

    def insert(self, keys: list[bytes]) -> None:
        start = len(self.filed)
        self.filed.update(zip(keys, range(start, start + len(keys)), strict=True))

    def contains(self, keys: list[bytes]) -> Sequence[bool]:
        filed = self.filed
        return [key in filed for key in keys]

    def prefix(self, keys: list[bytes]) -> int:
        filed = self.filed
        for place, key in enumerate(keys):
            if key not in filed:
                return place
        return len(keys)

    def bytes_per_block(self) -> float:
        """The table, one bytes object and one int object each."""
        key = next(iter(self.filed))
        objects = sys.getsizeof(key) + sys.getsizeof(1 << 20)
        return sys.getsizeof(self.filed) / len(self.filed) + objects


class OrderedLru(PlainDict):
    """OrderedDict whose order is the order of use."""

    name = "OrderedDict LRU"
    note = "no leaf rule"
    evicts = True

    def __init__(self) -> None:
        self.ordered: OrderedDict[bytes, int] = OrderedDict()
        self.filed = self.ordered

    def touch(self, keys: list[bytes]) -> None:
        move = self.ordered.move_to_end
        for key in reversed(keys):
            move(key)

    def evict(self, count: int) -> None:
        pop = self.ordered.popitem
        for _ in range(count):
            pop(last=False)


class LmdbMap(Rival):
    """LMDB, one transaction per batch, without any sync."""

    name = "LMDB"
    note = "in a temp dir, writemap, no sync at all; no order of use, no eviction"
    evicts = False

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvstore-bench-")
        self._environment = lmdb.open(
            self._directory.name,
            map_size=_MAP_BYTES,
            writemap=True,
            sync=False,
            metasync=False,
            lock=False,
        )

    def insert(self, keys: list[bytes]) -> None:
        value = bytes(8)
        with self._environment.begin(write=True) as transaction:
            transaction.cursor().putmulti([(key, value) for key in keys])

    def contains(self, keys: list[bytes]) -> Sequence[bool]:
        # getmulti is slower than single gets.
        with self._environment.begin(buffers=True) as transaction:
            get = transaction.get
            return [get(key) is not None for key in keys]

    def prefix(self, keys: list[bytes]) -> int:
        with self._environment.begin(buffers=True) as transaction:
            get = transaction.get
            for place, key in enumerate(keys):
                if get(key) is None:
                    return place
        return len(keys)

    def bytes_per_block(self) -> float:
        """Pages used in the file, which are page cache when in use."""
        pages = int(self._environment.info()["last_pgno"]) + 1
        return (
            pages
            * int(self._environment.stat()["psize"])
            / int(self._environment.stat()["entries"])
        )

    def close(self) -> None:
        self._environment.close()
        self._directory.cleanup()


ALL: tuple[type[Structure[Any]], ...] = (OurIndex, PlainDict, OrderedLru, LmdbMap)

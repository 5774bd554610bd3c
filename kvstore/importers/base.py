"""The contract of importers: find what may be a block, read it, say what cannot be taken.

None of the directories that are imported has checksums: a file is believed if its name and its size
are right, and every block gets a label that says so. Sizes are judged among files that must be
alike: the most frequent one is taken for the true one unless somebody knows better.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvstore import files
from kvstore.backends.base import Finding
from kvstore.errors import CorruptStore, NotFound
from kvstore.keys import MAX_BLOCK_BYTES, NamespaceRecord, namespace_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

HARMLESS = ("temporary", "foreign", "duplicate")
"""Kinds of findings by which no block is lost."""


@dataclass(frozen=True)
class Space:
    """A namespace as its source knows it; ``owner`` is the user of a private one."""

    record: NamespaceRecord
    owner: int | None = None
    id: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", namespace_id(self.record))


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that may be taken. ``length`` is its bytes, ``used`` seconds since 1970, ``path`` its
    file. Those with the same ``alike`` in the same namespace and shard have the same length."""

    space: Space
    shard: int
    key: bytes
    length: int
    used: float
    path: Path
    alike: str = ""
    parent: bytes = b""
    number: int = 0
    """What its source finds it by, where that is no path."""

    @property
    def group(self) -> tuple[bytes, int, int]:
        """What blocks have in common that are put together."""
        return self.space.id, self.shard, len(self.key)


@dataclass(frozen=True, slots=True)
class Taken:
    """A block that was read, ``reason`` why it was not."""

    label: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin of an entry: seconds since 1970."""

    entry: Entry
    until: float
    firm: bool


@dataclass
class Listing:
    """What a source has, each block behind its parent and else by age, and what is wrong there.

    ``ghosts`` have no block but a parent, so that a chain does not end with them; each is before
    its parent.
    """

    entries: list[Entry] = field(default_factory=list)
    ghosts: list[Entry] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)


class Importer(ABC):
    """One kind of directory. ``fields`` are added to every namespace; ``length`` is what a block
    has in bytes where the files may be longer. It is open between ``listing`` and ``close``."""

    name: ClassVar[str]

    def __init__(
        self,
        root: Path,
        fields: Mapping[str, str | int] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        self.root = root
        self.fields = dict(fields or {})
        self.length = length

    @abstractmethod
    def look(self) -> Iterator[Entry | Finding]:
        """Tell every file below ``root`` by its name. Sizes are judged by the caller."""

    def listing(self) -> Listing:
        """Return what can be taken. Raises NotFound, PermissionDenied, EngineError."""
        if not self.root.is_dir():
            raise NotFound(f"there is no directory {self.root}", "check the path")
        listing, found = Listing(), list[Entry]()
        try:
            for item in self.look():
                (listing.findings if isinstance(item, Finding) else found).append(item)  # type: ignore[arg-type]
        except OSError as error:
            raise files.translate(error, f"read {error.filename or self.root}") from error
        good = _of_one_key_length(_of_one_size(found, self.length, listing), listing)
        listing.entries = _once(sorted(good, key=lambda one: (one.group, one.used)), listing)
        return listing

    def read(self, entries: Sequence[Entry], targets: Sequence[memoryview]) -> list[Taken]:
        """Fill each target (``length`` bytes) with a block; say which could not be read."""
        label = f"origin unverified: {self.name}"
        reasons = map(read_file, entries, targets)
        return [Taken(label, reason) for reason in reasons]

    def close(self) -> None:  # noqa: B027
        """Let go of what ``listing`` opened. May be called twice."""

    def space(self, record: Mapping[str, object]) -> Space:
        """Return a namespace of this source: what its files say, and the fields of the user."""
        return Space({"source": self.name, **_plain(record), **self.fields})

    def finding(self, kind: str, path: Path | str, detail: str) -> Finding:
        return Finding(kind, os.fspath(path), detail)


def read_file(entry: Entry, target: memoryview) -> str:
    """Fill ``target`` with the beginning of a file; return why that failed, "" if it did not.

    A file that its owner writes meanwhile is not taken: it could be half of this and half of that.
    """
    try:
        with files.open_regular(entry.path) as opened:
            before = os.fstat(opened.fileno())
            filled = files.read_into(opened.fileno(), target)
            if filled < len(target):
                return f"only {filled} of {len(target)} bytes are there"
            after = os.fstat(opened.fileno())
    except (OSError, CorruptStore) as error:
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return "" if same else "it changed while it was read"


def _plain(record: Mapping[str, object]) -> dict[str, object]:
    """Return what a namespace record may hold: no truth values, no fractions, nothing absent."""
    return {name: _word(value) for name, value in record.items() if value is not None}


def _word(value: object) -> object:
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, list):
        return [_word(item) for item in value if item is not None]
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (str, int)) else str(value)


# -- judging --------------------------------------------------------------------------------------


def _of_one_size(found: Iterable[Entry], wanted: int | None, listing: Listing) -> list[Entry]:
    """Return entries of the right size; with ``wanted`` longer files are taken up to that."""
    entries = []
    for one in found:
        if not one.length:
            listing.findings.append(Finding("empty", str(one.path), "it has no bytes"))
        elif (wanted or one.length) > MAX_BLOCK_BYTES:
            listing.findings.append(Finding("oversized", str(one.path), "it is over 64 MiB"))
        else:
            entries.append(one)
    counts: dict[object, Counter[int]] = {}
    for one in entries:
        counts.setdefault((one.group, one.alike), Counter())[one.length] += 1
    good = []
    for one in entries:
        sizes = counts[one.group, one.alike]
        # Of several that are as frequent the largest: files are cut off more often than extended.
        usual = wanted or max(sizes, key=lambda size: (sizes[size], size))
        if one.length < usual or (one.length > usual and not wanted):
            kind = "truncated" if one.length < usual else "oversized"
            detail = f"it has {one.length} bytes, the others {usual}"
            listing.findings.append(Finding(kind, str(one.path), detail))
        else:
            good.append(one if one.length == usual else _cut(one, usual))
    return good


def _cut(entry: Entry, length: int) -> Entry:
    return Entry(
        *(entry.space, entry.shard, entry.key, length, entry.used, entry.path, entry.alike)
    )


def _of_one_key_length(entries: list[Entry], listing: Listing) -> list[Entry]:
    """Return entries whose keys are as long as most in their namespace."""
    counts: dict[bytes, Counter[int]] = {}
    for one in entries:
        counts.setdefault(one.space.id, Counter())[len(one.key)] += 1
    good = []
    for one in entries:
        usual = counts[one.space.id].most_common(1)[0][0]
        if len(one.key) == usual:
            good.append(one)
            continue
        detail = f"its key has {len(one.key)} bytes, most others {usual}"
        listing.findings.append(Finding("key-length", str(one.path), detail))
    return good


def _once(entries: list[Entry], listing: Listing) -> list[Entry]:
    """Return each block once, the one that was used last."""
    last = {(one.group, one.key): one for one in entries}
    for one in entries:
        kept = last[one.group, one.key]
        if kept is not one:
            detail = f"the same block as {kept.path}"
            listing.findings.append(Finding("duplicate", str(one.path), detail))
    return list(last.values())

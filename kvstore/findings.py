"""Everything that fsck may find, in one table: docs/fsck.md is made from it.

An id never changes its meaning. What engines find has kinds of their own (``backends/base.py``);
:data:`OF_ENGINES` says which id each one is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Severity(StrEnum):
    """``damage``: blocks are lost, or may be. ``repairable``: nothing is lost, and all can be put
    right. ``note``: worth knowing, no fault; it does not change the exit code."""

    DAMAGE = "damage"
    REPAIRABLE = "repairable"
    NOTE = "note"


class Class(NamedTuple):
    """What an id means, and what ``--repair`` does about it."""

    severity: Severity
    meaning: str
    repair: str


D, R, N = Severity.DAMAGE, Severity.REPAIRABLE, Severity.NOTE
_RECOVER = "nothing: run `kvstore recover`"
_ANEW = "makes the store anew out of the raw files, as `kvstore recover` does"
_NOTHING = "nothing"
_DROP = "copies what can be read to quarantine, then drops the block: a miss"
_AGAIN = "writes the block again"

CLASSES: Mapping[str, Class] = {
    # The directory.
    "store-file": Class(D, "STORE.json is damaged", _RECOVER),
    "mode": Class(R, "the owner lacks a right, or others have one", "sets the mode"),
    "owner": Class(
        D, "a file of another user: the daemon may not reach it", "nothing: run `chown`"
    ),
    "missing-directory": Class(R, "a directory of the store is gone", "makes it"),
    "leftover": Class(N, "a file that was not finished before a kill", "removes it"),
    "foreign": Class(
        R,
        "a link, device, pipe or name that is not the store's",
        "moves it to quarantine; a record gets its name",
    ),
    "unknown-file": Class(N, "somebody else's file beside those of the store", _NOTHING),
    "hard-link": Class(N, "a file with a second name, as of a backup", _NOTHING),
    "namespace-file": Class(
        D, "the record of a namespace is damaged", "moves it to quarantine; its blocks stay"
    ),
    "namespace-unknown": Class(
        N,
        "a namespace without a record; whoever opens it by its record has its blocks",
        _NOTHING,
    ),
    # The index.
    "journal-torn": Class(R, "journal or checkpoint is damaged or cut off", "scans all headers"),
    "journal-missing": Class(
        R,
        "no checkpoint with all journals that follow it",
        "scans all headers",
    ),
    "shared-place": Class(D, "two blocks of the index in one slot", "keeps the one that is there"),
    "wrong-place": Class(R, "a record in another slot than the index says", "corrects the index"),
    "wrong-length": Class(D, "a record of another length than the index says", _DROP),
    "missing": Class(D, "the index has a block, but no record is there", "drops it: a miss"),
    "orphan": Class(R, "a record that the index does not know", "takes it into the index"),
    "superseded": Class(R, "an old version of a block that has a newer one", "removes it"),
    "unfinished": Class(N, "a version that a kill left, as the journal says", "removes it"),
    "unsynced": Class(N, "lost with the power before it was synced", "drops it: a miss"),
    # The engine.
    "engine-unopenable": Class(D, "the engine does not open", _ANEW),
    "engine-died": Class(D, "the process that looked at the engine died of it", _ANEW),
    "bad-tree": Class(D, "the library's own structure is damaged", _ANEW),
    "bad-superblock": Class(D, "a super-block without a valid header", _ANEW),
    "superblock-header": Class(
        R, "a super-block's header is damaged, but is known", "writes it again"
    ),
    "cut-file": Class(
        D, "a file of the engine was cut off", "makes it whole; blocks in it are lost"
    ),
    # Records.
    "header-damaged": Class(D, "a record without a valid header", _DROP),
    "payload-damaged": Class(D, "a payload that is not what the header says", _DROP),
    "payload-repairable": Class(
        R, "a damaged payload that its parity chunk, or memory, can bring back", _AGAIN
    ),
    "parity-damaged": Class(R, "a parity chunk is damaged, the payload is whole", _AGAIN),
    "truncated": Class(D, "a record that was cut off", _DROP),
    "wrong-record": Class(D, "a valid record of another block or version in this place", _DROP),
    "wrong-name": Class(
        R, "a record under the name of another", "gives it its name, or moves it to quarantine"
    ),
    "other-store": Class(R, "a record of another store", "moves it to quarantine"),
    "unreadable": Class(D, "the device or the library refuses to read it", _NOTHING),
    "padding": Class(N, "bytes that carry nothing are not zero: a correct hit", _NOTHING),
    "free-slot": Class(N, "a slot that no block is in has no valid record", _NOTHING),
    # Room.
    "over-capacity": Class(N, "the store takes more than its capacity", "nothing: serving evicts"),
    "quarantine-full": Class(N, "quarantine takes its whole share: empty it", _NOTHING),
}

OF_ENGINES: Mapping[str, str] = {
    "bad-header": "header-damaged",
    "too-long": "header-damaged",
    "short": "truncated",
    "misplaced": "wrong-name",
    "wrong-name": "wrong-name",
    "wrong-record": "wrong-record",
    "other-store": "other-store",
    "unreadable": "unreadable",
    "foreign": "foreign",
    "leftover": "leftover",
    "bad-tree": "bad-tree",
    "bad-superblock": "bad-superblock",
    "missing-superblock": "bad-superblock",
    "bad-copy": "superblock-header",
}
"""By kind of what an engine's ``scan`` or ``check`` finds. ``short`` of a file that is no record
is ``cut-file``."""


def id_of(kind: str) -> str:
    """Return the id for what an engine found; one from elsewhere may have kinds of its own."""
    return OF_ENGINES.get(kind, "foreign")


@dataclass(frozen=True, slots=True)
class Found:
    """One finding. ``path`` is below the store's directory; of a block there are its names, too,
    in hex. ``detail`` says in words what is wrong."""

    id: str
    path: str
    detail: str
    namespace: str = ""
    shard: int = 0
    key: str = ""
    generation: int = 0
    bytes: int = field(default=0)

    @property
    def severity(self) -> Severity:
        return CLASSES[self.id].severity

    def document(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "type": "finding",
            "id": self.id,
            "severity": str(self.severity),
            "path": self.path,
            "detail": self.detail,
            "namespace": self.namespace or None,
            "shard": self.shard if self.namespace else None,
            "key": self.key or None,
            "generation": self.generation or None,
        }


def table() -> list[str]:
    """Return the table as lines of Markdown."""
    rows = [
        f"| `{name}` | {one.severity} | {one.meaning} | {one.repair} |"
        for name, one in CLASSES.items()
    ]
    return ["| id | severity | meaning | what `--repair` does |", "|---|---|---|---|", *rows]

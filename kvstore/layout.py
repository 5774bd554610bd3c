"""The directory of a store: STORE.json, its parts, the lock that keeps others out.

::

    STORE/
      STORE.json      what this store is; see StoreRecord
      lock            flock: one daemon or one offline command
      namespaces/     one JSON file per namespace id
      blocks/         the engine's own, plus journal and checkpoint
      incoming/       files dropped here are verified, then moved in
      quarantine/     damaged records, with manifest.jsonl

A change of engine makes ``blocks-<engine>/`` beside ``blocks/``; see :mod:`kvstore.migrate`.

Opening never rewrites the format. ``features`` are three lists of names, as in ext4: a program
that does not know a name under ``compat`` may do everything, under ``ro_compat`` may only read,
under ``incompat`` must not touch the store.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import files, node
from kvstore.errors import (
    CorruptStore,
    FormatUnsupported,
    KVStoreError,
    ReadOnly,
    StoreExists,
    StoreNotFound,
)
from kvstore.lock import Lock as Lock

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

STORE_FILE = "STORE.json"
LOCK = "lock"
NAMESPACES = "namespaces"
BLOCKS = "blocks"
INCOMING = "incoming"
QUARANTINE = "quarantine"
FORMAT = 1
MAX_STORE_FILE_BYTES = 1 << 20
MAX_OPENS = (1 << 32) - 1
_MAX = (1 << 64) - 1
PARITY = "parity"
"""Feature: every record has room for a parity chunk. Who does not know it reads all payloads, but
would count and write records that are too short."""
KNOWN_FEATURES: Mapping[str, frozenset[str]] = {
    "compat": frozenset(),
    "ro_compat": frozenset({PARITY}),
    "incompat": frozenset(),
}
_LOST_AND_FOUND = "lost+found"


@dataclass(frozen=True)
class Previous:
    """What the store was before its engine was changed: enough to go back, as long as the copy has
    all of its blocks and no others.

    ``blocks`` is its directory, which takes ``bytes`` on the device; ``copied`` blocks came along,
    none of a generation above ``generation``.
    """

    engine: str
    engine_options: Mapping[str, object]
    blocks: str
    epoch: int
    copied: int
    generation: int
    bytes: int


@dataclass(frozen=True)
class StoreRecord:
    """STORE.json. ``uuid`` has 16 bytes; ``blocks`` is the name of a directory in the store.

    ``epoch`` goes up when journal and checkpoint of before must not be believed any more, ``opens``
    with every opening for writing. ``previous`` is what an earlier engine left, kept until it is
    deleted. ``features`` and ``unknown`` keep what a later version wrote.
    """

    uuid: bytes
    engine: str
    capacity_bytes: int
    created: str
    engine_options: Mapping[str, object] = field(default_factory=dict)
    blocks: str = BLOCKS
    epoch: int = 1
    opens: int = 0
    format: int = FORMAT
    features: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(KNOWN_FEATURES, ())
    )
    previous: Previous | None = None
    unknown: Mapping[str, object] = field(default_factory=dict)

    @property
    def parity(self) -> bool:
        """Whether records have a parity chunk."""
        return PARITY in self.features["ro_compat"]

    def with_parity(self) -> StoreRecord:
        """Return the record of a store whose records have a parity chunk."""
        names = {*self.features["ro_compat"], PARITY}
        return replace(self, features={**self.features, "ro_compat": tuple(sorted(names))})

    @property
    def read_only_reason(self) -> str:
        """Why this program may only read the store; empty if it may write."""
        strange = set(self.features["ro_compat"]) - KNOWN_FEATURES["ro_compat"]
        if strange:
            return f"it has features that only a newer kvstore may write: {_listed(strange)}"
        return ""

    @property
    def writable(self) -> bool:
        return not self.read_only_reason


def new_record(
    *, engine: str, capacity: int, engine_options: Mapping[str, object] | None = None
) -> StoreRecord:
    """Return the record of a store that is being made now, with a fresh random uuid."""
    return StoreRecord(
        uuid=uuid.uuid4().bytes,
        engine=engine,
        capacity_bytes=capacity,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine_options={"fanout": 256} if engine_options is None else engine_options,
    )


# -- STORE.json -----------------------------------------------------------------------------------


def read(path: Path) -> StoreRecord:
    """Return the record of the store at ``path``, changing nothing.

    Raises StoreNotFound, FormatUnsupported (newer than this program), CorruptStore (STORE.json
    makes no sense), PermissionDenied, EngineError.
    """
    try:
        data = files.read_regular(path / STORE_FILE, MAX_STORE_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _corrupt(path, "it is a link") from None
        raise files.translate(error, f"read {path / STORE_FILE}") from error
    except CorruptStore as error:
        raise _corrupt(path, error.message) from None
    return decode(data, path)


def _not_found(path: Path) -> StoreNotFound:
    if not path.exists():
        return StoreNotFound(
            f"there is no store at {path}",
            f"run kvstore create {path}, or check that its filesystem is mounted",
        )
    if not path.is_dir():
        return StoreNotFound(f"{path} is not a directory", "give the directory of a store")
    return StoreNotFound(
        f"{path} is not a store: it has no {STORE_FILE}",
        f"run kvstore create {path} if it is empty, kvstore recover {path} if it was a store",
    )


def _corrupt(path: Path, what: str) -> CorruptStore:
    return CorruptStore(
        f"{path / STORE_FILE} is damaged: {what}",
        f"restore it from a copy; without one, kvstore recover {path} makes another",
    )


def decode(data: bytes, path: Path) -> StoreRecord:
    """Return the record that the bytes of STORE.json spell; ``path`` is for messages."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise CorruptStore("it holds no JSON object")
        # The format comes first: in a newer one the other fields may mean anything.
        _check_format(document, path)
        return _record(document)
    except FormatUnsupported:
        raise
    except KVStoreError as error:
        raise _corrupt(path, error.message) from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"it is no JSON ({error})") from None


def _check_format(document: Mapping[str, object], path: Path) -> None:
    found = _integer(document, "format", 1, None)
    if found > FORMAT:
        raise FormatUnsupported(
            f"the store at {path} has format {found}, this program knows {FORMAT}",
            "use a newer kvstore",
        )
    strange = set(_features(document)["incompat"]) - KNOWN_FEATURES["incompat"]
    if strange:
        raise FormatUnsupported(
            f"the store at {path} has features this program does not know: {_listed(strange)}",
            "use a newer kvstore",
        )


def _record(document: dict[str, object]) -> StoreRecord:
    known = {name for name in StoreRecord.__dataclass_fields__ if name != "unknown"}
    return StoreRecord(
        uuid=_uuid(_text(document, "uuid")),
        engine=_name(document, "engine"),
        capacity_bytes=_integer(document, "capacity_bytes", 1, 1 << 63),
        created=_text(document, "created"),
        engine_options=_options(document),
        blocks=_name(document, "blocks"),
        epoch=_integer(document, "epoch", 0, _MAX),
        opens=_integer(document, "opens", 0, MAX_OPENS),
        format=_integer(document, "format", 1, None),
        features=_features(document),
        previous=_previous(document),
        unknown={name: value for name, value in document.items() if name not in known},
    )


def _options(document: Mapping[str, object]) -> dict[str, object]:
    options = document.get("engine_options", {})
    if not isinstance(options, dict):
        raise CorruptStore("engine_options is no object")
    return options


def _previous(document: Mapping[str, object]) -> Previous | None:
    found = document.get("previous")
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("blocks") == document.get("blocks"):
        raise CorruptStore("previous is no object, or has the directory of the blocks")
    return Previous(
        engine=_name(found, "engine"),
        engine_options=_options(found),
        blocks=_name(found, "blocks"),
        epoch=_integer(found, "epoch", 0, _MAX),
        copied=_integer(found, "copied", 0, _MAX),
        generation=_integer(found, "generation", 0, _MAX),
        bytes=_integer(found, "bytes", 0, _MAX),
    )


def _features(document: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    groups = document.get("features")
    if not isinstance(groups, dict):
        raise CorruptStore("features is no object")
    for group in {*KNOWN_FEATURES, *groups}:
        names = groups.get(group)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CorruptStore(f"features.{group} is no list of names")
    return {group: tuple(names) for group, names in groups.items()}


def _integer(document: Mapping[str, object], name: str, least: int, most: int | None) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CorruptStore(f"{name} is no integer")
    if value < least or (most is not None and value > most):
        raise CorruptStore(f"{name} is {value}, out of range")
    return value


def _text(document: Mapping[str, object], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise CorruptStore(f"{name} is no string")
    return value


def _name(document: Mapping[str, object], name: str) -> str:
    """Return a name that is one component of a path at most."""
    value = _text(document, name)
    if not value or len(value) > 255 or value in (".", "..") or set(value) & set("/\0"):
        raise CorruptStore(f"{name} is {value[:40]!r}, which is no plain name")
    return value


def _uuid(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 16:
        raise CorruptStore("uuid is not 32 hex digits")
    return value


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def encode(record: StoreRecord) -> bytes:
    """Return STORE.json in bytes: known fields in one order, then the unknown ones as they came."""
    document = {
        "format": record.format,
        "features": {group: list(names) for group, names in record.features.items()},
        "uuid": record.uuid.hex(),
        "engine": record.engine,
        "engine_options": dict(record.engine_options),
        "blocks": record.blocks,
        "epoch": record.epoch,
        "capacity_bytes": record.capacity_bytes,
        "created": record.created,
        "opens": record.opens,
        **({"previous": asdict(record.previous)} if record.previous else {}),
        **record.unknown,
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def write(path: Path, record: StoreRecord) -> None:
    """Replace STORE.json of the store at ``path``, durably.

    Raises ReadOnly (mount, or features of a newer version), StoreFull, PermissionDenied,
    EngineError; the old file is then untouched.
    """
    if record.read_only_reason:
        raise ReadOnly(
            f"the store at {path} takes no writes: {record.read_only_reason}", "use a newer kvstore"
        )
    data = encode(record)
    decode(data, path)
    try:
        files.replace(path / STORE_FILE, data)
    except OSError as error:
        raise files.translate(error, f"write {path / STORE_FILE}") from error


# -- directories ----------------------------------------------------------------------------------


def create_directories(path: Path) -> list[Path]:
    """Make the directories of a new store, durably, and return them; STORE.json comes later.

    ``path`` may be missing (its parent must exist), or empty but for lost+found. Raises
    StoreNotFound, StoreExists, PermissionDenied, ReadOnly, StoreFull, EngineError, and then leaves
    everything as it was.
    """
    made: list[Path] = []
    try:
        make_root(path, made)
        for name in (NAMESPACES, BLOCKS, INCOMING, QUARANTINE):
            (path / name).mkdir(files.DIRECTORY_MODE)
            made.append(path / name)
        files.sync_directory(path)
        files.sync_directory(path.parent)
    except OSError as error:
        unmake(path, made)
        raise files.translate(error, f"create a store at {path}") from error
    return made


def make_root(path: Path, made: list[Path]) -> None:
    """Make the directory of a store, or see that it is empty; note in ``made`` what was made.

    Raises StoreNotFound (no parent), StoreExists, OSError.
    """
    try:
        path.mkdir(files.DIRECTORY_MODE)
        made.append(path)
    except FileNotFoundError:
        raise StoreNotFound(
            f"cannot create a store at {path}: {path.parent} does not exist",
            "make that directory, or check that its filesystem is mounted",
        ) from None
    except FileExistsError:
        _check_empty(path)


def _check_empty(path: Path) -> None:
    if not path.is_dir():
        raise StoreExists(f"{path} is there and is not a directory", "choose another place")
    names = set(os.listdir(path)) - {_LOST_AND_FOUND}
    if STORE_FILE in names:
        raise StoreExists(f"there is already a store at {path}", "open it, or choose another place")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.check_private(descriptor, path)
    finally:
        os.close(descriptor)
    if names and _is_unfinished(path, names):
        # A creation was interrupted before STORE.json, which makes it a store: begin anew.
        for part in (BLOCKS, NAMESPACES, INCOMING, QUARANTINE):
            shutil.rmtree(path / part, ignore_errors=True)
        for name in (LOCK, STORE_FILE + files.TEMPORARY):
            (path / name).unlink(missing_ok=True)
        return
    if names:
        raise StoreExists(
            f"{path} is a directory that is not ours: it holds {min(names)!r}",
            "choose an empty directory; if a creation was interrupted here, remove what it left",
        )


def _is_unfinished(path: Path, names: set[str]) -> bool:
    """Tell whether all that lies in ``path`` is what a creation makes before the store exists."""
    parts = {BLOCKS, NAMESPACES, INCOMING, QUARANTINE}
    if names - parts - {LOCK, STORE_FILE + files.TEMPORARY} or not parts <= names:
        return False
    if any((path / part).is_symlink() or not (path / part).is_dir() for part in parts):
        return False
    inside = {entry.relative_to(path / BLOCKS).as_posix() for entry in (path / BLOCKS).rglob("*")}
    first = "journal.0000000000000001"
    return inside <= {"tmp", "super", first, first + files.TEMPORARY} and not any(
        any((path / part).iterdir()) for part in (INCOMING, QUARANTINE)
    )


def unmake(path: Path, made: list[Path]) -> None:
    """Take back a store at ``path`` whose creation failed: what :func:`create_directories` made.

    What lies in the parts can only be ours; the root is removed if nothing else is in it.
    """
    try:
        # First, so that what is left by a failure is no store.
        if path / BLOCKS in made:
            (path / STORE_FILE).unlink(missing_ok=True)
        for part in reversed(made):
            if part == path:
                part.rmdir()
            else:
                shutil.rmtree(part)
    except OSError as error:
        log.warning("cannot take back the store at %s: %s", path, error)


def warn_created(path: Path, record: StoreRecord) -> None:
    """Log that a store was made, with the place it really is: a forgotten mount shows here."""
    mount = node.mount_of(path)
    log.warning(
        "made a new store at %s: engine %s, capacity %.4g GiB, on device %s mounted at %s",
        path, record.engine, record.capacity_bytes / (1 << 30), mount.device, mount.point,
    )  # fmt: skip


def directory_bytes(path: Path) -> int:
    """Return the bytes that ``path`` and all below it take on the device, as ``du`` counts them:
    links are not followed, files with several names count once, what is not there nothing."""
    total, seen, waiting = 0, set(), [path]
    while waiting:
        current = waiting.pop()
        try:
            found = current.lstat()
            if (found.st_dev, found.st_ino) in seen:
                continue
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
            if stat.S_ISDIR(found.st_mode):
                waiting += current.iterdir()
        except OSError:
            continue
    return total


def leftovers(path: Path, record: StoreRecord) -> list[Path]:
    """Return directories of blocks that STORE.json does not name: copies that were not finished,
    and what is being removed."""
    kept = {record.blocks, record.previous.blocks if record.previous else ""}
    names = sorted(os.listdir(path))
    return [path / name for name in names if name.startswith(BLOCKS) and name not in kept]


def kept_bytes(path: Path, record: StoreRecord) -> int:
    """Return what changes of the engine have left beside the blocks. Former ones are not looked at:
    nobody changes them."""
    left = sum(map(directory_bytes, leftovers(path, record)))
    return left + (record.previous.bytes if record.previous else 0)


def boot_id() -> bytes:
    """Return the 16 bytes that change with every boot; empty where /proc does not show them."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return b""

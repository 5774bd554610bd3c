"""The namespaces of a store: one JSON file per id, holding the record and the keys' length.

``namespaces/<32 hex digits>.json`` is ``{"record": {...}, "key_length": 36}``; the id must be that
of the record (:func:`kvstore.keys.namespace_id`), so a damaged file is noticed. ``key_length`` is
null until the first put. A file is durable before the first record of its namespace is.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore import files
from kvstore.errors import (
    CorruptStore,
    InvalidKey,
    KVStoreError,
    ReadOnly,
    StoreFull,
    UnknownNamespace,
)
from kvstore.keys import (
    DEFAULT_NAMESPACE,
    MAX_KEY_BYTES,
    MAX_NAMESPACE_RECORD_BYTES,
    MAX_NAMESPACES,
    NAMESPACE_ID_BYTES,
    NamespaceRecord,
    named,
    namespace_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 2 * MAX_NAMESPACE_RECORD_BYTES
_MAX_NUMBERS = 1 << 16
_SUFFIX = ".json"
PRIVATE = "private"
"""The field of a record that, if 1, keeps the namespace to its owner and administrators."""
OWNER = "owner"
"""The field of a private record that holds the number of its user: so everybody has private
namespaces of his own, and whoever makes one cannot learn from it whether others have such a one."""


def is_private(record: NamespaceRecord) -> bool:
    return record.get(PRIVATE) == 1


def owner_of(record: NamespaceRecord) -> int | None:
    """Return the user whom a private record names; None for others, and where it names none."""
    owner = record.get(OWNER)
    return owner if is_private(record) and type(owner) is int else None


@dataclass(eq=False, slots=True)
class Namespace:
    """One namespace of an open store.

    ``record`` is None while only the id is known (its file is damaged or gone): such a namespace
    keeps its blocks but is opened by nobody. ``number`` stands for it in this process only.
    ``owner`` is the user who made it, kept for private ones only.
    """

    id: bytes
    number: int
    record: NamespaceRecord | None
    key_length: int | None = None
    owner: int | None = None
    quota: int | None = None
    """Most bytes that its records may take; None: what holds for all."""


class Namespaces:
    """All namespaces of a store. Any thread may use it; files are written under one lock.

    ``problems`` lists, in words, files that make no sense.
    """

    def __init__(self, directory: Path, read_only: bool = False) -> None:
        self.problems: list[str] = []
        self._directory = directory
        self._read_only = read_only
        self._by_id: dict[bytes, Namespace] = {}
        self._numbered: list[Namespace] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many there are whose record is known."""
        return sum(namespace.record is not None for namespace in self._numbered)

    def __iter__(self) -> Iterator[Namespace]:
        return iter([item for item in self._numbered if item.record is not None])

    def all(self) -> list[Namespace]:
        """Return all by their numbers, those whose record is not known included."""
        return list(self._numbered)

    def unlasting(self) -> list[str]:
        """Return, in words, whose blocks nobody finds after a restart of their model server."""
        return [
            f"namespace {one.id.hex()} is of a vLLM whose block keys are new in every process: set "
            "PYTHONHASHSEED for it, or use --prefix-caching-hash-algo sha256_cbor"
            for one in self
            if one.record is not None and "random_seed" in one.record
        ]

    def load(self) -> None:
        """Read all files. A damaged one is noted in ``problems`` and logged, never raised.

        The default namespace is always there: its record needs no file. Raises PermissionDenied or
        EngineError if the directory cannot be read.
        """
        try:
            names = sorted(os.listdir(self._directory))
        except FileNotFoundError:
            names = []
            self._note(f"{self._directory} is missing")
        except OSError as error:
            raise files.translate(error, f"read {self._directory}") from error
        for name in names:
            identity = _id_of(name)
            if identity is not None:
                self._load_one(identity)
        default = self.known(namespace_id(named(DEFAULT_NAMESPACE)))
        default.record = default.record or named(DEFAULT_NAMESPACE)

    def _load_one(self, identity: bytes) -> None:
        namespace = self.known(identity)
        path = self._path(identity)
        try:
            data = files.read_regular(path, MAX_FILE_BYTES)
            namespace.record, namespace.key_length = decode(data, identity)
            namespace.owner, namespace.quota = number_in(data, "owner"), number_in(data, "quota")
        except (OSError, CorruptStore) as error:
            reason = error.message if isinstance(error, CorruptStore) else error.strerror
            self._note(f"{path} is damaged: {reason}; its blocks are kept until it is opened again")

    def _note(self, problem: str) -> None:
        log.error("%s", problem)
        self.problems.append(problem)

    # -- finding ----------------------------------------------------------------------------------

    def by_id(self, identity: bytes) -> Namespace | None:
        """Return the namespace if its record is known."""
        namespace = self._by_id.get(identity)
        return namespace if namespace is not None and namespace.record is not None else None

    def by_number(self, number: int) -> Namespace:
        return self._numbered[number]

    def known(self, identity: bytes) -> Namespace:
        """Return the namespace of an id found in a record, giving it a number if it has none."""
        found = self._by_id.get(identity)
        if found is not None:
            return found
        with self._lock:
            new = Namespace(identity, len(self._numbered), None)
            return self._by_id.get(identity) or self._add(new)

    def open(self, record: NamespaceRecord, create: bool, owner: int | None = None) -> Namespace:
        """Return the namespace of a full record, making it durably with ``create``.

        A private one is then ``owner``'s.

        Whoever has the record restores a damaged file by this. Raises UnknownNamespace, InvalidKey
        (a record that has no canonical form), StoreFull (too many, or the disk), ReadOnly,
        PermissionDenied, EngineError.
        """
        identity = namespace_id(record)
        with self._lock:
            namespace = self._by_id.get(identity)
            if namespace is None:
                return self._create(identity, record, create, owner)
            if namespace.record is None:
                self._restore(namespace, record)
            return namespace

    def _create(
        self, identity: bytes, record: NamespaceRecord, create: bool, owner: int | None
    ) -> Namespace:
        if not create:
            raise UnknownNamespace(
                f"namespace {identity.hex()} does not exist", "check its record, or create it"
            )
        if len(self) >= MAX_NAMESPACES:
            raise StoreFull(
                f"the store has {MAX_NAMESPACES} namespaces, no more are allowed",
                "use one of them, or another store",
            )
        owner = owner if is_private(record) else None
        made = Namespace(identity, len(self._numbered), record, owner=owner)
        self._write(made)
        return self._add(made)

    def _restore(self, namespace: Namespace, record: NamespaceRecord) -> None:
        """Believe a record whose id is that of a damaged file, and try to write the file again; a
        quota is lost with it."""
        namespace.record = record
        namespace.owner = owner_of(record)
        try:
            self._write(namespace)
        except KVStoreError as error:
            log.warning("namespace %s is usable, its file is not: %s", namespace.id.hex(), error)

    def _add(self, namespace: Namespace) -> Namespace:
        if len(self._numbered) >= _MAX_NUMBERS:
            raise CorruptStore(
                f"the records of this store name {_MAX_NUMBERS} namespaces",
                "save its blocks with kvstore recover --to, or begin an empty one",
            )
        self._numbered.append(namespace)
        self._by_id[namespace.id] = namespace
        return namespace

    # -- quota and key length ---------------------------------------------------------------------

    def set_quota(self, namespace: Namespace, quota: int | None) -> None:
        """Limit what a namespace may take, durably. Raises UnknownNamespace if its record is not
        known, and what :meth:`open` raises for writing."""
        with self._lock:
            if namespace.record is None:
                raise UnknownNamespace(
                    f"the record of namespace {namespace.id.hex()} is damaged or gone",
                    "open it by its record first",
                )
            self._write(replace(namespace, quota=quota))
            namespace.quota = quota

    def set_key_length(self, namespace: Namespace, length: int) -> None:
        """Fix the length of the namespace's keys, durably; nothing to do if it is that already.

        Raises InvalidKey if another length is fixed, and what :meth:`open` raises for writing.
        """
        if namespace.key_length == length:
            return
        with self._lock:
            if namespace.key_length not in (None, length):
                raise InvalidKey(
                    f"a key of {length} bytes in namespace {namespace.id.hex()}, "
                    f"whose keys have {namespace.key_length}",
                    "use another namespace, or empty this one first",
                )
            self._save_length(namespace, length)

    def forget(self, namespace: Namespace) -> None:
        """Let the next put fix the length of keys anew; call it when the namespace is empty."""
        with self._lock:
            if namespace.key_length is not None:
                self._save_length(namespace, None)

    def _save_length(self, namespace: Namespace, length: int | None) -> None:
        if namespace.record is not None:
            self._write(replace(namespace, key_length=length))
        namespace.key_length = length

    # -- files ------------------------------------------------------------------------------------

    def _path(self, identity: bytes) -> Path:
        return self._directory / (identity.hex() + _SUFFIX)

    def _write(self, namespace: Namespace) -> None:
        path = self._path(namespace.id)
        if self._read_only:
            raise ReadOnly(
                f"cannot write {path}: the store is open for reading", "open it to write"
            )
        try:
            if not self._directory.exists():
                self._directory.mkdir(files.DIRECTORY_MODE)
                files.sync_directory(self._directory.parent)
            record, length = namespace.record or {}, namespace.key_length
            files.replace(path, encode(record, length, namespace.owner, namespace.quota))
        except OSError as error:
            raise files.translate(error, f"write {path}") from error


def encode(
    record: NamespaceRecord,
    key_length: int | None,
    owner: int | None = None,
    quota: int | None = None,
) -> bytes:
    """Return a namespace file in bytes."""
    document: dict[str, object] = {"record": record, "key_length": key_length}
    further = {"owner": owner, "quota": quota}
    document |= {name: value for name, value in further.items() if value is not None}
    for indent in (2, None):  # a long list with an item in each line would be too large to be read
        data = json.dumps(document, indent=indent, sort_keys=True, ensure_ascii=False).encode()
        if len(data) < MAX_FILE_BYTES:
            break
    return data + b"\n"


def decode(data: bytes, identity: bytes) -> tuple[NamespaceRecord, int | None]:
    """Return record and key length of a namespace file. Raises CorruptStore."""
    try:
        document = json.loads(data)
        record, length = document["record"], document["key_length"]
        if not isinstance(record, dict) or namespace_id(record) != identity:
            raise CorruptStore("its record has another id")
    except KVStoreError as error:
        raise CorruptStore(error.message) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptStore(f"it is no namespace ({error})") from None
    if length is None:
        return record, None
    if type(length) is not int or not 1 <= length <= MAX_KEY_BYTES:
        raise CorruptStore(f"its key length is {length!r}")
    return record, length


def number_in(data: bytes, name: str) -> int | None:
    """Return a further number in a namespace file, after :func:`decode` found it good."""
    value = json.loads(data).get(name)
    return value if type(value) is int and value >= 0 else None


def _id_of(name: str) -> bytes | None:
    """Return the id that a file name spells, in lower-case hex, or None."""
    stem = name.removesuffix(_SUFFIX)
    try:
        identity = bytes.fromhex(stem)
    except ValueError:
        return None
    exact = name == identity.hex() + _SUFFIX and len(identity) == NAMESPACE_ID_BYTES
    return identity if exact else None

"""What people write on a command line, read: keys, namespaces, sizes, times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.errors import InvalidKey, UnknownNamespace, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvstore.client import Client

NAMESPACE_ID = re.compile("[0-9a-fA-F]{32}", re.ASCII)

Name = tuple[str, int, str]
"""A block: namespace id, shard, key; as ``list`` prints it."""


def described(name: Name) -> tuple[Mapping[str, object], str]:
    """Return a block for JSON, and as a line."""
    namespace, shard, key = name
    return {"namespace": namespace, "shard": shard, "key": key}, f"{namespace} {shard} {key}"


def listed(document: Mapping[str, object], name: str) -> list[Any]:
    """Return a list in an answer of the daemon."""
    found = document.get(name)
    return found if isinstance(found, list) else []


class Space(NamedTuple):
    """A namespace as it was named: by its record, or by its id alone."""

    id: str
    record: Mapping[str, object] | None

    def open(self, client: Client, *, create: bool = False) -> int:
        """Return the client's number of it; ``default`` is always open. Raises UnknownNamespace."""
        from kvstore import keys

        if self.record == keys.named(keys.DEFAULT_NAMESPACE):
            return 0
        return client.namespace(self.known(client, create=create), create=create)

    def known(self, client: Client, *, create: bool = False) -> Mapping[str, object]:
        """Return its record. Raises UnknownNamespace, UsageError if ``create`` but only an id."""
        if self.record is not None:
            return self.record
        return _record_of(client, self.id, create=create)


def _record_of(client: Client, identity: str, *, create: bool) -> Mapping[str, object]:
    """Ask the daemon for the record of an id; only administrators are told."""
    for part in client.follow({"op": "namespaces"}):
        for share in listed(part, "namespaces"):
            if share["id"] == identity and share["record"] is not None:
                record: Mapping[str, object] = share["record"]
                return record
    if create:
        raise UsageError(
            f"a namespace cannot be made by its id {identity}", "give its name, or @FILE.json"
        )
    raise UnknownNamespace(
        f"namespace {identity} does not exist", "see kvstore inspect --namespaces"
    )


def read_namespace(text: str) -> Space:
    """Read the name of a namespace, ``@FILE`` with its record, or its id. Raises UsageError."""
    import json

    from kvstore import keys

    if NAMESPACE_ID.fullmatch(text):
        default = keys.named(keys.DEFAULT_NAMESPACE)
        known = keys.namespace_id(default).hex() == text.lower()
        return Space(text.lower(), default if known else None)
    if not text.startswith("@"):
        return _space(keys.named(text))
    try:
        record = json.loads(Path(text[1:]).read_bytes())
    except OSError as error:
        raise UsageError(
            f"namespace file {text[1:]}: {error.strerror}", "give a readable file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"namespace file {text[1:]} is not JSON: {error}", "correct it") from None
    if not isinstance(record, dict):
        raise UsageError(f"namespace file {text[1:]} holds no object", 'write {"name": ...}')
    return _space(record)


def require(client: Client, namespace: str | None) -> None:
    """Raise UnknownNamespace, by the name that was written, if the daemon does not have it.

    An id is left to the daemon: its blocks may be there without its record.
    """
    space = None if namespace is None else read_namespace(namespace)
    if space is not None and space.record is not None:
        space.open(client)


def _space(record: Mapping[str, object]) -> Space:
    from kvstore import keys

    return Space(keys.namespace_id(record).hex(), record)


def parse_keys(texts: Iterable[str], shard: int) -> list[bytes]:
    """Return keys of one length. Raises InvalidKey."""
    from kvstore import keys

    keys.check_shard(shard)
    names = [read_key(text) for text in texts]
    keys.key_array(names)
    return names


def read_key(text: str) -> bytes:
    """Return the key that a person wrote in hexadecimal. Raises InvalidKey."""
    from kvstore import keys

    digits = text.removeprefix("0x").removeprefix("0X")
    if digits != text:
        raise InvalidKey(f"key {text[:16]!r} is not hexadecimal", "leave out 0x")
    if any(letter.isspace() for letter in text):  # bytes.fromhex would take them
        raise InvalidKey(f"key {text[:16]!r} has blanks in it", "write two hex digits a byte")
    if text and len(text) % 2 and not text.strip("0123456789abcdefABCDEF"):
        raise InvalidKey(
            f"key {text[:16]!r} has an odd number of digits",
            "write two hex digits a byte, 00 and not 0",
        )
    return keys.parse_hex(text)


def read_size(text: str | None, option: str) -> int | None:
    """Return the bytes that an option names. Raises UsageError."""
    from kvstore.quantities import parse_size

    return None if text is None else int(_read(parse_size, text, option, "10GiB"))


def read_time(text: str | None, option: str) -> float | None:
    """Return the seconds that an option names. Raises UsageError."""
    from kvstore.quantities import parse_duration

    return None if text is None else float(_read(parse_duration, text, option, "90min"))


def _read(parse: Callable[[str], float], text: str, option: str, example: str) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}: {error}", f"write for example {example}") from None

"""Names of things: namespaces, block keys, shards, and the limits they obey.

The identity of a block is (namespace, shard, key). A *namespace* is what two model servers must
share before one may read the other's blocks (model, weights fingerprint, dtype, layout, ...); it is
a flat JSON record, and its id is the first 16 bytes of SHA-256 over the record's canonical form.
A *shard* is the number of the parallel rank. A *key* is 1 to 64 bytes that the client chose; what
vLLM chooses for a run of tokens is computed in tokens.py.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidKey

MAX_KEY_BYTES = 64
MAX_BLOCK_BYTES = 64 << 20
MAX_SHARD = 0xFFFF
MAX_NAMESPACES = 1024
NAMESPACE_ID_BYTES = 16
DEFAULT_NAMESPACE = "default"
MAX_NAMESPACE_RECORD_BYTES = 64 << 10
MAX_NAMESPACE_DEPTH = 32

KeyArray = npt.NDArray[np.uint8]
"""Equal-length keys, shape (n, key_length)."""

NamespaceRecord = Mapping[str, object]


def named(name: str) -> dict[str, object]:
    """Return the record that a plain name stands for: ``{"name": name}``."""
    if not name:
        raise InvalidKey("the name of a namespace is empty", "give a name, for example 'default'")
    return {"name": name}


def canonical(record: NamespaceRecord) -> bytes:
    """Return the record as JSON with sorted keys, no spaces, UTF-8.

    Only strings, integers and lists or objects of them are allowed: floats and nulls have no single
    spelling, and absent fields are left out, so two programs that mean the same get the same id.
    Raises InvalidKey for anything else, for over 64 KiB, for lists and objects nested over 32 deep.
    """
    _check_plain(record, "namespace", MAX_NAMESPACE_DEPTH)
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise InvalidKey(
            "the namespace record holds text that is not Unicode", "use valid strings"
        ) from None
    if len(encoded) > MAX_NAMESPACE_RECORD_BYTES:
        raise InvalidKey(
            f"the namespace record has {len(encoded)} bytes",
            f"keep it within {MAX_NAMESPACE_RECORD_BYTES}",
        )
    return encoded


def namespace_id(record: NamespaceRecord) -> bytes:
    """Return the 16-byte id of a namespace: SHA-256 over :func:`canonical`, cut to 16 bytes."""
    return hashlib.sha256(canonical(record)).digest()[:NAMESPACE_ID_BYTES]


def _check_plain(value: object, where: str, depth: int) -> None:
    if depth < 0:
        raise InvalidKey(
            "the namespace record is nested too deep", f"nest at most {MAX_NAMESPACE_DEPTH} deep"
        )
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise InvalidKey(f"field {name!r} of {where} is no string", "use string names")
            _check_plain(item, f"{where}.{name}", depth - 1)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]", depth - 1)
    elif not isinstance(value, (str, int)):
        kind = type(value).__name__
        raise InvalidKey(
            f"{where} is a {kind}", "use strings and integers, leave out what is absent"
        )


def check_shard(shard: int) -> int:
    if not 0 <= shard <= MAX_SHARD:
        raise InvalidKey(f"shard {shard} is out of range", f"use 0 to {MAX_SHARD}")
    return shard


def check_block_length(length: int, key: bytes = b"") -> int:
    """Refuse a block of 0 bytes or over 64 MiB."""
    if not 1 <= length <= MAX_BLOCK_BYTES:
        name = f"block {key.hex()}" if key else "a block"
        raise InvalidKey(f"{name} has {length} bytes", f"a block has 1 to {MAX_BLOCK_BYTES} bytes")
    return length


def parse_hex(text: str) -> bytes:
    """Return the key that ``text`` spells in hexadecimal; 1 to 64 bytes."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise InvalidKey(
            f"key {text!r} is not hexadecimal", "write two hex digits a byte"
        ) from None
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidKey(
            f"key {text[:16]!r} has {len(key)} bytes", f"a key has 1 to {MAX_KEY_BYTES} bytes"
        )
    return key


def key_array(keys: Sequence[bytes]) -> KeyArray:
    """Return keys of one length as an array of shape (n, key_length).

    Raises InvalidKey when the lengths differ or are out of bounds.
    """
    if not keys:
        return np.zeros((0, 1), np.uint8)
    length = len(keys[0])
    if not 1 <= length <= MAX_KEY_BYTES:
        raise InvalidKey(
            f"a key of {length} bytes was given", f"a key has 1 to {MAX_KEY_BYTES} bytes"
        )
    blob = b"".join(keys)
    if any(len(key) != length for key in keys):
        other = next(key for key in keys if len(key) != length)
        raise InvalidKey(
            f"key {other.hex()} of {len(other)} bytes in one batch with a key of {length} bytes",
            "send keys of one length together",
        )
    return np.frombuffer(blob, np.uint8).reshape(len(keys), length)


def space_number(namespace: int, shard: int) -> int:
    """Return the u32 under which the index files (namespace number, shard)."""
    return namespace << 16 | shard

"""Names of things: namespaces, block keys, shards, and the limits they obey.

The identity of a block is (namespace, shard, key). A *namespace* is what two model servers must
share before one may read the other's blocks (model, weights fingerprint, dtype, layout, ...); it is
a flat JSON record, and its id is the first 16 bytes of SHA-256 over the record's canonical form.
A *shard* is the number of the parallel rank. A *key* is 1 to 64 bytes that the client chose.

vLLM hashes a prompt in blocks of a fixed number of tokens, each with the hash of the block before
it, so that a hash stands for everything from the start of the prompt. A key of its offloading tiers
is such a hash followed by the number of the KV-cache group. Both are computed here as vLLM does it,
from ``vllm/v1/core/kv_cache_utils.py`` (``hash_block_tokens``, ``generate_block_hash_extra_keys``),
``vllm/utils/hashing.py`` and ``vllm/v1/kv_offload/base.py`` (``make_offload_key``) of 0.25 to 0.33.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidKey, UsageError

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


# -- the hash chains of vLLM ----------------------------------------------------------------------

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM hashes for the block before the first one, unless PYTHONHASHSEED is set."""


def _pickled(value: object) -> bytes:
    """Return what vLLM's ``sha256`` is taken over.

    The only use of pickle in kvstore: this hash is defined by its bytes. They are hashed and
    dropped; nothing is ever unpickled.
    """
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    """Return a value in canonical CBOR (RFC 8949, section 4.2): the shortest form of each number.

    Of None, whole numbers below 2^64, text, bytes, and sequences of them, which is all that vLLM
    hashes.
    """
    if value is None:
        return b"\xf6"
    if isinstance(value, bool) or not isinstance(value, (int, str, bytes, tuple, list)):
        raise UsageError(f"a {type(value).__name__} has no place in a block's hash", "use tokens")
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for size, code in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if number < 1 << 8 * size:
            return bytes([major << 5 | code]) + number.to_bytes(size, "big")
    raise UsageError(f"number {number} is too large for a block's hash", "use token ids")


ALGORITHMS: dict[str, Callable[[object], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
"""What is hashed by SHA-256, by vLLM's name of the algorithm.

The others (xxhash, xxhash_cbor) have random seeds by default, and 128 bits that anybody can make
collide: two users' prompts could share a key.
"""


def _hash(algorithm: str, value: object) -> bytes:
    encode = ALGORITHMS.get(algorithm)
    if encode is None:
        raise UsageError(
            f"hash algorithm {algorithm!r} is not supported",
            f"start vLLM with --prefix-caching-hash-algo {' or '.join(ALGORITHMS)}",
        )
    return hashlib.sha256(encode(value)).digest()


def none_hash(algorithm: str = "sha256", seed: str = DEFAULT_SEED) -> bytes:
    """Return the 32 bytes that stand for the block before the first one."""
    return _hash(algorithm, seed)


class Prompt(NamedTuple):
    """Tokens, and what else vLLM hashes with them."""

    tokens: Sequence[int]
    salt: str = ""
    """``cache_salt`` of the request: another salt, other keys throughout."""
    lora: tuple[str, str] | None = None
    """Name and path of the adapter."""

    def extra(self, first: bool) -> tuple[tuple[object, ...], ...] | None:
        """Return what is hashed beside the tokens of a block."""
        extra: list[tuple[object, ...]] = []
        if self.lora is not None:
            extra.append(("lora", *self.lora))
        if first and self.salt:
            extra.append(("cache_salt", self.salt))
        return tuple(extra) or None


def block_hashes(
    prompt: Prompt,
    block_tokens: int,
    algorithm: str = "sha256",
    seed: str = DEFAULT_SEED,
) -> list[bytes]:
    """Return the hash of each whole block of a prompt, 32 bytes each.

    ``block_tokens``: tokens in a block, vLLM's ``--block-size``. Raises UsageError.
    """
    if block_tokens < 1:
        raise UsageError(f"a block of {block_tokens} tokens", "give vLLM's --block-size")
    # Plain ints: pickle writes the integers of numpy in another way.
    tokens = [int(token) for token in prompt.tokens]
    parent, hashes = none_hash(algorithm, seed), []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        start = end - block_tokens
        block = (parent, tuple(tokens[start:end]), prompt.extra(start == 0))
        parent = _hash(algorithm, block)
        hashes.append(parent)
    return hashes


def block_keys(hashes: Sequence[bytes], group: int = 0, blocks: int = 1) -> list[bytes]:
    """Return the keys of the chunks that hashed blocks make up: 36 bytes each.

    ``blocks`` is how many of them a chunk of this group has; a chunk is named by its last one.
    """
    if blocks < 1:
        raise UsageError(f"a chunk of {blocks} blocks", "a chunk has one block at least")
    return [name + group.to_bytes(4, "big") for name in hashes[blocks - 1 :: blocks]]

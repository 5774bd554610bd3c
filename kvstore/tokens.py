"""From tokens to block keys, as vLLM computes them, without vLLM.

vLLM hashes a prompt in blocks of a fixed number of tokens, each with the hash of the block before
it, so that a hash stands for everything from the start of the prompt. A key of its offloading tiers
is such a hash followed by the number of the KV-cache group. With these functions blocks can be
looked up, warmed and pinned by the prompt, and a test can say which keys a prompt must have.

Source of the format: ``vllm/v1/core/kv_cache_utils.py`` (``hash_block_tokens``,
``generate_block_hash_extra_keys``), ``vllm/utils/hashing.py``, ``vllm/v1/kv_offload/base.py``
(``make_offload_key``), versions 0.25 to 0.33.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


def read_prompt(text: str) -> Prompt:
    """Read a line: a JSON list of token ids, or a request to vLLM's completions with such a list.

    Raises UsageError.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(
            f"{text.strip()[:60]!r} is not JSON", "write a list of token ids"
        ) from None
    request = value if isinstance(value, dict) else {"prompt": value}
    tokens, salt = request.get("prompt"), request.get("cache_salt") or ""
    if (
        not isinstance(tokens, list)
        or any(type(token) is not int for token in tokens)
        or not isinstance(salt, str)
    ):
        raise UsageError(
            f"{text.strip()[:60]!r} is no list of token ids", 'write [1, 2] or {"prompt": [1, 2]}'
        )
    return Prompt(tokens, salt)


def keys_in(record: Mapping[str, object], prompt: Prompt) -> list[bytes]:
    """Return the keys of a prompt in the namespace of a vLLM, those of each group in their order.

    Raises UsageError for other namespaces, and where keys are new in every process.
    """
    if record.get("engine") != "vllm":
        raise UsageError("this is not the namespace of a vLLM", "see kvstore inspect --namespaces")
    if "random_seed" in record:
        raise UsageError("the keys of this vLLM are new in every process", "see docs/vllm.md")
    fields: Mapping[str, Any] = record
    size = int(fields["tokens_per_hash"])
    hashes = block_hashes(prompt, size, str(fields["hash"]), str(fields["seed"]))
    keys = []
    for group in fields["groups"]:
        blocks = int(group["tokens"]) * int(fields["blocks_per_chunk"]) // size
        keys += block_keys(hashes, int(group["id"]), blocks)
    return keys

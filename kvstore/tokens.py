"""Prompts for which somebody asks by their tokens, and the keys of one in the namespace of a vLLM.

So blocks can be looked up, warmed and pinned by the prompt. Standard library and numpy only: model
servers import this module.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvstore.errors import UsageError
from kvstore.keys import Prompt, block_hashes, block_keys

if TYPE_CHECKING:
    from collections.abc import Mapping


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

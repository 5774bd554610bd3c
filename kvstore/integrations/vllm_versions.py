"""What differs between the versions of vLLM that we know, 0.25 to 0.33, and nothing else.

The interface of its tiers is marked experimental and changes; the table of changes:

======  ==========================================================================================
0.25    ``LookupResult`` and ``ScheduleEndContext`` appear: the first version with a tier like ours
0.26    ``block_size_factor`` becomes ``blocks_per_chunk``; a spec no longer knows vLLM's own
        configuration
0.28    ``JobMetadata`` becomes ``TransferJob``, ``block_ids`` of a job ``chunk_ids``
0.32    a tier's constructor takes ``backpressure_detector``
0.33    calls come from more than one thread, one at a time
======  ==========================================================================================
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from typing import Any

from kvstore.errors import UsageError
from kvstore.keys import ALGORITHMS, DEFAULT_SEED

OLDEST = (0, 25)
NEWEST = (0, 33)


def check(version: str) -> str:
    """Return MAJOR.MINOR of a version that we know. Raises UsageError for others."""
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if not OLDEST <= numbers <= NEWEST:
        span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise UsageError(
            f"vLLM {version} is not one that this kvstore knows ({span})",
            "upgrade kvstore, or use one of these versions of vLLM",
        )
    return f"{numbers[0]}.{numbers[1]}"


def rows_of(job: Any) -> list[int]:
    """Return the rows of vLLM's pool that a job is about."""
    numbers = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(number) for number in numbers]


def blocks_per_chunk(spec: Any) -> int:
    old = getattr(spec, "block_size_factor", 1)
    return int(getattr(spec, "blocks_per_chunk", old))


def made(kind: Any, **fields: object) -> Any:
    """Return a message of vLLM with those of the fields that this version has."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in fields.items() if name in known})


def base_arguments(base: type, detector: object) -> dict[str, object]:
    """Return what the constructor of vLLM's class takes beyond the first three arguments."""
    takes = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    return {"backpressure_detector": detector} if "backpressure_detector" in takes else {}


def at_hand(spec: Any, name: str) -> Any:
    """Return ``vllm_config`` or ``kv_cache_config``, or None where it is not to be had.

    Since 0.26 a tier is not given them, though the connector that makes it has them both, and no
    other way leads from here to the settings (of rope, of hashing) on which a block depends. So
    they are looked for among the variables of our callers.
    """
    found = getattr(spec, name, None)
    frame = sys._getframe(1)
    while found is None and frame is not None:
        found = frame.f_locals.get(name)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def seed(algorithm: str) -> str | None:
    """Return the text that vLLM's first hash is made of; None if it is new in every process."""
    chosen = os.environ.get("PYTHONHASHSEED")
    if chosen is not None:
        return chosen
    from vllm.v1.core import kv_cache_utils

    fixed = algorithm in ALGORITHMS and hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    return str(getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", DEFAULT_SEED)) if fixed else None

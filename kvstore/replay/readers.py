"""Reading traces: four formats, told apart by what is in the file, gzip or not.

- Mooncake JSONL (github.com/kvcache-ai/Mooncake): an object a line with ``timestamp`` in ms,
  ``input_length``, ``output_length``, ``hash_ids``, 512 tokens each, the last one mostly partial.
  ``kvstore trace`` writes this, and ``block_tokens`` with it.
- Bailian JSONL (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): the same, ``timestamp`` in
  seconds, 16 tokens each, known by its ``chat_id``.
- kv-cache-tester JSON (github.com/callanjfox/kv-cache-tester): a file per session, or a directory
  of such. When a session starts is not in it, so that is drawn: evenly over ``spread`` seconds.
- npz tree: the arrays of :class:`kvstore.replay.trace.Trace` as ``parent``, ``leaf``,
  ``n_blocks``, ``ts_ms``, ``in_tok``, ``out_tok``, ``block_tokens``.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import NotFound, UsageError
from kvstore.replay.trace import Builder, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOONCAKE_TOKENS, BAILIAN_TOKENS, TESTER_TOKENS = 512, 16, 64
_GZIP, _ZIP = b"\x1f\x8b", b"PK"
_BAD = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: blocks of the source that become one; for sessions without a time, the seconds
    over which they start, and the seed of the draw."""

    group: int = 1
    spread: float = 8 * 3600.0
    seed: int = 0


def read(path: Path, how: Reading | None = None) -> Trace:
    """Return the trace in a file or a directory of sessions. Raises NotFound, UsageError."""
    how = how or Reading()
    if path.is_dir():
        return _sessions(path, sorted(p for p in path.rglob("*.json*") if p.is_file()), how)
    data = _content(path)
    if data.startswith(_ZIP):
        if how.group != 1:
            raise UsageError(f"{path} is a tree of blocks already", "leave out --group")
        return _tree(path, data)
    first = _json(path, data.split(b"\n", 1)[0], 1, may_fail=True)
    if isinstance(first, dict) and "hash_ids" in first:
        return _lines(path, data, first, how)
    return _sessions(path, [path], how)


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP) else data
    except FileNotFoundError:
        raise NotFound(
            f"there is no trace {path}", "name a file, or a directory of sessions"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"the trace {path} cannot be read: {error}", "see kvstore replay -h"
        ) from None


def _json(path: Path, text: bytes, line: int, *, may_fail: bool = False) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError as error:
        if may_fail:
            return None
        raise _unfit(path, f"line {line} is no JSON: {error}") from None


def _unfit(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no trace that is known: {why}", "see kvstore replay -h")


# -- lines ----------------------------------------------------------------------------------------


def _lines(path: Path, data: bytes, first: dict[str, Any], how: Reading) -> Trace:
    bailian = "chat_id" in first
    tokens = int(first.get("block_tokens", BAILIAN_TOKENS if bailian else MOONCAKE_TOKENS))
    builder, unit = Builder(path.name, tokens, how.group), 1000 if bailian else 1
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        request = _json(path, line, number)
        try:
            sizes = int(request["input_length"]), int(request["output_length"])
            builder.add(float(request["timestamp"]) * unit, *sizes, list(request["hash_ids"]))
        except _BAD as error:
            raise _unfit(path, f"line {number}: {type(error).__name__} {error}") from None
    return builder.finish()


# -- sessions -------------------------------------------------------------------------------------


def _sessions(path: Path, files: list[Path], how: Reading) -> Trace:
    rng = np.random.default_rng(how.seed)
    starts = rng.uniform(0, how.spread, len(files)) * 1000 if len(files) > 1 else [0.0]
    found: list[tuple[float, int, Any]] = []
    tokens = {TESTER_TOKENS} if not files else set()
    for number, (file, start) in enumerate(zip(files, starts, strict=False)):
        session = _json(file, _content(file), 1)
        try:
            tokens.add(int(session["block_size"]))
            scope = number if session.get("hash_id_scope") == "local" else None
            for seconds, request in _flat(session["requests"], 0.0):
                ids, sizes = list(request["hash_ids"]), (int(request["in"]), int(request["out"]))
                found.append(
                    (start + seconds * 1000, len(found), (*sizes, ids, (scope, request["model"])))
                )
        except _BAD as error:
            raise _unfit(file, f"{type(error).__name__} {error}") from None
    if len(tokens) != 1:
        raise _unfit(path, f"its sessions have blocks of {sorted(tokens)} tokens")
    builder = Builder(path.name, tokens.pop(), how.group)
    for arrival, _, request in sorted(found, key=lambda one: one[:2]):
        builder.add(arrival, *request)
    return builder.finish()


def _flat(requests: list[dict[str, Any]], start: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield requests with their seconds since the session began, those of sub-agents too."""
    for request in requests:
        seconds = start + float(request["t"])
        if request["type"] == "subagent":
            yield from _flat(request["requests"], seconds)
        else:
            yield seconds, request


# -- tree -----------------------------------------------------------------------------------------


def _tree(path: Path, data: bytes) -> Trace:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            trace = Trace(
                path.name,
                arrays["parent"].astype(np.int32),
                arrays["leaf"].astype(np.int32),
                arrays["n_blocks"].astype(np.int32),
                arrays["ts_ms"].astype(np.int64),
                arrays["in_tok"].astype(np.int64),
                arrays["out_tok"].astype(np.int64),
                int(arrays["block_tokens"]),
            )
    except (*_BAD, OSError, zipfile.BadZipFile) as error:
        raise _unfit(path, f"{type(error).__name__} {error}") from None
    _check(path, trace)
    return trace


def _check(path: Path, trace: Trace) -> None:
    """Refuse a tree in which a way up does not end at a root after as many blocks as said."""
    columns = (trace.lengths, trace.arrivals, trace.input_tokens, trace.output_tokens)
    if any(column.shape != trace.leaves.shape for column in columns) or trace.block_tokens < 1:
        raise _unfit(path, "its arrays do not fit each other")
    if np.any(trace.parents < -1) or np.any(trace.parents >= np.arange(trace.blocks)):
        raise _unfit(path, "a block has a parent with a higher number")
    if np.any(trace.leaves < 0) or np.any(trace.leaves >= trace.blocks):
        raise _unfit(path, "a request names a block that is not there")
    depths = np.zeros(trace.blocks + 1, np.int32)
    for block, parent in enumerate(trace.parents.tolist()):
        depths[block] = depths[parent] + 1
    if np.any(depths[trace.leaves] != trace.lengths):
        raise _unfit(path, "a path is not as long as n_blocks says")

"""The kinds of value in what commands write with ``--json``, and whether a value is of one.

A kind is ``string``, ``hex`` (a string of hex digits), ``integer``, ``number``, ``boolean``,
``object`` (anything), the name of a shape below, ``list of`` a kind, ``map of`` a kind (names to
values), or one of these ``or null``. Fields are added, never renamed or given another kind.
"""

from __future__ import annotations

Fields = dict[str, tuple[str, str]]

NAME: Fields = {
    "namespace": ("hex", "id of the namespace"),
    "shard": ("integer", "number of the parallel rank"),
    "key": ("hex", "key of the block"),
}
SCRUB: Fields = {
    "state": ("string", "idle, running or paused"),
    "rate": ("integer", "bytes a second at most; 0 = no limit"),
    "blocks": ("integer", "blocks looked at in this pass, or the last one"),
    "bytes": ("integer", "what their records take on disk"),
    "total_bytes": ("integer or null", "of so many; null when no pass is under way"),
    "eta_seconds": ("number or null", "time left at that rate"),
    "found": ("found", "what this pass found"),
    "started": ("number or null", "seconds since 1970"),
    "finished": ("number or null", "when a pass came to its end the last time"),
}
REPLAY: Fields = {
    "trace": ("string", "name of the trace"),
    "requests": ("integer", "its requests"),
    "policy": ("string", "who decided what leaves the disk"),
    "config": ("object", "write, rule, and the tokens of a block"),
    "ssd_blocks": ("integer", "room on disk"),
    "dram_blocks": ("integer", "room in memory"),
    "count_from": ("integer", "the first request that was counted"),
    "count_to": ("integer", "the first one after those"),
    "refs": ("integer", "blocks asked for"),
    "hits": ("integer", "of these, there, and all before them in their chain"),
    "hits_dram": ("integer", "of these, in memory"),
    "hits_ssd": ("integer", "of these, on disk only"),
    "hit_ratio": ("number", "hits of those asked for"),
    "ssd_writes": ("integer", "blocks written to the disk"),
    "peak_ghosts": ("integer", "most blocks that the policy remembered after they had left"),
    "policy_bytes": ("integer", "most memory of the policy besides the index"),
    "orphans": ("number", "largest share of blocks seen with an ancestor that was nowhere"),
    "bytes_per_day": ("number or null", "bytes written a day; null without --block-size"),
    "drive_writes_per_day": ("number or null", "of the whole drive; null without --drive"),
    "optimum": ("integer or null", "with --optimum: the most hits that are possible"),
    "percent_of_optimum": ("number or null", "hits in percent of that"),
}
SHAPES: dict[str, Fields] = {
    "replay": REPLAY,
    "block": NAME,
    "pin": {
        **NAME,
        "bytes": ("integer", "bytes of the block"),
        "seconds": ("number", "time left"),
        "administrator": ("boolean", "only administrators may lift it"),
    },
    "lost block": {**NAME, "reason": ("string", "why it could not be written")},
    "left block": {**NAME, "reason": ("string", "why it did not come along")},
    "strange file": {
        "kind": ("string", "a stable id, such as truncated, empty, temporary or duplicate"),
        "path": ("string", "which file"),
        "detail": ("string", "what is wrong with it"),
    },
    "namespace": {
        "id": ("hex", "id of the namespace"),
        "record": ("object or null", "its record; null if its file is damaged or gone"),
        "key_length": ("integer or null", "bytes of its keys; null while there is no block"),
        "blocks": ("integer", "blocks"),
        "live_bytes": ("integer", "what their records take"),
        "quota_bytes": ("integer or null", "its own quota, see kvstore quota"),
    },
    "difference": {
        "namespace": ("hex", "id of the namespace"),
        "other": ("hex", "the one of those before it that it has most in common with"),
        "fields": ("object", "name of each field that differs, with the values of both"),
    },
    "member": {
        "key": ("hex", "key of the block"),
        "depth": ("integer", "links to the first one of the chain"),
        "bytes": ("integer", "bytes of the block; 0 if it is not here"),
        "there": ("boolean", "false for one that others follow but that is not here"),
        "chosen": ("boolean", "the block that was asked for"),
    },
    "envelope": {
        "store": ("hex", "uuid of the store that it was written to"),
        **NAME,
        "parent": ("hex or null", "key of the block before it"),
        "generation": ("integer", "number of the version"),
        "written_ns": ("integer", "nanoseconds since 1970"),
        "logical_length": ("integer", "bytes of the block"),
        "stored_length": ("integer", "bytes of the payload on disk"),
        "checksum": ("hex", "xxh3-64 of the payload"),
        "transform": ("integer", "0 = stored as it is"),
        "flags": ("integer", "see formats.md"),
        "label": ("string", "the note of put --label"),
        "extra": ("hex", "fields that this version does not know"),
    },
    "engine": {
        "name": ("string", "what serve --engine takes"),
        "package": ("string", "the package that it comes with"),
        "version": ("string", "version of the package"),
        "usable": ("boolean", "it can be loaded"),
        "problem": ("string", "why not, and what to install"),
        "capabilities": ("object or null", "see kvstore/backends/base.py"),
    },
    "problem": {
        "message": ("string", "which setting, from where, what is wrong"),
        "hint": ("string", "what to do"),
    },
    "damaged record": {
        "namespace": ("hex or null", "id of the namespace, as far as it is known"),
        "shard": ("integer or null", "number of the parallel rank"),
        "key": ("hex or null", "key of the block"),
        "path": ("string or null", "file below the engine's directory"),
        "offset": ("integer or null", "where in that file"),
        "reason": ("string", "what is wrong"),
    },
    "setting": {
        "name": ("string", "as in the configuration file"),
        "value": ("object or null", "bytes and seconds as numbers; null is left to the store"),
        "origin": ("string", "flag, variable, path of a file, or default"),
        "source": ("string", "flag, environment, file or default"),
        "change": ("string", "live or restart: when a daemon that serves takes a change over"),
    },
    "corrupt": {
        "header": ("integer", "records without a valid header"),
        "payload": ("integer", "records whose payload is not what the header says"),
        "key_mismatch": ("integer", "records in the place or under the name of another block"),
        "truncated": ("integer", "records that were cut off"),
    },
    "check": {
        "id": ("string", "stable name of the check"),
        "state": ("string", "ok, warn, fail or unknown"),
        "message": ("string", "what was found"),
        "fix": ("string", "what to do; empty if nothing"),
    },
    "finding": {
        "kind": ("string", "damaged, missing, stale, unreadable or repaired"),
        **NAME,
        "path": ("string", "where its record lies, below STORE/blocks"),
    },
    "found": {
        "damaged": ("integer", "records that are not whole: dropped, a copy is in quarantine/"),
        "missing": ("integer", "blocks without a record: dropped"),
        "stale": ("integer", "records of another key or version in a block's place: dropped"),
        "unreadable": ("integer", "records that the device refused to read"),
        "repaired": ("integer", "damaged ones written again: by their parity or from memory"),
    },
    "scrub": SCRUB,
    "incoming": {
        "taken": ("integer", "records that were put"),
        "present": ("integer", "records whose block was there already"),
        "waiting": ("integer", "files that are tried again"),
        "refused": ("integer", "files that stay until they are changed or removed"),
    },
    "kept": {
        "pinned": ("integer", "blocks that are pinned"),
        "in_use": ("integer", "blocks leased, being read or written"),
        "needed_by_others": ("integer", "blocks that others which stay follow"),
    },
}


def faults(value: object, kind: str) -> list[str]:
    """Return what is wrong with a value that should be of a kind, in words."""
    if kind.endswith(" or null"):
        return [] if value is None else faults(value, kind.removesuffix(" or null"))
    if kind.startswith("list of "):
        if not isinstance(value, list):
            return [f"{value!r} is no list"]
        return [fault for item in value for fault in faults(item, kind.removeprefix("list of "))]
    if kind.startswith("map of "):
        if not isinstance(value, dict):
            return [f"{value!r} is no object"]
        below = kind.removeprefix("map of ")
        return [fault for item in value.values() for fault in faults(item, below)]
    if kind in SHAPES:
        return unlike(value, SHAPES[kind])
    return [] if _fits(value, kind) else [f"{value!r} is no {kind}"]


def _fits(value: object, kind: str) -> bool:
    if kind == "hex":
        return isinstance(value, str) and not value.strip("0123456789abcdef")
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {"string": str, "integer": int, "boolean": bool, "object": object}
    return isinstance(value, kinds[kind]) and (kind != "integer" or not isinstance(value, bool))


def unlike(document: object, fields: Fields) -> list[str]:
    """Return how a document differs from its fields: missing, unknown, of another kind."""
    if not isinstance(document, dict):
        return [f"{document!r} is no object"]
    found = [f"{name} is missing" for name in fields if name not in document]
    found += [f"{name} is not documented" for name in document if name not in fields]
    for name, (kind, _) in fields.items():
        if name in document:
            found += [f"{name}: {fault}" for fault in faults(document[name], kind)]
    return found

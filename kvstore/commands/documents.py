"""The fields of what commands write with ``--json``: docs/json.md is made from this.

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
SHAPES: dict[str, Fields] = {
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
        "kind": ("string", "damaged, missing, stale or unreadable"),
        **NAME,
        "path": ("string", "where its record lies, below STORE/blocks"),
    },
    "found": {
        "damaged": ("integer", "records that are not whole: dropped, a copy is in quarantine/"),
        "missing": ("integer", "blocks without a record: dropped"),
        "stale": ("integer", "records of another key or version in a block's place: dropped"),
        "unreadable": ("integer", "records that the device refused to read"),
    },
    "scrub": SCRUB,
    "kept": {
        "pinned": ("integer", "blocks that are pinned"),
        "in_use": ("integer", "blocks leased, being read or written"),
        "needed_by_others": ("integer", "blocks that others which stay follow"),
    },
}

_STORE: Fields = {
    "store": ("string", "directory of the store"),
    "uuid": ("hex", "uuid of the store"),
    "format": ("integer", "version of the store's format"),
    "engine": ("string", "engine of the store"),
    "capacity_bytes": ("integer", "what the store may take on disk"),
    "created": ("string", "when it was made"),
    "opens": ("integer", "how often it was opened for writing"),
    "blocks": ("integer", "blocks on disk"),
    "ghosts": ("integer", "blocks that are not here but that others follow"),
    "live_bytes": ("integer", "what their records take"),
    "used_bytes": ("integer", "what the directory takes on disk, as du counts it"),
    "journal_bytes": ("integer", "of these, journal and checkpoint"),
    "quarantine_bytes": ("integer", "of these, copies of damaged records"),
    "kept_bytes": ("integer", "of these, former blocks and copies that migrate has not finished"),
}
_DAEMON: Fields = {
    "state": ("string", "ready, degraded or draining; recovering see below"),
    "problems": ("list of string", "what makes it degraded"),
    "version": ("string", "version of the daemon"),
    "pid": ("integer", "process of the daemon"),
    "socket": ("string", "its Unix socket"),
    "clients": ("integer", "connections"),
    "region_bytes": ("integer", "memory that clients share with the daemon"),
    "failed_requests": ("integer", "requests that ended in a fault of the daemon"),
    "get_us_buckets": ("list of integer", "gets that took less than 1, 2, 4, 8, ... microseconds"),
    "put_us_buckets": ("list of integer", "the same for puts"),
}
STATUS: Fields = {
    **_DAEMON,
    **_STORE,
    "notes": ("list of string", "what is worth knowing; administrators only"),
    "io": ("string", "memory, direct, buffered or mmap"),
    "write": ("string", "through or late: when accepted blocks are written"),
    "min_free_bytes": ("integer", "what must stay free on the filesystem"),
    "free_bytes": ("integer", "what is free"),
    "memory_capacity_bytes": ("integer", "size of the memory tier"),
    "memory_bytes": ("integer", "of these, in use"),
    "memory_blocks": ("integer", "blocks in memory"),
    "dirty_blocks": ("integer", "blocks in memory only"),
    "dirty_bytes": ("integer", "what they take"),
    "queued_blocks": ("integer", "blocks that wait to be written"),
    "index_bytes_per_block": ("number", "memory of the index for each block"),
    "namespaces": ("integer", "namespaces"),
    "pinned_blocks": ("integer", "blocks under a pin"),
    "pinned_bytes": ("integer", "what their records take"),
    "hits": ("integer", "blocks that were asked for and found, since the start"),
    "memory_hits": ("integer", "of these, in memory"),
    "misses": ("integer", "blocks that were asked for and not there"),
    "warmed": ("integer", "blocks read into memory by warm"),
    "stored": ("integer", "blocks put"),
    "already_present": ("integer", "blocks put that were there"),
    "conflicts": ("integer", "blocks put that were there with another length"),
    "refused_full": ("integer", "blocks refused for want of room"),
    "refused_admission": ("integer", "blocks that left memory without being written: write = late"),
    "write_errors": ("integer", "blocks that could not be written"),
    "read_errors": ("integer", "blocks that could not be read"),
    "evictions": ("integer", "blocks evicted"),
    "evicted_bytes": ("integer", "what they took"),
    "deleted": ("integer", "blocks deleted by name"),
    "read_bytes": ("integer", "bytes of the blocks found"),
    "written_bytes": ("integer", "bytes of the blocks written"),
    "corrupt_blocks": ("integer", "records that failed verification: an alarm"),
    "stale_blocks": ("integer", "records of another key or version in a block's place"),
    "unsynced_blocks": ("integer", "records torn by a power loss, not yet synced: expected"),
    "missing_blocks": ("integer", "blocks without a record"),
    "memory_errors": ("integer", "copies in memory that failed verification"),
    "failed_jobs": ("integer", "pieces of work that failed"),
    "scrub": ("scrub", "verification of what lies on disk"),
    "uptime_seconds": ("number", "since the store was opened"),
}
RECOVERING: Fields = {
    **_DAEMON,
    "store": ("string", "directory of the store"),
    "engine": ("string or null", "engine of the store"),
    "phase": ("string", "what the opening is at"),
    "scanned": ("integer", "records looked at so far"),
}

DOCUMENTS: dict[str, Fields] = {
    "serve --check-only": {"settings": ("string", "valid")},
    "create": {
        "store": ("string", "directory of the store"),
        "uuid": ("hex", "uuid of the store"),
        "engine": ("string", "engine of the store"),
        "capacity_bytes": ("integer", "what the store may take on disk"),
        "device": ("string", "where it lies"),
        "mount_point": ("string", "where that is mounted"),
    },
    "status": STATUS,
    "put": {
        "key": ("hex", "key of the block"),
        "bytes": ("integer", "bytes of the block"),
        "result": ("string", "stored or already_present"),
        "ack": ("string", "accepted, written or durable"),
    },
    "get": {
        "key": ("hex", "key of the block"),
        "bytes": ("integer", "bytes of the block"),
        "output": ("string", "the file that has them"),
    },
    "contains": {
        "contains": ("map of boolean", "by key: it is there"),
        "present": ("integer", "how many are there"),
    },
    "contains --prefix": {
        "prefix": ("integer", "blocks from the first on that are there"),
        "keys": ("integer", "keys given"),
    },
    "list": {"blocks": ("list of block", "the blocks"), "count": ("integer", "how many")},
    "delete": {
        "deleted": ("integer", "blocks that are gone"),
        "absent": ("integer", "keys without a block"),
    },
    "inspect": {
        **_STORE,
        "clean": ("boolean or null", "the last daemon stopped cleanly; null while one has it"),
        "namespaces": ("list of namespace", "what each holds"),
        "damage": ("list of string", "what is wrong with journal, checkpoint or namespaces"),
    },
    "inspect --namespaces": {"namespaces": ("list of namespace", "what each holds")},
    "inspect KEY": {
        **NAME,
        "parent": ("hex or null", "key of the block before it in its chain"),
        "children": ("integer", "blocks that follow it"),
        "bytes": ("integer", "bytes of the block"),
        "record_bytes": ("integer", "what its record takes on disk"),
        "generation": ("integer", "number of the version"),
        "place": ("integer", "where the engine has it; 0 if it finds it by its key"),
        "last_use": ("number", "seconds since 1970"),
        "memory": ("boolean", "it is in memory"),
        "disk": ("boolean", "it is on disk"),
        "dirty": ("boolean", "it waits to be written"),
        "references": ("integer", "readers at this moment"),
        "pinned_until": ("number or null", "seconds since 1970"),
        "path": ("string or null", "where its record lies, below STORE/blocks"),
        "verdict": ("string", "ok, stale, damaged, missing, unreadable or not written yet"),
        "reason": ("string", "why it is not ok"),
        "envelope": ("envelope or null", "the header of its record, if there is a whole one"),
    },
    "inspect KEY --tree": {
        "namespace": ("hex", "id of the namespace"),
        "shard": ("integer", "number of the parallel rank"),
        "blocks": ("list of member", "its ancestors, itself, its descendants"),
        "more": ("boolean", "there are more than --limit"),
    },
    "evict": {
        "blocks": ("list of block", "what has left; with -n, what would"),
        "count": ("integer", "how many"),
        "bytes": ("integer", "what their records took"),
        "dry_run": ("boolean", "nothing was done"),
        "failed": ("integer", "blocks whose records could not be deleted"),
        "kept": ("kept", "blocks that were asked for and stay; empty if interrupted"),
        "used_bytes": ("integer or null", "what the store takes on disk afterwards"),
        "interrupted": ("boolean", "it ended by Ctrl-C"),
    },
    "warm": {
        "loaded": ("integer", "blocks brought into memory"),
        "present": ("integer", "blocks that were there"),
        "absent": ("integer", "blocks that the store does not have"),
        "skipped": ("integer", "blocks for which memory has no room"),
        "failed": ("integer", "blocks that could not be read"),
        "bytes": ("integer", "memory that loaded and present blocks take"),
        "interrupted": ("boolean", "it ended by Ctrl-C"),
    },
    "warm -n": {
        "blocks": ("list of block", "what would be warmed"),
        "count": ("integer", "how many"),
        "dry_run": ("boolean", "true"),
    },
    "pin": {
        "pinned": ("integer", "blocks that are pinned now"),
        "absent": ("integer", "keys without a block"),
        "refused": ("integer", "blocks past the cap of pins"),
        "seconds": ("integer", "for how long"),
        "pinned_bytes": ("integer", "what all pins of the store keep"),
    },
    "unpin": {
        "unpinned": ("integer", "pins that were lifted"),
        "not_pinned": ("integer", "keys without a pin, or with one of an administrator"),
    },
    "pins": {"pins": ("list of pin", "the pins"), "count": ("integer", "how many")},
    "flush": {"errors": ("list of lost block", "accepted, but not written; told once")},
    "migrate": {
        "source": ("string", "where the blocks come from"),
        "store": ("string", "directory of the store that takes them"),
        "blocks": ("integer", "blocks that can be taken"),
        "bytes": ("integer", "their bytes"),
        "copied": ("integer", "blocks that were brought in"),
        "present": ("integer", "blocks that the store had"),
        "left": ("list of left block", "blocks that could not be read or put"),
        "findings": ("list of strange file", "files of the source that are no good blocks"),
        "dry_run": ("boolean", "nothing was done, and the store was not asked"),
        "interrupted": ("boolean", "it ended by Ctrl-C"),
    },
    "migrate --to": {
        "store": ("string", "directory of the store"),
        "from": ("string", "the engine that it had"),
        "to": ("string", "the engine that it is to have"),
        "blocks": ("integer", "blocks of the store"),
        "bytes": ("integer", "what their records take"),
        "needed_bytes": ("integer", "what the copy takes at most"),
        "present": ("integer", "blocks that an earlier run copied"),
        "copied": ("integer", "blocks that this run copied"),
        "left": ("list of left block", "damaged blocks, which stay behind"),
        "already": ("boolean", "the store has that engine: nothing was done"),
        "dry_run": ("boolean", "nothing was done"),
        "switched": ("boolean", "the store has its new engine"),
        "interrupted": ("boolean", "it ended by Ctrl-C"),
    },
    "migrate --rollback": {
        "store": ("string", "directory of the store"),
        "engine": ("string", "the engine that it has now"),
        "given_up": ("string or null", "the engine of a copy that was not finished"),
        "freed_bytes": ("integer", "what is free again"),
    },
    "migrate --delete-source": {
        "store": ("string", "directory of the store"),
        "freed_bytes": ("integer", "what is free again; with -n, what would be"),
        "dry_run": ("boolean", "nothing was done"),
    },
    "recover": {
        "store": ("string", "directory of the store"),
        "to": ("string or null", "directory of the new store"),
        "engine": ("string", "engine of the store"),
        "dry_run": ("boolean", "nothing was done"),
        "kept": ("integer", "blocks that are whole"),
        "kept_bytes": ("integer", "what their records take"),
        "quarantined": ("integer", "records that are damaged"),
        "quarantined_bytes": ("integer", "what they take"),
        "lost": ("integer", "blocks that the journal names and no file has"),
        "other_stores": ("integer", "records of other stores, not touched"),
        "quarantine": ("string or null", "where the damaged ones are"),
        "damaged": ("list of damaged record", "these"),
        "lost_blocks": ("list of block", "those that are lost"),
        "problems": ("list of string", "what else is wrong"),
        "next_command": ("string or null", "what to do next"),
    },
    "scrub start": SCRUB,
    "scrub start --wait": {**SCRUB, "findings": ("list of finding", "what it found, in order")},
    "scrub pause": SCRUB,
    "scrub stop": SCRUB,
    "scrub status": {**SCRUB, "findings": ("list of finding", "the last 1,024 of this daemon")},
    "scrub ack": {"acknowledged": ("integer", "damaged records since the last time")},
    "doctor": {
        "checks": ("list of check", "what was looked at"),
        "ok": ("integer", "how many are well"),
        "warn": ("integer", "how many could be better"),
        "fail": ("integer", "how many must be mended"),
        "unknown": ("integer", "how many could not be made"),
    },
    "engines": {"engines": ("list of engine", "the engines")},
    "config check": {
        "valid": ("boolean", "serve would take these settings"),
        "problems": ("list of problem", "what is wrong"),
    },
    "config show": {"settings": ("list of setting", "every setting")},
    "config example": {"example": ("string", "a configuration file")},
    "completion": {"shell": ("string", "which"), "script": ("string", "what it is to run")},
    "version": {
        "version": ("string", "of this program"),
        "protocol": ("integer", "version of the protocol"),
        "store_format": ("integer", "version of the store's format"),
        "python": ("string", "version of Python"),
    },
}
"""By command, with the option that changes the answer."""

_SUMMARY: Fields = {
    "type": ("string", "summary"),
    "samples": ("integer", "lines before this one"),
    "seconds": ("number", "how long it took"),
}
LINES: dict[str, list[Fields]] = {
    "fsck": [
        {
            "type": ("string", "finding"),
            "id": ("string", "what it is, see docs/fsck.md"),
            "severity": ("string", "damage, repairable or note"),
            "path": ("string", "where, below the directory of the store"),
            "detail": ("string", "what is wrong, in words"),
            "namespace": ("hex or null", "id of the namespace, of a block or of its record"),
            "shard": ("integer or null", "number of the parallel rank"),
            "key": ("hex or null", "key of the block"),
            "generation": ("integer or null", "number of the version"),
        },
        {
            "type": ("string", "summary"),
            "store": ("string", "directory of the store"),
            "blocks": ("integer", "blocks in the index"),
            "records": ("integer", "records whose headers were read"),
            "checked": ("integer", "blocks that were compared, or verified with --verify-data"),
            "bytes": ("integer", "what the records that were verified take"),
            "finished": ("boolean", "false if it stopped before the last block"),
            "ok": ("integer", "blocks without a fault, as far as this check looked"),
            "corrupt": ("corrupt", "damaged records"),
            "orphan": ("integer", "records that the index did not know"),
            "missing": ("integer", "blocks without a record"),
            "duplicate": ("integer", "blocks of which an old version was there, too"),
            "stale_tmp": ("integer", "files that were not finished before a kill"),
            "foreign": ("integer", "what is not the store's"),
            "perms": ("integer", "wrong modes and owners"),
            "unreadable": ("integer", "records that the device or the library refused to read"),
            "repaired": ("integer", "faults that a repair put right"),
            "quarantined": ("integer", "records and files that a repair moved to quarantine"),
            "dropped": ("integer", "blocks that a repair dropped: misses"),
            "left": ("integer", "faults that are left"),
            "next_command": ("string or null", "what helps against those"),
            "seconds": ("number", "how long it took"),
            "code": ("integer", "the exit code"),
        },
    ],
    "status --watch": [{"type": ("string", "status"), **STATUS}, _SUMMARY],
    "top": [
        {
            "type": ("string", "sample"),
            "time": ("number", "seconds since 1970"),
            "seconds": ("number", "time that it tells of; for the first one, since the start"),
            "gets_per_second": ("number", "blocks asked for"),
            "puts_per_second": ("number", "blocks put"),
            "read_bytes_per_second": ("number", "bytes of blocks found"),
            "written_bytes_per_second": ("number", "bytes of blocks written"),
            "hit_ratio": ("number or null", "found of those asked for; null if none were"),
            "get_p50_seconds": ("number or null", "half of the gets took no longer"),
            "get_p99_seconds": ("number or null", "99 % of the gets took no longer"),
            "put_p50_seconds": ("number or null", "the same for puts"),
            "put_p99_seconds": ("number or null", "the same for puts"),
            "dirty_bytes": ("integer", "what is in memory only, at the end"),
            "evictions_per_second": ("number", "blocks evicted"),
        },
        _SUMMARY,
    ],
}
"""Commands that write a JSON object a line, the last one of type ``summary``."""

ERROR: Fields = {
    "type": ("string", "error"),
    "code": ("integer", "the exit code"),
    "error": ("string", "class of the error, see errors.py"),
    "message": ("string", "what happened"),
    "hint": ("string", "what to do"),
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

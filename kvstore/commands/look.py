"""``kvstore inspect``: a store, a block, a chain; with the daemon or without."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import click

from kvstore.commands.frame import Call, Command, become_owner
from kvstore.commands.names import read_namespace
from kvstore.errors import CorruptStore, DaemonUnavailable, DeadlineExceeded, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvstore.client import Client
    from kvstore.lookup import AtRest

DIGITS = re.compile("[0-9a-fA-F]+", re.ASCII)
TREE_LINES = 1000
SHARED_FIELDS = (
    *("store", "uuid", "format", "engine", "parity", "disk_checksums", "capacity_bytes"),
    *("created", "opens", "blocks"),
    *("ghosts", "live_bytes", "used_bytes", "journal_bytes", "quarantine_bytes", "kept_bytes"),
)
"""Fields of a summary that the status has too."""
_YES = {True: "yes, the filesystem has them", False: "no", None: "not known"}


@click.command(
    cls=Command,
    example=(
        "kvstore inspect /mnt/nvme/kv\nkvstore inspect 00ff12ab\n"
        "kvstore inspect 00ff12ab --tree\nkvstore inspect --namespaces"
    ),
    exits={
        0: "",
        1: "",
        2: "",
        4: "no such block or namespace",
        5: "the journal or another file of the store is damaged, or the record of the block is",
        10: "",
        11: "a daemon has the store; leave out STORE to ask it",
        12: "the daemon did not answer in time",
        13: "",
        15: "",
        130: "",
        141: "",
    },
)
@click.argument("words", metavar="[STORE] [KEY]", nargs=-1)
@click.option("--store", metavar="DIR", help="Directory of the store: no daemon is asked.")
@click.option("--tree", is_flag=True, help="The chain of the block: what it follows, what follows.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=TREE_LINES,
    show_default=True,
    help="Most lines of --tree.",
)
@click.option("--namespaces", is_flag=True, help="Only what each namespace holds.")
@click.option("--namespace", metavar="NAME|@FILE|ID", help="Look for KEY in this namespace only.")
@click.option("--shard", type=click.IntRange(0, 0xFFFF), help="Look for KEY in this shard only.")
@click.pass_obj
def inspect(
    call: Call,
    words: tuple[str, ...],
    store: str | None,
    tree: bool,
    limit: int,
    namespaces: bool,
    namespace: str | None,
    shard: int | None,
) -> int:
    """Show what a store holds, or one block.

    Of a block the record is read and judged, and its envelope decoded. KEY may be abbreviated to
    its first 8 hex digits or more; a STORE whose name is hexadecimal is written ./cafe.

    A daemon is asked if one answers and no STORE is named. Else the store is read from disk, for
    which a read-only mount will do. Nothing is written.
    """
    path, key = _told_apart(words, store)
    if tree and key is None:
        raise UsageError("--tree is about a block", "name its key")
    if key is None:
        return _show_store(call, path, namespaces=namespaces)
    asked: dict[str, object] = {"key": key.lower()}
    if namespace is not None:
        asked["namespace"] = read_namespace(namespace).id
    if shard is not None:
        asked["shard"] = shard
    with _source(call, path) as source:
        if tree:
            return _show_tree(call, source.tree({**asked, "limit": limit}))
        return _show_block(call, source.block(asked))


def _told_apart(words: tuple[str, ...], store: str | None) -> tuple[str | None, str | None]:
    """Return store and key of the words, in which a key is hexadecimal and nothing else is."""
    keys = [word for word in words if DIGITS.fullmatch(word)]
    paths = [word for word in words if not DIGITS.fullmatch(word)]
    if len(keys) > 1:
        raise UsageError(f"two keys are named, {keys[0]} and {keys[1]}", "name one")
    paths += [store] if store is not None and store not in paths else []
    if len(paths) > 1:
        raise UsageError(f"two stores are named, {paths[0]} and {paths[1]}", "name one")
    return next(iter(paths), None), next(iter(keys), None)


# -- where it is told -----------------------------------------------------------------------------


class Source(Protocol):
    """Somebody who knows the blocks of a store."""

    def block(self, asked: Mapping[str, object]) -> Mapping[str, Any]: ...

    def tree(self, asked: Mapping[str, object]) -> Mapping[str, Any]: ...


class Asked:
    """The daemon."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def block(self, asked: Mapping[str, object]) -> Mapping[str, Any]:
        return self._client.admin({"op": "inspect", **asked})

    def tree(self, asked: Mapping[str, object]) -> Mapping[str, Any]:
        return self._client.admin({"op": "tree", **asked})


class Read:
    """The files of the store."""

    def __init__(self, store: AtRest) -> None:
        self._store = store

    def _find(self, asked: Mapping[str, Any]) -> int:
        from kvstore.lookup import check_digits

        namespace = asked.get("namespace")
        identity = None if namespace is None else bytes.fromhex(namespace)
        return self._store.find(check_digits(asked["key"]), identity, asked.get("shard"))

    def block(self, asked: Mapping[str, object]) -> Mapping[str, Any]:
        return self._store.tell(self._find(asked))

    def tree(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._store.tree(self._find(asked), asked["limit"])


@contextmanager
def _source(call: Call, path: str | None) -> Iterator[Source]:
    """Ask the daemon if one answers and no store is named, else read the store."""
    client = _daemon(call) if path is None else None
    if client is not None:
        with client:
            yield Asked(client)
        return
    from kvstore.lookup import AtRest

    folder = _folder(call, path)
    with AtRest(folder) as store:
        yield Read(store)


def _daemon(call: Call) -> Client | None:
    client = call.new_client()
    try:
        client.status()
    except DeadlineExceeded:
        raise
    except DaemonUnavailable:
        client.close()
        return None
    return client


def _folder(call: Call, path: str | None) -> Path:
    folder = call.store(path)
    become_owner(folder)
    return folder


# -- a store --------------------------------------------------------------------------------------


def _show_store(call: Call, path: str | None, *, namespaces: bool) -> int:
    client = _daemon(call) if path is None else None
    if client is None:
        from kvstore.summary import summarize

        document: Mapping[str, Any] = summarize(_folder(call, path)).document()
    else:
        with client:
            document = _asked_summary(client)
    shares = list(document["namespaces"])
    if namespaces:
        differences = list(_differences(shares))
        lines = [*_share_lines(shares), *_difference_lines(differences)]
        call.output.result({"namespaces": shares, "differences": differences}, lines)
    else:
        lines = [*_summary_lines(document), *_share_lines(shares)]
        lines += [f"damage: {text}" for text in document["damage"]]
        call.output.result(document, lines)
    return CorruptStore.exit_code if document["damage"] else 0


def _asked_summary(client: Client) -> Mapping[str, Any]:
    """Return what :func:`kvstore.summary.summarize` tells, of a store that is being served."""
    found = client.status()
    shares = [
        share
        for part in client.follow({"op": "namespaces"})
        for share in cast("list[Mapping[str, Any]]", part["namespaces"])
    ]
    same = {name: found.get(name) for name in SHARED_FIELDS}
    return {**same, "clean": None, "namespaces": shares, "damage": []}


def _summary_lines(document: Mapping[str, Any]) -> Iterator[str]:
    from kvstore import render

    used, capacity = render.size(document["used_bytes"]), render.size(document["capacity_bytes"])
    uuid = document["uuid"]
    yield from render.fields(
        [
            ("store", document["store"]),
            ("uuid", uuid.hex() if isinstance(uuid, bytes) else uuid),
            ("engine", document["engine"]),
            ("parity", document["parity"]),
            ("disk checksums", _YES[document["disk_checksums"]]),
            ("created", document["created"]),
            ("opened", _openings(document)),
            ("blocks", document["blocks"]),
            ("live", render.size(document["live_bytes"])),
            ("on disk", f"{used} of {capacity}"),
            ("journal", render.size(document["journal_bytes"])),
            ("quarantine", render.size(document["quarantine_bytes"])),
            ("left by migrate", render.size(document["kept_bytes"])),
        ]
    )


def _share_lines(shares: list[Mapping[str, Any]]) -> Iterator[str]:
    from kvstore import render

    yield from render.table(
        ["namespace", "blocks", "live", "quota", "key bytes", "record"],
        [
            (
                share["id"],
                share["blocks"],
                render.size(share["live_bytes"]),
                "none" if share["quota_bytes"] is None else render.size(share["quota_bytes"]),
                share["key_length"] or "any",
                render.compact(share["record"]),
            )
            for share in shares
        ],
    )


def _differences(shares: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how each namespace differs from the one before that it has most in common with.

    That tells why a model server does not find what it stored the day before. Those that share
    less than half of their fields are of no kin.
    """
    records = [(share["id"], share["record"] or {}) for share in shares]
    for number, (identity, record) in enumerate(records):
        kin = [
            (len(_unlike(record, other)), position, name)
            for position, (name, other) in enumerate(records[:number])
            if len(_unlike(record, other)) * 2 <= len(record.keys() | other.keys())
        ]
        if kin:
            _, position, name = min(kin)
            fields = _unlike(record, records[position][1])
            yield {
                "namespace": identity,
                "other": name,
                "fields": {
                    field: [record.get(field), records[position][1].get(field)] for field in fields
                },
            }


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


def _difference_lines(differences: list[dict[str, Any]]) -> Iterator[str]:
    from kvstore import render

    for difference in differences:
        yield f"{difference['namespace']} differs from {difference['other']} in"
        for name, values in difference["fields"].items():
            mine, theirs = ("nothing" if one is None else render.compact(one) for one in values)
            yield f"  {name}: {mine}, not {theirs}"


def _openings(document: Mapping[str, Any]) -> str:
    from kvstore import render

    opens, clean = document["opens"], document["clean"]
    if not opens:
        return "never"
    ending = "stopped cleanly" if clean else "not stopped cleanly"
    return f"{render.count(opens, 'time')}, {'open now' if clean is None else ending}"


# -- a block --------------------------------------------------------------------------------------


def _show_block(call: Call, told: Mapping[str, Any]) -> int:
    call.output.result(told, _block_lines(told))
    return CorruptStore.exit_code if told["verdict"] in ("damaged", "stale", "missing") else 0


def _block_lines(told: Mapping[str, Any]) -> Iterator[str]:
    from kvstore import render

    tiers = [name for name in ("memory", "disk") if told[name]]
    until, reason = told["pinned_until"], told["reason"]
    yield from render.fields(
        [
            ("key", told["key"]),
            ("namespace", told["namespace"]),
            ("shard", str(told["shard"])),
            ("parent", told["parent"] or "none"),
            ("children", told["children"]),
            ("bytes", f"{told['bytes']:,} ({told['record_bytes']:,} as a record)"),
            ("tier", ", ".join(tiers) + (", not written yet" if told["dirty"] else "")),
            ("path", told["path"] or "none"),
            ("generation", f"{told['generation']:#x}"),
            ("last use", render.utc(told["last_use"])),
            ("pinned", "no" if until is None else f"until {render.utc(until)}"),
            ("readers", told["references"]),
            ("record", told["verdict"] + (f": {reason}" if reason else "")),
        ]
    )
    if told["envelope"]:
        yield "envelope"
        shown = dict(told["envelope"])
        shown["written"] = render.utc(shown.pop("written_ns") / 1e9)
        shown["generation"] = f"{shown['generation']:#x}"
        pairs = [
            (f"  {name}", "none" if value in (None, "") else str(value))
            for name, value in shown.items()
        ]
        yield from render.fields(pairs)


def _show_tree(call: Call, told: Mapping[str, Any]) -> int:
    call.output.result(told, _tree_lines(call, told))
    if told["more"]:
        call.output.note("there is more: raise --limit")
    return 0


def _tree_lines(call: Call, told: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each block, indented where a chain branches only: most never do."""
    from kvstore import render

    parents = list(_parents([block["depth"] for block in told["blocks"]]))
    children = Counter(parents)
    indents: list[int] = []
    for block, parent in zip(told["blocks"], parents, strict=True):
        above = indents[parent] if parent is not None else 0
        indents.append(above + (children[parent] > 1))
        size = render.size(block["bytes"]) if block["there"] else "not here"
        text = f"{'  ' * indents[-1]}{block['key']}  {size}"
        yield call.output.style(text, "bold") if block["chosen"] else text


def _parents(depths: list[int]) -> Iterator[int | None]:
    """Yield for each line of a table of contents which line it belongs to."""
    last: dict[int, int] = {}
    for number, depth in enumerate(depths):
        last[depth] = number
        yield last.get(depth - 1)

"""``kvstore migrate SRC DST``: the blocks of another store, or of another system's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.commands.frame import INTERRUPTED, PARTLY, Call, become_owner
from kvstore.commands.migrating import MOST_LEFT, left_lines, read_rate
from kvstore.commands.names import read_namespace, read_size
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstore.backends.base import Finding
    from kvstore.importers.base import Importer
    from kvstore.importers.store import StoreSource
    from kvstore.keys import NamespaceRecord
    from kvstore.merge import Merged


def bring(call: Call, source: str, target: str, /, **how: Any) -> int:  # noqa: ANN401
    """Bring the blocks of SRC into DST; return the exit code."""
    from kvstore import config, merge

    name, path = told_apart(source)
    engine, store = told_apart(target)
    _check_target(engine, path, store)
    record = None if how["namespace"] is None else _record(how["namespace"])
    size, rate = read_size(how["capacity"], "--capacity"), read_rate(how["rate"])
    min_free = config.load(call.flags()).settings.min_free
    if store.exists():
        become_owner(store)
    origin = _source(name, path, how)
    try:
        listing = origin.listing()
        if record is not None:
            merge.renamed(listing, record)
        if how["dry_run"]:
            found = merge.Merged(len(listing.entries), sum(e.length for e in listing.entries))
            found.findings = listing.findings
            return _tell(call, path, store, found, dry_run=True)
        merge.make(store, engine, size, merge=how["merge"])
        bringing = merge.Merge(origin, listing, store, engine=engine, min_free=min_free)
        with call.output.progress(len(listing.entries), "block") as progress:
            merged = bringing.run(progress.add, rate=rate)
        return _tell(call, path, store, merged, dry_run=False)
    finally:
        origin.close()


def told_apart(text: str) -> tuple[str | None, Path]:
    """Return name and path of [NAME:]PATH; what is no known name belongs to the path."""
    from kvstore import backends
    from kvstore.importers import IMPORTERS

    name, colon, path = text.partition(":")
    if colon and path and name in {*IMPORTERS, *backends.engine_names(), *backends.ALIASES}:
        return name, Path(path)
    return None, Path(text)


def _check_target(engine: str | None, source: Path, target: Path) -> None:
    from kvstore.importers import IMPORTERS

    if engine in IMPORTERS:
        raise UsageError(f"{engine} is only read", "name an engine for DST, or its path alone")
    if source.resolve() == target.resolve():
        raise UsageError(f"SRC and DST are both {target}", "name two places")


def _source(name: str | None, path: Path, how: Mapping[str, Any]) -> Importer | StoreSource:
    from kvstore.importers import IMPORTERS, importer_class
    from kvstore.importers.store import StoreSource

    fields = dict(_field(text) for text in how["fields"])
    if name not in IMPORTERS:
        return StoreSource(path, fields, name)
    return importer_class(name)(path, fields, length=read_size(how["block_bytes"], "--block-bytes"))


def _field(text: str) -> tuple[str, str | int]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"--field {text} is no NAME=VALUE", "write for example weights=3f2a")
    # Numbers are numbers in a record: it has another id with "2" for 2.
    return name, int(value) if value.isdecimal() else value


def _record(text: str) -> NamespaceRecord:
    space = read_namespace(text)
    if space.record is None:
        raise UsageError(f"--namespace {text} is an id", "give its record: NAME or @FILE")
    return space.record


def _tell(call: Call, source: Path, store: Path, merged: Merged, *, dry_run: bool) -> int:
    from kvstore.importers.base import HARMLESS

    document = {
        "source": source,
        "store": store,
        "blocks": merged.blocks,
        "bytes": merged.bytes,
        "copied": merged.copied,
        "present": merged.present,
        "left": [one._asdict() for one in merged.left],
        "findings": [
            {"kind": one.kind, "path": one.path, "detail": one.detail} for one in merged.findings
        ],
        "dry_run": dry_run,
        "interrupted": merged.interrupted,
    }
    call.output.result(document, _lines(store, merged, dry_run=dry_run))
    if merged.interrupted:
        again = "repeat it with --merge to go on"
        call.output.error("Interrupted", INTERRUPTED, "interrupted", again)
        return INTERRUPTED
    lost = merged.left or any(one.kind not in HARMLESS for one in merged.findings)
    return PARTLY if lost else 0


def _lines(store: Path, merged: Merged, *, dry_run: bool) -> Iterable[str]:
    from kvstore import render

    blocks = f"{render.count(merged.blocks, 'block')} of {render.size(merged.bytes)}"
    if dry_run:
        yield f"would bring {blocks} into {store}, but those that it has"
    else:
        yield f"of {blocks} copied {merged.copied:,}, {merged.present:,} were in {store} already"
    yield from left_lines(merged.left)
    yield from _finding_lines(merged.findings)


def _finding_lines(findings: Sequence[Finding]) -> Iterable[str]:
    for one in findings[:MOST_LEFT]:
        yield f"{one.kind}: {one.path}: {one.detail}"
    if len(findings) > MOST_LEFT:
        yield f"{len(findings) - MOST_LEFT:,} more like these; --json names all"

"""``kvstore recover``: a store that does not open, made to open, or its blocks saved elsewhere."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, become_owner, store_option
from kvstore.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.salvage import Damaged, Survey

SHOWN = 20


@click.command(
    cls=Command,
    example=(
        "kvstore recover /var/lib/kvstore -n\nkvstore recover /var/lib/kvstore\n"
        "kvstore recover /mnt/broken --to /var/lib/kvstore-new -y"
    ),
    exits={
        0: "every block that could be had is in the store; the summary tells what could not",
        1: "",
        2: "wrong usage, or nobody was there to say yes",
        10: "no store and no files of one at STORE",
        11: "",
        13: "the engine is not known, or is not the one given",
        14: "no room, nothing was changed",
        15: "",
        130: "interrupted; run it again",
        141: "",
    },
)
@store_option
@click.option("--to", "new", metavar="NEW", help="Make a new store at NEW; STORE stays as it is.")
@click.option(
    "--engine",
    metavar="NAME",
    help="Engine of NEW; without --to, that of a STORE whose files do not tell.",
)
@click.option("--quarantine", metavar="DIR", help="Where damaged parts go instead of the store.")
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
@click.pass_obj
def recover(
    call: Call,
    argument: str | None,
    store: str | None,
    new: str | None,
    engine: str | None,
    quarantine: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Make a store that is damaged open again, with every block that is whole.

    The files of the engine are searched for records; its library, its indexes and its journal are
    not needed. Each record is verified. Then the store gets a new index (filesystem, superblock) or
    its blocks are copied into a new directory of the engine (lmdb, leveldb, sqlite), for which
    there must be room. Damaged records, and an old directory, are moved to quarantine/; nothing is
    deleted that is not there once more.

    With --to nothing in STORE is written, and a read-only mount will do. A STORE without STORE.json
    is recognised by its files; namespaces whose files are lost can be opened by their id and by
    whoever has their record.

    Killed or interrupted, it can simply be run again.
    """
    if argument is not None and store is not None and argument != store:
        raise UsageError(f"two stores are named, {argument} and {store}", "name one")
    path = call.store(store if argument is None else argument)
    target = _elsewhere(path, new, "--to")
    keep = _elsewhere(path / "blocks", quarantine, "--quarantine")
    _become_owner(path, [] if dry_run else [one for one in (target, keep) if one is not None])
    with _survey(call, path, engine, shared=bool(target) or dry_run) as survey:
        if target is None and engine not in (None, survey.record.engine):
            raise ConfigError(
                f"the store at {path} uses the engine {survey.record.engine}, not {engine}",
                "leave out --engine, or give --to",
            )
        _check_room(survey, target, engine, keep)
        if not dry_run:
            _confirm(call, survey, target, yes=yes)
            _run(call, survey, target, engine, keep)
        _tell(call, survey, target, keep, dry_run=dry_run)


def _elsewhere(path: Path, given: str | None, option: str) -> Path | None:
    """Return the directory that an option names. Raises UsageError where it can be none."""
    if given is None:
        return None
    found = Path(given).absolute()
    if found.resolve().is_relative_to(path.resolve()):
        raise UsageError(f"{option} {given} lies in {path}", "choose another place")
    if not found.parent.is_dir():
        raise UsageError(f"{option} {given}: {found.parent} is no directory", "make it first")
    return found


def _check_room(survey: Survey, target: Path | None, engine: str | None, keep: Path | None) -> None:
    from kvstore import rebuild

    if target is None:
        rebuild.check_room(survey, keep or survey.path / "quarantine")
    else:
        rebuild.check_room_at(survey, target, engine or survey.record.engine)


def _become_owner(path: Path, made: list[Path]) -> None:
    """Become the store's owner, who must be able to write what is made: so root makes it first."""
    if os.geteuid() == 0 and path.is_dir() and made:
        _probe(path)
        owner = path.stat()
        for folder in made:
            if not folder.exists() and folder.parent.is_dir():
                folder.mkdir(0o700)
            if folder.is_dir() and not folder.is_symlink() and not os.listdir(folder):
                os.chown(folder, owner.st_uid, owner.st_gid, follow_symlinks=False)
    if os.geteuid() == 0:
        _import_all()
    become_owner(path)


def _import_all() -> None:
    """Import what will be needed: the owner of the store may not be able to read the program."""
    import importlib
    import pkgutil

    from kvstore import backends, rebuild, salvage  # noqa: F401

    for found in pkgutil.iter_modules(backends.__path__):
        with suppress(ImportError):
            importlib.import_module(f"kvstore.backends.{found.name}")


def _probe(path: Path) -> None:
    """Raise what would end the command anyway, before anything is made for it."""
    from kvstore import salvage
    from kvstore.lock import Lock

    salvage.read_record(path)
    lock = Lock(path)
    lock.acquire(exclusive=False)
    lock.release()


@contextmanager
def _survey(call: Call, path: Path, engine: str | None, *, shared: bool) -> Iterator[Survey]:
    """Look for blocks, under the lock of the store, held to the end."""
    from kvstore import salvage
    from kvstore.lock import Lock

    salvage.read_record(path)
    lock = Lock(path)
    lock.acquire(exclusive=not shared)
    with ExitStack() as stack:
        stack.callback(lock.release)
        with call.output.progress(None, "B", scale=True) as progress:
            search = salvage.survey(path, engine=engine, seen=progress.add)
            found = stack.enter_context(search)
        yield found


def _confirm(call: Call, survey: Survey, target: Path | None, *, yes: bool) -> None:
    if not yes:
        for line in _plan(survey):
            call.output.note(line)
        what = f"copy them to a new store at {target}" if target else f"rebuild {survey.path}"
        call.output.confirm(f"{what}?", yes=False)


def _run(
    call: Call, survey: Survey, target: Path | None, engine: str | None, keep: Path | None
) -> None:
    from kvstore import rebuild

    with call.output.progress(survey.kept_bytes, "B", scale=True) as progress:
        if target is None:
            rebuild.in_place(survey, keep, progress.add)
        else:
            rebuild.into(survey, target, engine=engine, quarantine=keep, seen=progress.add)


def _tell(
    call: Call, survey: Survey, target: Path | None, keep: Path | None, *, dry_run: bool
) -> None:
    place = keep or (target or survey.path) / "quarantine"
    document = {
        "store": survey.path,
        "to": target,
        "engine": survey.record.engine,
        "dry_run": dry_run,
        "kept": len(survey.kept),
        "kept_bytes": survey.kept_bytes,
        "quarantined": len(survey.damaged),
        "quarantined_bytes": sum(one.bytes for one in survey.damaged),
        "lost": len(survey.lost),
        "other_stores": survey.others,
        "quarantine": place if survey.damaged else None,
        "damaged": [_described(survey, one) for one in survey.damaged],
        "lost_blocks": [
            {"namespace": namespace, "shard": shard, "key": key}
            for namespace, shard, key in survey.lost
        ],
        "problems": survey.problems,
        "next_command": None if dry_run else f"kvstore serve --store {target or survey.path}",
    }
    lines = _plan(survey)
    if not dry_run:
        lines.append(
            f"{target or survey.path} opens again: kvstore serve --store {target or survey.path}"
        )
    call.output.result(document, lines)


def _described(survey: Survey, damaged: Damaged) -> dict[str, Any]:
    namespace, shard, key = damaged.identity or (None, None, None)
    extent = damaged.extent
    return {
        "namespace": namespace,
        "shard": shard,
        "key": key,
        "path": survey.path_of(extent) if extent else None,
        "offset": extent.offset if extent else None,
        "reason": damaged.reason,
    }


def _plan(survey: Survey) -> list[str]:
    """Return what was found, in words."""
    from kvstore import render

    damaged, lost = survey.damaged, survey.lost
    size = render.size(sum(one.bytes for one in damaged))
    lines = [f"damaged: {_damage(survey, one)}" for one in damaged[:SHOWN]]
    lines += [f"and {len(damaged) - SHOWN} more"] if len(damaged) > SHOWN else []
    lines += [
        f"lost: block {key.hex()} of namespace {namespace.hex()}, shard {shard}"
        for namespace, shard, key in lost[:SHOWN]
    ]
    lines += [f"and {len(lost) - SHOWN} more"] if len(lost) > SHOWN else []
    lines += [f"problem: {problem}" for problem in survey.problems]
    if survey.others:
        lines.append(f"not touched: {render.count(survey.others, 'record')} of other stores")
    if not survey.known:
        lines.append(f"STORE.json is damaged or gone: engine {survey.record.engine} by its files")
    lines.append(
        f"{render.count(len(survey.kept), 'block')} kept, {render.size(survey.kept_bytes)}; "
        f"{len(damaged)} quarantined, {size}; {len(lost)} lost"
    )
    return lines


def _damage(survey: Survey, damaged: Damaged) -> str:
    extent = damaged.extent
    where = f"{survey.path_of(extent)} at {extent.offset}" if extent else "nowhere"
    name = f"block {damaged.identity[2].hex()}" if damaged.identity else "a record"
    return f"{name}, {where}: {damaged.reason}"

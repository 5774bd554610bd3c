"""``kvstore migrate``: another engine for a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import INTERRUPTED, PARTLY, Call, Command, become_owner
from kvstore.commands.names import read_size
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kvstore.migrate import Migration, Outcome, Plan

MOST_LEFT = 20
"""Blocks left behind that are named for a person; --json names all."""


@click.command(
    cls=Command,
    example=(
        "kvstore migrate --to lmdb\nkvstore migrate /mnt/nvme/kv --to superblock -n\n"
        "kvstore migrate --rollback\nkvstore migrate --delete-source -y"
    ),
    exits={
        0: "done, or the store has that engine already",
        1: "failed; what was copied is kept, and the same command goes on from there",
        2: "",
        3: "done, but some blocks were damaged and left behind",
        4: "--rollback: there is nothing to go back to",
        5: "a file of the store itself is damaged",
        10: "",
        11: "a daemon has the store: stop it first",
        13: "",
        14: "the copy has no room",
        15: "",
        130: "interrupted; the same command goes on from there",
        141: "",
    },
)
@click.argument("words", metavar="[STORE]", nargs=-1)
@click.option("--store", metavar="DIR", help="Directory of the store.")
@click.option("--to", "engine", metavar="ENGINE", help="The engine that it is to have.")
@click.option("--rollback", is_flag=True, help="Go back, or give up a copy that is not finished.")
@click.option("--delete-source", is_flag=True, help="Delete the former blocks, kept till then.")
@click.option("--capacity", metavar="SIZE", help="Bytes that the store may take from now on.")
@click.option("--rate", metavar="SIZE/s", help="Read no more than so many bytes a second.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Batches copied at a time.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def migrate(
    call: Call,
    words: tuple[str, ...],
    store: str | None,
    engine: str | None,
    rollback: bool,
    delete_source: bool,
    capacity: str | None,
    rate: str | None,
    jobs: int,
    dry_run: bool,
    yes: bool,
) -> int:
    """Change the engine of a store.

    With --to every block is copied to the other engine, verified, and read back; only then the
    store is switched over, at once. Order of use, pins, namespaces, labels and chains come along.
    Damaged blocks stay behind and are named. The daemon must be stopped. After a kill or Ctrl-C the
    same command goes on where it was.

    The former blocks are kept, and count as used, until --delete-source; until then, and as long as
    no new block came in, --rollback goes back to them.
    """
    chosen = [engine is not None, rollback, delete_source]
    if sum(chosen) != 1:
        raise UsageError("migrate wants one thing to do", "--to, --rollback or --delete-source")
    path = _store(call, words, store)
    if rollback:
        return _go_back(call, path, dry_run=dry_run)
    if delete_source:
        return _delete(call, path, dry_run=dry_run, yes=yes)
    from kvstore import config
    from kvstore.migrate import Migration

    assert engine is not None
    size = read_size(capacity, "--capacity")
    speed = _rate(rate)
    min_free = config.load(call.flags()).settings.min_free
    with Migration(path, engine, capacity=size, min_free=min_free) as migration:
        if migration.already:
            line = f"the store at {path} has the engine {migration.engine} already"
            call.output.result(_already(path, migration.engine), [line])
            return 0
        return _change(call, path, migration, jobs=jobs, rate=speed, dry_run=dry_run)


def _store(call: Call, words: tuple[str, ...], store: str | None) -> Path:
    named = list(dict.fromkeys([*words, *([] if store is None else [store])]))
    if len(named) > 1:
        raise UsageError(f"two stores are named, {named[0]} and {named[1]}", "name one")
    path = call.path("store", next(iter(named), None))
    become_owner(path)
    return path


def _rate(text: str | None) -> int | None:
    speed = read_size(None if text is None else text.removesuffix("/s"), "--rate")
    if speed == 0:
        raise UsageError("--rate is 0", "write for example 200MiB/s")
    return speed


# -- another engine -------------------------------------------------------------------------------


def _already(path: Path, engine: str) -> Mapping[str, object]:
    return _document(path, engine, engine, already=True)


def _document(path: Path, source: str, target: str, **more: object) -> dict[str, object]:
    empty: dict[str, object] = {
        "store": path,
        "from": source,
        "to": target,
        **dict.fromkeys(("blocks", "bytes", "present", "copied", "needed_bytes"), 0),
        "left": [],
        **dict.fromkeys(("already", "dry_run", "switched", "interrupted"), False),
    }
    return empty | more


def _change(
    call: Call,
    path: Path,
    migration: Migration,
    *,
    jobs: int,
    rate: int | None,
    dry_run: bool,
) -> int:
    plan = migration.plan()
    if dry_run:
        document = _document(path, plan.source, plan.target, **_planned(plan), dry_run=True)
        call.output.result(document, [_plan_line(plan)])
        return 0
    call.output.note(_plan_line(plan))
    with call.output.progress(plan.blocks, "block") as progress:
        outcome = migration.run(lambda blocks, _: progress.add(blocks), jobs=jobs, rate=rate)
    document = _document(path, plan.source, plan.target, **_planned(plan), **_done(outcome))
    call.output.result(document, _change_lines(path, plan, outcome))
    if outcome.interrupted:
        call.output.error("Interrupted", INTERRUPTED, "interrupted", "repeat it to go on")
        return INTERRUPTED
    return PARTLY if outcome.left else 0


def _planned(plan: Plan) -> dict[str, object]:
    return {
        "blocks": plan.blocks,
        "bytes": plan.bytes,
        "present": plan.present,
        "needed_bytes": plan.needed_bytes,
    }


def _done(outcome: Outcome) -> dict[str, object]:
    return {
        "copied": outcome.copied,
        "present": outcome.present,
        "left": [one._asdict() for one in outcome.left],
        "switched": outcome.switched,
        "interrupted": outcome.interrupted,
    }


def _plan_line(plan: Plan) -> str:
    from kvstore import render

    there = f", {plan.present:,} of them are copied already" if plan.present else ""
    return (
        f"{render.count(plan.blocks, 'block')} of {render.size(plan.bytes)} from {plan.source} to "
        f"{plan.target}{there}; this needs {render.size(plan.needed_bytes)} more on disk"
    )


def _change_lines(path: Path, plan: Plan, outcome: Outcome) -> Iterable[str]:
    from kvstore import render

    earlier = f", {outcome.present:,} were copied before" if outcome.present else ""
    yield f"copied {outcome.copied:,} of {render.count(plan.blocks, 'block')}{earlier}"
    for one in outcome.left[:MOST_LEFT]:
        yield f"left behind: {one.namespace} {one.shard} {one.key}: {one.reason}"
    if len(outcome.left) > MOST_LEFT:
        yield f"left behind: {len(outcome.left) - MOST_LEFT:,} more; --json names all"
    if outcome.switched:
        yield f"the store at {path} has the engine {plan.target} now"
        yield (
            f"the blocks of {plan.source} are kept: kvstore migrate --delete-source removes them, "
            "--rollback goes back"
        )
    else:
        yield "the store is as it was"


# -- afterwards -----------------------------------------------------------------------------------


def _go_back(call: Call, path: Path, *, dry_run: bool) -> int:
    from kvstore import former, render

    if dry_run:
        raise UsageError("--rollback has no plan to show", "leave out -n")
    back = former.go_back(path)
    document: dict[str, Any] = {
        "store": path,
        "engine": back.engine,
        "given_up": back.given_up or None,
        "freed_bytes": back.freed,
    }
    what = f"gave up the copy for {back.given_up}" if back.given_up else "went back"
    line = f"{what}: the store at {path} has the engine {back.engine}"
    call.output.result(document, [f"{line}; {render.size(back.freed)} are free again"])
    return 0


def _delete(call: Call, path: Path, *, dry_run: bool, yes: bool) -> int:
    from kvstore import former, render

    what, size = former.kept(path)
    document = {"store": path, "freed_bytes": size, "dry_run": dry_run}
    if dry_run:
        call.output.result(document, [f"would delete {what}: {render.size(size)}"])
        return 0
    if size:
        question = f"delete {what} in {path} for good, {render.size(size)}?"
        call.output.confirm(question, yes=yes)
    freed = former.delete(path)
    document["freed_bytes"] = freed
    call.output.result(document, [f"deleted {what}: {render.size(freed)} are free again"])
    return 0

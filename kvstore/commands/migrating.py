"""``kvstore migrate``: another engine for a store; blocks of another store or system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import (
    INTERRUPTED,
    PARTLY,
    Call,
    Command,
    Option,
    become_owner,
)
from kvstore.commands.names import read_size
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvstore.copying import Left
    from kvstore.migrate import Migration, Outcome, Plan

IN = "With SRC and DST"
MOST_LEFT = 20
"""Blocks left behind that are named for a person; --json names all."""


@click.command(
    cls=Command,
    example=(
        "kvstore migrate --to lmdb\nkvstore migrate /mnt/nvme/kv --to superblock -n\n"
        "kvstore migrate --rollback\nkvstore migrate --delete-source -y\n"
        "kvstore migrate vllm-fs:/mnt/kv-cache /mnt/nvme/kv --merge --field weights=3f2a"
    ),
    exits={
        0: "done, or the store has that engine already",
        1: "failed; what was copied is kept, and the same command goes on from there",
        2: "",
        3: "done, but some blocks could not be read and were left behind",
        4: "--rollback: there is nothing to go back to; or SRC is not there",
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
@click.argument("words", metavar="[STORE | SRC DST]", nargs=-1)
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
@click.option("--merge", cls=Option, is_flag=True, section=IN, help="DST may be there already.")
@click.option(
    "--namespace",
    cls=Option,
    metavar="NAME|@FILE",
    section=IN,
    help="The namespace of all blocks, instead of what SRC says.",
)
@click.option(
    "--field",
    "fields",
    cls=Option,
    metavar="NAME=VALUE",
    multiple=True,
    section=IN,
    help="Added to the record of every namespace: what SRC does not say, as weights or dtype.",
)
@click.option(
    "--block-bytes",
    cls=Option,
    metavar="SIZE",
    section=IN,
    help="Bytes of a block, where the files of SRC may be longer.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def migrate(call: Call, /, words: tuple[str, ...], **how: Any) -> int:  # noqa: ANN401
    """Change the engine of a store, or bring blocks in from elsewhere.

    With --to every block is copied to the other engine, verified, and read back; only then the
    store is switched over, at once. Order of use, pins, namespaces, labels and chains come along.
    Damaged blocks stay behind and are named. The daemon must be stopped. After a kill or Ctrl-C the
    same command goes on where it was. The former blocks are kept, and count as used, until
    --delete-source; until then, and as long as no new block came in, --rollback goes back to them.

    With SRC and DST the blocks of SRC are put into the store DST, which is made, or with --merge
    may be there; what it has already is skipped. Each is [NAME:]PATH. NAME is an engine, or for SRC
    one of vllm-fs, hicache and lmcache-fs: directories of vLLM, SGLang and LMCache, which are only
    read. What they hold cannot be verified, so every block gets a label that says so.
    """
    chosen = [how["engine"] is not None, how["rollback"], how["delete_source"]]
    if len(words) == 2 and not any(chosen) and how["store"] is None:
        from kvstore.commands.merging import bring

        return bring(call, *words, **how)
    if sum(chosen) != 1:
        hint = "use --to, --rollback or --delete-source, or name SRC and DST"
        raise UsageError("migrate wants one thing to do", hint)
    _check_alone(how)
    path = _store(call, words, how["store"])
    if how["engine"] is not None:
        return _to_engine(call, path, **how)
    become_owner(path)
    if how["rollback"]:
        return _go_back(call, path, dry_run=how["dry_run"])
    return _delete(call, path, dry_run=how["dry_run"], yes=how["yes"])


def _check_alone(how: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing without SRC and DST."""
    for name in ("merge", "namespace", "fields", "block_bytes"):
        if how[name]:
            option = f"--{name.removesuffix('s').replace('_', '-')}"
            raise UsageError(f"{option} is for SRC and DST", "leave it out, or name both")


def _to_engine(call: Call, path: Path, **how: Any) -> int:  # noqa: ANN401
    from kvstore import config
    from kvstore.migrate import Migration

    size, rate = read_size(how["capacity"], "--capacity"), read_rate(how["rate"])
    # The configuration is root's, and perhaps nobody else's to read.
    min_free = config.load(call.flags()).settings.min_free
    become_owner(path)
    with Migration(path, how["engine"], capacity=size, min_free=min_free) as migration:
        if migration.already:
            engine = migration.engine
            line = f"the store at {path} has the engine {engine} already"
            call.output.result(_document(path, engine, engine, already=True), [line])
            return 0
        return _change(call, path, migration, jobs=how["jobs"], rate=rate, dry_run=how["dry_run"])


def _store(call: Call, words: tuple[str, ...], store: str | None) -> Path:
    named = list(dict.fromkeys([*words, *([] if store is None else [store])]))
    if len(named) > 1:
        raise UsageError(f"two stores are named, {named[0]} and {named[1]}", "name one")
    return call.store(next(iter(named), None))


def read_rate(text: str | None) -> int | None:
    """Return bytes a second. Raises UsageError."""
    speed = read_size(None if text is None else text.removesuffix("/s"), "--rate")
    if speed == 0:
        raise UsageError("--rate is 0", "write for example 200MiB/s")
    return speed


# -- another engine -------------------------------------------------------------------------------


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
    document = _document(path, plan.source, plan.target, **(_planned(plan) | _done(outcome)))
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
    yield from left_lines(outcome.left)
    if outcome.switched:
        yield f"the store at {path} has the engine {plan.target} now"
        yield (
            f"the blocks of {plan.source} are kept: kvstore migrate --delete-source removes them, "
            "--rollback goes back"
        )
    else:
        yield "the store is as it was"


def left_lines(left: Sequence[Left]) -> Iterable[str]:
    """Yield a line for each block that did not come along, as far as a person wants to read."""
    for one in left[:MOST_LEFT]:
        yield f"left behind: {one.namespace} {one.shard} {one.key}: {one.reason}"
    if len(left) > MOST_LEFT:
        yield f"left behind: {len(left) - MOST_LEFT:,} more; --json names all"


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

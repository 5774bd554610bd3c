"""``kvstore evict``: blocks that leave because somebody says so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import click

from kvstore.commands.frame import INTERRUPTED, PARTLY, Call, Command, online
from kvstore.commands.names import (
    Name,
    described,
    listed,
    read_namespace,
    read_size,
    read_time,
    require,
)
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.client import Client


@click.command(
    cls=Command,
    example=(
        "kvstore evict --to-size 300GiB -n\nkvstore evict --older-than 30d\n"
        "kvstore evict --subtree 00ff12ab\nkvstore evict --namespace llama -y"
    ),
    exits=online(
        e0="all that was asked for is gone",
        e2="wrong usage, or nobody was there to say yes",
        e3="some blocks stay, pinned, in use or needed by such, or could not be deleted, or the "
        "store's own files take more than SIZE",
        e4="no such block or namespace",
    ),
)
@click.option("--to-size", metavar="SIZE", help="Until the store takes no more than SIZE on disk.")
@click.option("--older-than", metavar="TIME", help="Blocks not used for so long.")
@click.option("--chain", metavar="KEY", help="This block and those before it in its chain.")
@click.option("--subtree", metavar="KEY", help="This block and all that follow it.")
@click.option("--namespace", metavar="NAME|@FILE|ID", help="Only in this namespace.")
@click.option("--shard", type=click.IntRange(0, 0xFFFF), help="Shard of KEY; 0 without.")
@click.option("--all", "everything", is_flag=True, help="Everything, after a question.")
@click.option("-n", "--dry-run", is_flag=True, help="Only list what would go.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
@click.pass_obj
def evict(
    call: Call,
    to_size: str | None,
    older_than: str | None,
    chain: str | None,
    subtree: str | None,
    namespace: str | None,
    shard: int | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """Make blocks leave the store, those unused longest first.

    The ends of chains go before what they follow, so that no block is left without its parent.

    Options add up: --namespace llama --older-than 7d is what fulfils both. SIZE counts what du
    does; SIZE and TIME want a unit. --chain goes from KEY towards the start and stops before the
    first block that another chain shares; a KEY that others follow needs --subtree. A KEY may be
    abbreviated to 8 hex digits and is looked for in the namespace "default", or in --namespace.

    A namespace alone means all of it, and is asked about as --all is.

    Blocks that are pinned, or in use, stay. -n prints the blocks that would go, a line each as list
    does; with --json both ways of running name them.
    """
    asked = _evict_request(to_size, older_than, chain or subtree, namespace, shard)
    _check_choice(asked, chain, subtree, shard, everything=everything)
    sweeping = everything or set(asked) == {"namespace"}
    flags = {"chain": bool(chain), "subtree": bool(subtree), "all": everything}
    asked = {"op": "evict", **asked, **{name: True for name, given in flags.items() if given}}
    with call.client() as client:
        require(client, namespace)
        if sweeping and not dry_run:
            _confirm(call, client, asked, yes=yes)
        return _evict(call, client, {**asked, "dry_run": dry_run})


def _evict_request(
    to_size: str | None,
    older_than: str | None,
    key: str | None,
    namespace: str | None,
    shard: int | None,
) -> dict[str, Any]:
    """Return what was asked for as the protocol has it."""
    if key is not None:
        namespace, shard = namespace or "default", shard or 0
    found = {
        "to_size": read_size(_with_unit(to_size, "--to-size", "GiB"), "--to-size"),
        "older_than": read_time(_with_unit(older_than, "--older-than", "d"), "--older-than"),
        "key": key,
        "namespace": None if namespace is None else read_namespace(namespace).id,
        "shard": shard,
    }
    return {name: value for name, value in found.items() if value is not None}


def _with_unit(text: str | None, option: str, unit: str) -> str | None:
    """Refuse a bare number: bytes or seconds, where a person thought of more, empty the store."""
    if text is not None and re.fullmatch(r"\s*\d+(\.\d+)?\s*", text, re.ASCII):
        raise UsageError(
            f"{option} is {text!r}: no unit", f"write for example {text.strip()}{unit}"
        )
    return text


def _check_choice(
    asked: Mapping[str, Any],
    chain: str | None,
    subtree: str | None,
    shard: int | None,
    *,
    everything: bool,
) -> None:
    named = [one for one in (chain, subtree) if one is not None]
    if len(named) > 1:
        raise UsageError("--chain and --subtree exclude each other", "give one of them")
    if named and everything:
        raise UsageError("--all with one block's chain", "leave one of them out")
    if shard is not None and not named:
        raise UsageError("--shard is about a KEY", "add --chain or --subtree, or leave it out")
    if not asked and not everything:
        raise UsageError(
            "nothing is named to be evicted",
            "use --to-size, --older-than, --chain, --subtree, --namespace or --all",
        )


def _confirm(call: Call, client: Client, asked: Mapping[str, Any], *, yes: bool) -> None:
    """Tell how much would go, and ask."""
    from kvstore import render

    if yes:
        return
    *_, plan = client.follow({**asked, "dry_run": True})
    blocks, size = render.count(int(plan["count"]), "block"), render.size(int(plan["bytes"]))  # type: ignore[call-overload]
    call.output.confirm(f"evict {blocks}, {size}?", yes=False)


def _evict(call: Call, client: Client, asked: Mapping[str, Any]) -> int:
    """Follow an eviction to its end, or to Ctrl-C, and tell what it came to."""
    names: list[Name] = []
    freed, end, interrupted = 0, {}, False
    try:
        with call.output.progress(None, "block") as progress:
            for part in client.follow(asked):
                end = part
                if "blocks" in part:
                    names += [(one[0], one[1], one[2]) for one in listed(part, "blocks")]
                    freed += int(cast("int", part["bytes"]))
                    progress.add(len(listed(part, "blocks")), int(cast("int", part["planned"])))
    except KeyboardInterrupt:
        interrupted = True
    return _tell_evicted(call, names, freed, {} if interrupted else end, asked)


def _tell_evicted(
    call: Call, names: list[Name], freed: int, end: Mapping[str, Any], asked: Mapping[str, Any]
) -> int:
    dry = asked["dry_run"]
    rest = {
        "bytes": freed,
        "dry_run": dry,
        "failed": end.get("failed", 0),
        "kept": end.get("kept", {}),
        "used_bytes": end.get("used_bytes"),
        "interrupted": not end,
    }
    line = _evicted_line(len(names), freed, end, asked)
    if call.output.json or (dry and not call.output.quiet):
        call.output.stream("blocks", map(described, names), rest)
        call.output.note(line)
    else:
        call.output.result(rest, [line])
    if not end:
        call.output.error("Interrupted", INTERRUPTED, "interrupted")
        return INTERRUPTED
    return 0 if end["reached"] else PARTLY


def _evicted_line(count: int, freed: int, end: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    from kvstore import render

    verb, blocks = "would evict" if asked["dry_run"] else "evicted", render.count(count, "block")
    text = f"{verb} {blocks}, {render.size(freed)}"
    kept = {name: number for name, number in end.get("kept", {}).items() if number}
    if kept:
        why = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in kept.items())
        text += f"; {render.count(sum(kept.values()), 'block')} stay ({why})"
    if end.get("failed"):
        text += (
            f"; {render.count(end['failed'], 'block')} could not be deleted, see the daemon's log"
        )
    if end and not end["reached"] and "to_size" in asked:
        text += f"; the store still takes {render.size(end['used_bytes'])}"
        text += "" if kept or end["failed"] else " for its own files"
    return text

"""Commands about what must stay: pin, unpin, pins; and flush, which makes it durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from kvstore.commands.frame import PARTLY, Call, Command, namespace_options, online
from kvstore.commands.names import listed, parse_keys, read_namespace, read_time, require
from kvstore.errors import NotFound, StoreFull, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvstore.client import Client

FLUSH_SECONDS = 3600.0


def _chosen_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command name blocks one by one or by their chain."""
    for name, text in (
        ("--subtree", "This block and all that follow it."),
        ("--chain", "This block and those before it in its chain."),
    ):
        function = click.option(name, metavar="KEY", help=text)(function)
    return click.argument("keys", metavar="[KEY]...", nargs=-1)(function)


def _chosen(
    client: Client,
    keys: tuple[str, ...],
    chain: str | None,
    subtree: str | None,
    where: tuple[str, int],
) -> list[bytes]:
    """Return the keys of the blocks that were named. Raises NotFound, UsageError."""
    names = list(dict.fromkeys(parse_keys(keys, where[1])))
    for key, up in ((chain, True), (subtree, False)):
        if key is not None:
            space = read_namespace(where[0]).id
            asked = {"op": "tree", "key": key, "namespace": space, "shard": where[1]}
            told = client.admin(asked)
            if told["more"]:
                raise UsageError(f"too many blocks hang together with {key}", "name a part of them")
            names += [bytes.fromhex(one) for one in _side(listed(told, "blocks"), up=up)]
    return list(dict.fromkeys(names))


def _side(blocks: list[dict[str, Any]], *, up: bool) -> list[str]:
    """Return the chosen one's ancestors and itself, or itself and its descendants."""
    middle = next(number for number, one in enumerate(blocks) if one["chosen"])
    part = blocks[: middle + 1] if up else blocks[middle:]
    return [one["key"] for one in part if one["there"]]


def _check_named(keys: tuple[str, ...], chain: str | None, subtree: str | None, shard: int) -> None:
    if not (keys or chain or subtree):
        raise UsageError("no block is named", "give keys, --chain KEY or --subtree KEY")
    parse_keys(keys, shard)


@click.command(
    cls=Command,
    example="kvstore pin 00ff 0100 --for 12h\nkvstore pin --chain 00ff12ab",
    exits=online(
        e0="all of them are pinned",
        e4="at least one was not there",
        e14="pins may keep no more: a quarter of the capacity",
    ),
)
@_chosen_options
@click.option("--for", "period", metavar="TIME", default="1h", show_default=True, help="How long.")
@namespace_options
@click.pass_obj
def pin(
    call: Call,
    keys: tuple[str, ...],
    chain: str | None,
    subtree: str | None,
    period: str,
    namespace: str,
    shard: int,
) -> int:
    """Keep blocks from being evicted for a time.

    A second pin sets the time anew. Whoever is no administrator may pin for an hour at most, names
    blocks one by one, and does not shorten what an administrator has pinned.
    """
    from kvstore import render
    from kvstore.answers import BlockStatus

    seconds = read_time(period, "--for") or 0.0
    if not 1 <= seconds < 1 << 32:
        raise UsageError(f"--for is {period!r}", "write at least 1s")
    _check_named(keys, chain, subtree, shard)
    space = read_namespace(namespace)
    with call.client() as client:
        names = _chosen(client, keys, chain, subtree, (namespace, shard))
        handle = space.open(client)
        statuses = client.pin(names, int(seconds), namespace=handle, shard=shard).tolist()
        total = int(cast("int", client.status().get("pinned_bytes") or 0))
    pinned, full = statuses.count(BlockStatus.OK), statuses.count(BlockStatus.FULL)
    absent = len(statuses) - pinned - full
    document = {"pinned": pinned, "absent": absent, "refused": full}
    document |= {"seconds": int(seconds), "pinned_bytes": total}
    text = f"pinned {render.count(pinned, 'block')} for {render.duration(seconds)}, absent {absent}"
    text += f", refused {full}; all pins keep {render.size(total)}"
    call.output.result(document, [text])
    return StoreFull.exit_code if full else NotFound.exit_code if absent else 0


@click.command(
    cls=Command,
    example="kvstore unpin 00ff 0100\nkvstore unpin --chain 00ff12ab",
    exits=online(e0="none of them is pinned any more", e4="at least one was not pinned"),
)
@_chosen_options
@namespace_options
@click.pass_obj
def unpin(
    call: Call,
    keys: tuple[str, ...],
    chain: str | None,
    subtree: str | None,
    namespace: str,
    shard: int,
) -> int:
    """Let blocks be evicted again. Pins of an administrator are lifted by administrators only."""
    from kvstore.answers import BlockStatus

    _check_named(keys, chain, subtree, shard)
    space = read_namespace(namespace)
    with call.client() as client:
        names = _chosen(client, keys, chain, subtree, (namespace, shard))
        statuses = client.unpin(names, namespace=space.open(client), shard=shard).tolist()
    lifted = statuses.count(BlockStatus.OK)
    absent = len(statuses) - lifted
    document = {"unpinned": lifted, "not_pinned": absent}
    call.output.result(document, [f"unpinned {lifted}, not pinned {absent}"])
    return NotFound.exit_code if absent else 0


@click.command(
    cls=Command,
    example="kvstore pins\nkvstore pins --namespace llama --json",
    exits=online(e4="unknown namespace"),
)
@click.option("--namespace", metavar="NAME|@FILE|ID", help="Only in this namespace.")
@click.pass_obj
def pins(call: Call, namespace: str | None) -> None:
    """List pinned blocks.

    One a line: NAMESPACE-ID SHARD KEY, and the time that is left.
    """
    from kvstore import render

    space = None if namespace is None else read_namespace(namespace)

    def described(client: Client) -> Iterator[tuple[Mapping[str, object], str]]:
        for part in client.follow({"op": "pins", "namespace": space and space.id}):
            for one in listed(part, "pins"):
                where = f"{one['namespace']} {one['shard']} {one['key']}"
                yield one, f"{where} {render.duration(one['seconds'])}"

    with call.client() as client:
        require(client, namespace)
        call.output.stream("pins", described(client))


# -- flush ----------------------------------------------------------------------------------------


@click.command(
    cls=Command,
    example="kvstore flush\nkvstore flush --json | jq .errors",
    exits=online(e0="all that was put survives a power loss", e3="some blocks were lost"),
)
@click.pass_obj
def flush(call: Call) -> int:
    """Wait until all that was put before survives a power loss.

    Blocks that were accepted and then could not be written are named, once.
    """
    with call.client() as client:
        errors = client.flush(timeout=FLUSH_SECONDS)
    found = [
        {"namespace": e.namespace, "shard": e.shard, "key": e.key, "reason": e.reason}
        for e in errors
    ]
    lines = [f"lost {e.namespace} {e.shard} {e.key}: {e.reason}" for e in errors]
    call.output.result({"errors": found}, lines or ["everything is durable"])
    return PARTLY if errors else 0

"""Commands that put blocks, get them back, look for them, remove them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, namespace_options, online
from kvstore.commands.names import Space, parse_keys, read_key, read_namespace
from kvstore.errors import Busy, InvalidKey, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.client import Client

MAX_LABEL_BYTES = 255
ABSENT = "never put, evicted, or under another namespace or shard"


@click.command(
    cls=Command,
    example="kvstore put 00ff -i block.bin --wait\ntar c cfg | kvstore put 0100 -i - --durable",
    exits=online(
        e1="failed, or KEY is there with a block of another length",
        e2="wrong usage, or a block over a quarter of the capacity",
        e4="unknown namespace",
        e14="no room, and nothing may be evicted",
    ),
)
@click.argument("key")
@click.option("-i", "--input", "source", metavar="FILE|-", required=True, help="The block's bytes.")
@click.option("--wait", is_flag=True, help="Answer once the engine and the journal have it.")
@click.option(
    "--durable", is_flag=True, help="Answer once it survives a power loss; wins over --wait."
)
@namespace_options
@click.option("--create-namespace", is_flag=True, help="Make the namespace if it is not there.")
@click.option("--parent", metavar="HEX", help="Key of the block before this one in its chain.")
@click.option("--label", metavar="TEXT", default="", help="Note kept with the block.")
@click.pass_obj
def put(
    call: Call,
    key: str,
    source: str,
    wait: bool,
    durable: bool,
    namespace: str,
    shard: int,
    create_namespace: bool,
    parent: str | None,
    label: str,
) -> None:
    """Store one block under KEY (hexadecimal, 1 to 64 bytes).

    Blocks never change: a KEY that is there keeps its first bytes, and the answer is
    "already_present"; a block of another length is refused. All keys of a namespace have one
    length, that of the first; another is possible once the namespace is empty.

    When the store is full the least recently used blocks leave, the ends of chains first. A block
    over a quarter of the capacity is refused.
    """
    from kvstore import keys

    name = read_key(key)
    above = read_key(parent) if parent is not None else None
    keys.check_shard(shard)
    _check_label(label)
    space = read_namespace(namespace)
    data = read_block(source, name)
    ack = "durable" if durable else "written" if wait else "accepted"
    with call.client() as client:
        result = client.put(
            name,
            data,
            namespace=space.open(client, create=create_namespace),
            shard=shard,
            ack=ack,
            parent=above,
            label=label,
        )
    document = {"key": name.hex(), "bytes": len(data), "result": result, "ack": ack}
    call.output.result(document, [f"{name.hex()} {len(data)} {result}"])


def _check_label(label: str) -> None:
    try:
        size = len(label.encode())
    except UnicodeEncodeError:
        raise UsageError("the label is not UTF-8", "check the encoding of its text") from None
    if size > MAX_LABEL_BYTES:
        raise UsageError(
            "the label is too long", f"keep it within {MAX_LABEL_BYTES} bytes of UTF-8"
        )


@click.command(
    cls=Command,
    example="kvstore get 00ff -o copy.bin\nkvstore get 00ff -o - | sha256sum\n"
    "kvstore get 00ff --record -o /mnt/other/kv/incoming/00ff.kvb",
    exits=online(e4=f"no such namespace, or no such block: {ABSENT}", e14="no room for the output"),
    answers=False,
)
@click.argument("key")
@click.option("-o", "--output", "target", metavar="FILE|-", help="Where to write the bytes.")
@click.option("--record", is_flag=True, help="The record: envelope and bytes (administrators).")
@namespace_options
@click.pass_obj
def get(call: Call, key: str, target: str | None, record: bool, namespace: str, shard: int) -> None:
    """Write the block under KEY to a file or, without -o, to a pipe.

    A record, written as NAME.kvb into the directory incoming of another store, is taken in there,
    with its parent and label. That store must know its namespace.
    """
    from kvstore import keys, render

    name = read_key(key)
    keys.check_shard(shard)
    if call.output.json and target in (None, "-"):
        raise UsageError(
            "with --json stdout holds one JSON document, not a block", "write it with -o FILE"
        )
    if target is None and render.stdout_is_terminal():
        raise UsageError(
            "a block is binary and stdout is a terminal", "use -o FILE, or -o - if you mean it"
        )
    space = read_namespace(namespace)
    with call.client() as client:
        data = client.get(name, namespace=space.open(client), shard=shard)
        if record and data is not None:
            data = _image(client, name, space, shard, data)
    if data is None:
        raise NotFound(
            f"block {name.hex()} is not in namespace {namespace}, shard {shard}",
            "it was never put, was evicted, or is under another namespace or shard",
        )
    render.write_bytes(data, target or "-")
    if target not in (None, "-"):
        call.output.result({"key": name.hex(), "bytes": len(data), "output": target}, [])


def _image(client: Client, key: bytes, space: Space, shard: int, data: bytes) -> bytes:
    """Return the record of a block as a file. Raises Busy if it is not on disk yet."""
    from kvstore.record import HEADER_PAGE, Header, encode, image_bytes, payload_checksum

    asked = {"op": "inspect", "key": key.hex(), "namespace": space.id, "shard": shard}
    told: Any = client.admin(asked)["envelope"]
    if told is None or int(told["checksum"], 16) != payload_checksum(data):
        raise Busy(f"block {key.hex()} is not on disk yet", "run kvstore flush, then again")
    binary = ("store", "namespace", "key", "parent", "extra")
    fields = told | {name: bytes.fromhex(told[name] or "") for name in binary}
    header = encode(Header(**fields | {"checksum": int(told["checksum"], 16)}))
    return (header.ljust(HEADER_PAGE, b"\0") + data).ljust(image_bytes(len(data)), b"\0")


@click.command(
    cls=Command,
    example="kvstore contains 00ff 0100\nkvstore contains --prefix 00ff 0100 0101",
    exits=online(e0="all of them are there", e4=f"at least one is not there: {ABSENT}"),
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--prefix", is_flag=True, help="Count the unbroken run of blocks from the first KEY.")
@namespace_options
@click.pass_obj
def contains(call: Call, keys: tuple[str, ...], prefix: bool, namespace: str, shard: int) -> int:
    """Tell which blocks are there."""
    names = parse_keys(keys, shard)
    space = read_namespace(namespace)
    with call.client() as client:
        handle = space.open(client)
        if prefix:
            length = client.prefix(names, namespace=handle, shard=shard)
            call.output.result({"prefix": length, "keys": len(names)}, [str(length)])
            return 0 if length == len(names) else NotFound.exit_code
        there = [bool(bit) for bit in client.contains(names, namespace=handle, shard=shard)]
    answers = {name.hex(): bit for name, bit in zip(names, there, strict=True)}
    lines = [f"{name} {'yes' if bit else 'no'}" for name, bit in answers.items()]
    call.output.result({"contains": answers, "present": sum(there)}, lines)
    return 0 if all(there) else NotFound.exit_code


@click.command(
    cls=Command,
    example="kvstore delete 00ff 0100",
    exits=online(e0="all of them were there and are gone", e4="at least one was not there"),
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@namespace_options
@click.pass_obj
def delete(call: Call, keys: tuple[str, ...], namespace: str, shard: int) -> int:
    """Remove blocks by name, for good."""
    names = list(dict.fromkeys(parse_keys(keys, shard)))
    space = read_namespace(namespace)
    with call.client() as client:
        removed = client.delete(names, namespace=space.open(client), shard=shard)
    absent = len(names) - removed
    call.output.result(
        {"deleted": removed, "absent": absent}, [f"deleted {removed}, absent {absent}"]
    )
    return NotFound.exit_code if absent else 0


@click.command(
    "list",
    cls=Command,
    example="kvstore list > blocks.txt\nkvstore list --namespace llama --limit 100",
    exits=online(e4="unknown namespace"),
)
@click.option("--namespace", metavar="NAME|@FILE|ID", help="Only this namespace.")
@click.option("--limit", type=click.IntRange(min=0), help="At most so many blocks.")
@click.pass_obj
def list_blocks(call: Call, namespace: str | None, limit: int | None) -> None:
    """List blocks, one a line: NAMESPACE-ID SHARD KEY.

    They come in no order that means anything, and are read from the daemon part by part: blocks
    that arrive or leave meanwhile may be among them or not.
    """
    if call.output.quiet and not call.output.json:
        raise UsageError("list with -q would say nothing", "leave out -q")
    space = None if namespace is None else read_namespace(namespace)
    with call.client() as client:
        handle = None if space is None else space.open(client)
        found = client.list(handle, limit)
        call.output.stream("blocks", _described(found))


def _described(
    found: Iterator[tuple[str, int, str]],
) -> Iterator[tuple[Mapping[str, object], str]]:
    for namespace, shard, key in found:
        document = {"namespace": namespace, "shard": shard, "key": key}
        yield document, f"{namespace} {shard} {key}"


def read_block(source: str, key: bytes) -> bytes:
    """Read a block from a file or, for ``-``, from stdin; never more than a block may have."""
    from kvstore import keys

    limit = keys.MAX_BLOCK_BYTES + 1
    try:
        if source == "-":
            data = read_stdin(limit)
        else:
            with Path(source).open("rb") as file:
                data = file.read(limit)
    except OSError as error:
        raise UsageError(
            f"input {source}: {error.strerror}", "give a readable file, or - for stdin"
        ) from None
    if len(data) == limit:
        raise InvalidKey(
            f"block {key.hex()} has more than {keys.MAX_BLOCK_BYTES} bytes",
            f"a block has 1 to {keys.MAX_BLOCK_BYTES} bytes",
        )
    keys.check_block_length(len(data), key)
    return data


def read_stdin(limit: int) -> bytes:
    """Return at most ``limit`` bytes of stdin. Raises UsageError, OSError."""
    if sys.stdin is None:
        raise UsageError("stdin is closed", "give a file with -i FILE, or pipe the block in")
    data: bytes = sys.stdin.buffer.read(limit)
    return data

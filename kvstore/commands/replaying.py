"""``kvstore replay``: a trace through the store's own index and policies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, Option
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.replay.result import Document, Drive
    from kvstore.replay.tiers import Plan
    from kvstore.replay.trace import Trace

SWEEP = ("1%", "2%", "5%", "10%", "20%", "50%")


def reading_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command say how a trace is read."""
    for name, kind, default, text in (
        ("--seed", click.INT, 0, "Seed of the draw of these times."),
        ("--spread", None, "8h", "Time over which sessions without one of their own begin."),
        ("--group", click.IntRange(1), 1, "Make one block of so many."),
    ):
        function = click.option(
            name,
            type=kind,
            default=default,
            show_default=True,
            help=text,
            cls=Option,
            section="Reading",
        )(function)
    return function


def capacity_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, default, text in (
        ("--dram", "2%", "Memory: 2 % of the different blocks, or a size."),
        ("--ssd", "10%", "The disk, in the same way."),
    ):
        function = click.option(
            name, metavar="SIZE|N%", default=default, show_default=True, help=text
        )(function)
    for name, text in (
        ("--dram-blocks", "Memory, in blocks."),
        ("--ssd-blocks", "The disk, in blocks."),
    ):
        function = click.option(name, type=click.IntRange(0), help=text)(function)
    return function


@click.command(
    cls=Command,
    example=(
        "kvstore replay trace.jsonl --ssd 10% --dram 2%\n"
        "kvstore replay trace.jsonl --policy lru --policy fifo --sweep --optimum --plot hits.png"
    ),
    exits=(0, 1, 2, 4, 130, 141),
)
@click.argument("trace")
@click.option(
    "--policy",
    metavar="NAME",
    multiple=True,
    help="Who leaves first; may be repeated with --sweep.",
)
@capacity_options
@click.option(
    "--write",
    type=click.Choice(["late", "through"]),
    default="late",
    show_default=True,
    help="When blocks go to the disk: on leaving memory, or at once.",
)
@click.option(
    "--rule",
    type=click.Choice(["leaf", "order"]),
    help="Only leaves leave the disk, or whoever is next. Without it: order for lru, as in the"
    " literature, leaf for others, as in the daemon.",
)
@click.option("--count-from", type=click.IntRange(0), default=0, help="Count from this request on.")
@click.option("--count-to", type=click.IntRange(0), help="Stop before this request.")
@click.option("--optimum", is_flag=True, help="Find the most hits that are possible, too.")
@click.option("--sweep", is_flag=True, help="Replay for several sizes of the disk.")
@click.option("--plot", metavar="FILE.png", help="Draw what a sweep finds; needs matplotlib.")
@click.option("--block-size", metavar="SIZE", help="Bytes of a block, for sizes and endurance.")
@click.option("--drive", metavar="TB", type=float, help="The drive, in TB as sold.")
@reading_options
@click.pass_obj
def replay(call: Call, /, trace: str, **how: Any) -> None:  # noqa: ANN401
    """Tell how many blocks of a trace would have been hits.

    Nothing is written anywhere: requests go through the store's own index and eviction policy over
    a memory tier and a disk of so many blocks. TRACE is a file of Mooncake or Bailian (JSON lines),
    of kv-cache-tester (a JSON file, or a directory of them), or an npz tree, gzip or not.
    """
    from kvstore.replay import plot, readers, result

    if how["plot"]:
        plot.need_matplotlib()
    drive = _drive(how["block_size"], how["drive"])
    found = readers.read(Path(trace), reading(how["group"], how["spread"], how["seed"]))
    plans = _plans(found, drive, how)
    documents = [result.run(found, plan, drive, best=how["optimum"]) for plan in plans]
    if not how["sweep"]:
        call.output.result(documents[0], _lines(documents[0]))
        return
    if how["plot"]:
        plot.plot(found, documents, Path(how["plot"]))
    document = {"trace": found.name, "requests": found.requests, "blocks": found.blocks}
    call.output.result({**document, "results": documents}, _table(documents))


def reading(group: int, spread: str, seed: int) -> Any:  # noqa: ANN401
    """Return how a trace is to be read. Raises UsageError."""
    from kvstore.commands.names import read_time
    from kvstore.replay.readers import Reading

    return Reading(group, read_time(spread, "--spread") or 0.0, seed)


def _drive(block_size: str | None, terabytes: float | None) -> Drive:
    from kvstore.replay.result import Drive

    if terabytes is not None and not 0 < terabytes < 1e6:
        raise UsageError(f"--drive is {terabytes}", "write for example 7.68")
    return Drive(
        None if block_size is None else _bytes("--block-size", block_size),
        None if terabytes is None else int(terabytes * 10**12),
    )


def _bytes(option: str, text: str) -> int:
    from kvstore.quantities import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}: {error}", "write 2MiB or 4TiB") from None


def _plans(trace: Trace, drive: Drive, how: dict[str, Any]) -> list[Plan]:
    """Return what is to be replayed. Raises UsageError."""
    from dataclasses import replace

    from kvstore.replay import result

    names = how["policy"] or ("lru",)
    if len(names) > 1 and not how["sweep"]:
        raise UsageError("several policies are named", "add --sweep")
    if how["plot"] and not how["sweep"]:
        raise UsageError("one result makes no picture", "add --sweep to --plot")
    memory = how["dram_blocks"]
    if memory is None:
        memory = _blocks("--dram", how["dram"], trace, drive)
    disks = [how["ssd_blocks"]]
    if how["sweep"] and how["ssd_blocks"] is None:
        disks = [_blocks("--ssd", share, trace, drive) for share in SWEEP]
    elif disks == [None]:
        disks = [_blocks("--ssd", how["ssd"], trace, drive)]
    return [
        replace(
            result.plan_for(name, disk, memory, how["write"], how["rule"]),
            count_from=how["count_from"],
            count_to=how["count_to"],
        )
        for name in names
        for disk in disks
    ]


def _blocks(option: str, text: str, trace: Trace, drive: Drive) -> int:
    """Return the blocks that a share of the trace's blocks, or a size, stands for."""
    if text.endswith("%"):
        try:
            share = float(text[:-1])
        except ValueError:
            share = math.nan
        if not 0 <= share <= 100:
            raise UsageError(f"{option} is {text!r}", "write for example 10%")
        return int(trace.blocks * share / 100)
    if drive.block_bytes is None:
        raise UsageError(f"{option} is a size, that of a block is unknown", "add --block-size")
    return _bytes(option, text) // drive.block_bytes


def _lines(found: Document) -> list[str]:
    from kvstore import render

    hits, refs = int(str(found["hits"])), int(str(found["refs"]))
    pairs: list[tuple[str, object]] = [
        ("trace", f"{found['trace']}, requests {found['count_from']} to {found['count_to']}"),
        ("policy", found["policy"]),
        ("blocks", f"{found['ssd_blocks']} on disk, {found['dram_blocks']} in memory"),
        ("hits", f"{hits} of {refs} ({100 * hits / max(refs, 1):.2f} %)"),
        ("in memory", found["hits_dram"]),
        ("written", f"{found['ssd_writes']} blocks"),
    ]
    if found["optimum"] is not None:
        share = found["percent_of_optimum"]
        pairs.append(("optimum", f"{found['optimum']}" + _percent(share, "; hits are {} of it")))
    if found["bytes_per_day"] is not None:
        daily = render.size(float(str(found["bytes_per_day"])))
        times = found["drive_writes_per_day"]
        more = "" if times is None else f", {float(str(times)):.2f} drive writes"
        pairs.append(("a day", daily + more))
    return render.fields(pairs)


def _percent(share: object, text: str) -> str:
    return "" if share is None else text.format(f"{float(str(share)):.2f} %")


def _table(found: list[Document]) -> Iterator[str]:
    """Yield a row per size of the disk, a column per policy: hits in % of what was asked for."""
    from kvstore import render

    names = list(dict.fromkeys(str(one["policy"]) for one in found))
    cells = {(one["policy"], one["ssd_blocks"]): one for one in found}
    best = ["optimum"] if found[0]["optimum"] is not None else []
    rows = []
    for disk in dict.fromkeys(one["ssd_blocks"] for one in found):
        mine = [cells[name, disk] for name in names]
        row = [_ratio(one, "hits") for one in mine]
        rows.append((str(disk), *row, *(_ratio(mine[0], field) for field in best)))
    yield from render.table(["blocks on disk", *names, *best], rows)


def _ratio(one: Document, field: str) -> str:
    return f"{100 * int(str(one[field])) / max(int(str(one['refs'])), 1):.2f}"

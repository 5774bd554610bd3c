"""Commands that measure: ``kvstore bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, Group
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.bench.demo import Report


directory_option = click.option(
    "--dir",
    "directory",
    metavar="DIR",
    default=".demo",
    show_default=True,
    help="Where a store is made, and removed at the end.",
)


@click.group(
    cls=Group,
    example="kvstore bench demo\nkvstore bench table2 --model q7b\nkvstore bench transfer",
    exits=(0, 1, 2, 130, 141),
)
def bench() -> None:
    """Measure on this machine."""


@bench.command(
    cls=Command,
    example="kvstore bench demo\nkvstore bench demo --blocks 64 --block-size 1MiB --keep",
    exits={
        0: "every block was a hit with the right bytes, before and after the kill",
        1: "a block was missing, wrong or not written, or the daemon did not behave",
        2: "wrong usage, or the machine has too little room",
        12: "",
        130: "",
        141: "",
    },
)
@click.option(
    "--blocks", type=click.IntRange(1, 100_000), default=512, show_default=True, help="How many."
)
@click.option(
    "--block-size", metavar="SIZE", default="2MiB", show_default=True, help="Bytes of each."
)
@directory_option
@click.option("--keep", is_flag=True, help="Leave the demo store there.")
@click.option(
    "--model",
    metavar="NAME",
    multiple=True,
    help="Measure tables 2 and 3 of it first; may be repeated.",
)
@click.pass_obj
def demo(
    call: Call,
    blocks: int,
    block_size: str,
    directory: str,
    keep: bool,
    model: tuple[str, ...],
) -> int:
    """Show on a demo store that blocks survive a kill.

    A daemon is started, blocks are put and got, it is killed and started again, the blocks are got
    again, it is stopped.
    """
    from kvstore.bench import demo as demonstration

    plan = demonstration.Plan(blocks, _block_bytes(block_size), Path(directory), keep, model)
    report = demonstration.run(plan, call.output.note)
    call.output.result(report.document(), _demo_lines(report))
    return 1 if any(table["faults"] for table in report.tables) else 0


def _block_bytes(text: str) -> int:
    """Return what --block-size says. Raises UsageError."""
    from kvstore import keys

    size = _size("--block-size", text)
    keys.check_block_length(size)
    return size


def _demo_lines(report: Report) -> Iterator[str]:
    from kvstore import render
    from kvstore.bench import tabletext

    for table in report.tables:
        yield from tabletext.lines(table)
        yield ""
    plan, copy = report.plan, report.seconds["copy"]
    steps = [
        ("copy in memory (numpy, one thread)", "copy"),
        ("put (answered when written)", "put"),
        ("get", "get"),
        ("get after SIGKILL and restart", "get_after_kill"),
    ]
    total = render.size(plan.total_bytes)
    yield f"{plan.blocks} blocks of {render.size(plan.block_bytes)} ({total}), io {report.io}"
    yield from render.table(
        ["step", "seconds", "MiB/s", "x copy"],
        [
            (
                name,
                f"{report.seconds[step]:.2f}",
                f"{plan.total_bytes / (1 << 20) / report.seconds[step]:,.0f}",
                f"{report.seconds[step] / copy:.1f}",
            )
            for name, step in steps
        ],
    )
    yield (
        f"after SIGKILL: ready in {render.duration(report.seconds['restart'])} (start of Python "
        f"included), {report.hits_after_kill} of {plan.blocks} blocks are hits, all bytes equal"
    )
    yield f"stopped by SIGTERM: exit code {report.exit_code}"
    rest = [
        ("making the blocks", "make"),
        ("comparing them", "compare"),
        ("starting the daemon", "start"),
        ("stopping it", "stop"),
    ]
    named = ", ".join(f"{render.duration(report.seconds[step])} {name}" for name, step in rest)
    yield f"the whole took {render.duration(report.seconds['whole'])}, of that {named}"


@bench.command(
    cls=Command,
    example="kvstore bench transfer\nkvstore bench transfer --rounds 21 --no-check --json",
    exits={
        0: "every answer was right; the limits met and not met are listed",
        1: "an answer was wrong, or the daemon did not behave",
        2: "wrong usage, or the machine has too little room",
        12: "",
        130: "",
        141: "",
    },
)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=9, show_default=True, help="How many."
)
@click.option(
    "--blocks",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Blocks that a request moves.",
)
@click.option(
    "--block-size", metavar="SIZE", default="2MiB", show_default=True, help="Bytes of each."
)
@click.option("--no-check", is_flag=True, help="Have the client compute no checksums.")
@directory_option
@click.pass_obj
def transfer(
    call: Call, rounds: int, blocks: int, block_size: str, no_check: bool, directory: str
) -> None:
    """Time gets and puts of blocks in the daemon's memory.

    Copies of the same blocks are timed beside them.
    """
    from kvstore.bench import transfer as measured

    size = _block_bytes(block_size)
    plan = measured.Plan(rounds, blocks, size, not no_check, Path(directory))
    result = measured.run(plan, call.output.note)
    call.output.result(result, measured.lines(result))


TABLE_EXITS = {
    0: "every block was right, and written as it should be",
    1: "blocks were missing, wrong or not written; the line that says FAILED names the row",
    2: "wrong usage, or the machine has too little room",
    12: "",
    130: "",
    141: "",
}


def _table_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what all three tables take."""
    for option in (
        directory_option,
        click.option("--plot", metavar="FILE.png", help="Draw the result too."),
        click.option(
            "--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many."
        ),
        click.option(
            "--engine", metavar="NAME", multiple=True, help="Only these; may be repeated."
        ),
        click.option(
            "--model",
            metavar="NAME",
            multiple=True,
            help="Only q32b, q7b, q3b, glm4, l8b or tiny; may be repeated.",
        ),
    ):
        function = option(function)
    return function


def _store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what the tables of kvstore itself take."""
    io = click.Choice(["auto", "direct", "buffered", "mmap"])
    function = click.option(
        "--io", type=io, default="auto", show_default=True, help="How block files are read."
    )(function)
    return click.option("--local", is_flag=True, help="Without daemon, in one process.")(function)


def _table(call: Call, number: int, plot: str | None, directory: str, **how: Any) -> int:  # noqa: ANN401
    """Measure a table and show it; return the exit code."""
    from kvstore.bench import tables, tabletext
    from kvstore.bench.workload import PUBLISHED

    if plot is not None:
        tabletext.check_plot()
    models, engines = how.pop("model") or PUBLISHED, how.pop("engine")
    plan = tables.Plan(number, models, engines, directory=Path(directory), **how)
    result = tables.run(plan, call.output.note)
    if plot is not None:
        tabletext.plot(result, Path(plot))
    call.output.result(result, tabletext.lines(result))
    return 1 if result["faults"] else 0


@bench.command(
    cls=Command,
    example="kvstore bench table1\nkvstore bench table1 --model q7b --engine leveldb --rounds 5",
    exits=TABLE_EXITS,
)
@_table_options
@click.pass_obj
def table1(call: Call, /, **how: Any) -> int:  # noqa: ANN401
    """Time np.memmap, np.save and LevelDB used directly.

    This is what kvstore is to be compared with. Engines are memmap, files and leveldb.
    """
    return _table(call, 1, **how)


@bench.command(
    cls=Command,
    example="kvstore bench table2\nkvstore bench table2 --model q7b --engine filesystem --json",
    exits=TABLE_EXITS,
)
@_table_options
@_store_options
@click.pass_obj
def table2(call: Call, /, **how: Any) -> int:  # noqa: ANN401
    """Time sets and gets through a daemon: memory, and files.

    One daemon keeps blocks in memory, another in files. Engines are memory, filesystem and what
    kvstore engines lists; none but memory gets a memory tier here.
    """
    return _table(call, 2, **how)


@bench.command(
    cls=Command,
    example="kvstore bench table3\nkvstore bench table3 --model l8b --plot hybrid.png",
    exits=TABLE_EXITS,
)
@_table_options
@_store_options
@click.pass_obj
def table3(call: Call, /, **how: Any) -> int:  # noqa: ANN401
    """Time sets and gets through a daemon: memory over files.

    So it is in kvstore serve.
    """
    return _table(call, 3, **how)


@bench.command(
    cls=Command,
    example="kvstore bench index\nkvstore bench index --blocks 100000 --trials 3 --json",
    exits={
        0: "every answer was right; the limits met and not met are listed",
        1: "an answer was wrong",
        2: "",
        130: "",
        141: "",
    },
)
@click.option(
    "--blocks",
    type=click.IntRange(1000, 20_000_000),
    default=1_000_000,
    show_default=True,
    help="Blocks in the index.",
)
@click.option(
    "--trials",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    help="Runs, each with fresh keys.",
)
@click.option("--seed", type=int, default=20, show_default=True, help="Of keys and load.")
@click.pass_obj
def index(call: Call, blocks: int, trials: int, seed: int) -> None:
    """Time the index beside dict, OrderedDict and LMDB.

    Single operations and a realistic load are timed. A tool for those who change the index; it
    tells nothing about disks or your model server. It takes about 90 s with the defaults, in
    proportion to --blocks and --trials.
    """
    from kvstore.bench import index as measured

    result = measured.run(blocks, trials, seed, call.output.note)
    call.output.result(result, measured.lines(result))


@bench.command(
    cls=Command,
    example="kvstore bench slots\nkvstore bench slots --slots 100000 --json",
    exits={
        0: "every count was right; the limits met and not met are listed",
        1: "a count was wrong",
        2: "",
        130: "",
        141: "",
    },
)
@click.option(
    "--slots",
    type=click.IntRange(1000, 20_000_000),
    default=1_000_000,
    show_default=True,
    help="Slots in use.",
)
@click.option(
    "--trials",
    type=click.IntRange(1, 1000),
    default=7,
    show_default=True,
    help="Runs, each with fresh ids.",
)
@click.option("--seed", type=int, default=20, show_default=True, help="Of the ids.")
@click.pass_obj
def slots(call: Call, slots: int, trials: int, seed: int) -> None:
    """Time reference counts in one array beside dicts.

    One id is timed, and batches of 10,000.
    """
    from kvstore.bench import slots as measured

    result = measured.run(slots, trials, seed)
    call.output.result(result, measured.lines(result))


@bench.command(
    cls=Command,
    example="kvstore bench engines\nkvstore bench engines --engine lmdb --block-size 2MiB --json",
    exits={
        0: "every block was right; the limits met and not met are listed",
        1: "a block was wrong, or an engine failed",
        2: "wrong usage, or the machine has too little room",
        13: "no engine has that name",
        130: "",
        141: "",
    },
)
@click.option(
    "--engine",
    metavar="NAME",
    multiple=True,
    help="Only these, or mmap, which is superblock with io=mmap; may be repeated.",
)
@click.option(
    "--block-size",
    metavar="SIZE",
    multiple=True,
    default=("64KiB", "256KiB", "1MiB", "2MiB", "4MiB"),
    show_default=True,
    help="Bytes of a block; may be repeated.",
)
@click.option(
    "--data", metavar="SIZE", default="512MiB", show_default=True, help="Held in each engine."
)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many."
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Threads that call an engine with O_DIRECT.",
)
@click.option("--parity", is_flag=True, help="Measure each with a parity chunk per block, too.")
@directory_option
@click.pass_obj
def engines(
    call: Call,
    parity: bool,
    engine: tuple[str, ...],
    block_size: tuple[str, ...],
    data: str,
    rounds: int,
    threads: int,
    directory: str,
) -> None:
    """Time engines beside the disk and a copy in memory.

    Nothing else of kvstore takes part. Puts are timed without a sync and with one for each 64
    blocks, gets with nothing in the page cache and again; what is taken on disk, written to it, and
    used of the processor is told too. It takes up to twice --data on disk for each engine, as much
    in memory, and 10 to 30 minutes with the defaults.
    """
    from kvstore.bench import engines as measured
    from kvstore.bench import figures

    sizes = [_block_bytes(one) for one in block_size]
    held, where = _size("--data", data), Path(directory)
    plan = measured.Plan(engine, sizes, held, rounds, threads, where, parity)
    result = measured.run(plan, call.output.note)
    call.output.result(result, figures.lines(result))


@bench.command(
    cls=Command,
    example="kvstore bench churn\nkvstore bench churn --engine lmdb --capacity 2GiB --json",
    exits={
        0: "every block that was held was right",
        1: "a block was wrong, or an engine failed",
        2: "wrong usage, or the machine has too little room",
        13: "no engine has that name",
        130: "",
        141: "",
    },
)
@click.option(
    "--capacity", metavar="SIZE", default="512MiB", show_default=True, help="Of each store."
)
@click.option(
    "--times",
    type=click.IntRange(2, 1000),
    default=4,
    show_default=True,
    help="How often it is written.",
)
@click.option("--engine", metavar="NAME", multiple=True, help="Only these; may be repeated.")
@directory_option
@click.pass_obj
def churn(call: Call, capacity: str, times: int, engine: tuple[str, ...], directory: str) -> None:
    """Measure what engines take on disk while blocks come and go.

    Stores without a daemon are written several times over. The most bytes on disk for a live byte
    is what the space factor of an engine stands for.
    """
    from kvstore.bench import churn as measured

    plan = measured.Plan(_size("--capacity", capacity), times, engine, Path(directory))
    result = measured.run(plan, call.output.note)
    call.output.result(result, measured.lines(result))


def _size(option: str, text: str) -> int:
    """Return the bytes that an option says. Raises UsageError."""
    from kvstore.quantities import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}: {error}", "write 2MiB or 1GiB") from None

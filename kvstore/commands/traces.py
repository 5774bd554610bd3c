"""``kvstore trace``: traces for ``kvstore replay``, made up or recorded."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import click

from kvstore.commands.frame import Call, Command, Group, online
from kvstore.commands.names import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.replay.joining import Joiner


@click.group(
    cls=Group,
    example="kvstore trace record -o today.jsonl --for 1h\n"
    "kvstore trace generate agents --requests 5000 -o agents.jsonl",
    exits=(0, 1, 2, 12, 13, 130, 141),
)
def trace() -> None:
    """Make traces for kvstore replay."""


@trace.command(
    cls=Command,
    example="kvstore trace record -o today.jsonl --for 1h\n"
    "kvstore replay today.jsonl --sweep --policy lru --policy adaptive",
    exits=online(e0="recorded, to the end or until Ctrl-C"),
)
@click.option("-o", "--output", metavar="FILE", required=True, help="Write there.")
@click.option("--for", "period", metavar="TIME", help="Stop after this time, not at Ctrl-C.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 1 << 20),
    default=16,
    show_default=True,
    help="Tokens of a block; the store does not know.",
)
@click.pass_obj
def record(call: Call, output: str, period: str | None, block_tokens: int) -> None:
    """Record what clients ask the daemon for, for kvstore replay.

    One request a line: which blocks, in what order, and when; a look-up and the put of what was
    missing are one. Blocks are named by hashes that are salted anew for each recording.
    """
    from kvstore.commands.names import read_time
    from kvstore.replay.joining import Joiner

    joiner, seconds = Joiner(block_tokens), read_time(period, "--for")
    counts = {"requests": 0, "lost": 0}
    with call.client() as client:
        told = client.follow({"op": "record"})
        lines = _heard(told, joiner, counts, seconds)
        try:
            _write(output, lines)
        finally:
            told.close()
    document = {"file": output, **counts}
    call.output.result(document, [f"recorded {counts['requests']} requests to {output}"])


def _heard(
    told: Iterator[dict[str, object]], joiner: Joiner, counts: dict[str, int], seconds: float | None
) -> Iterator[str]:
    """Yield requests as lines until the time is over or somebody presses Ctrl-C."""
    end = math.inf if seconds is None else time.monotonic() + seconds

    def counted(lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            counts["requests"] += 1
            yield line

    try:
        for part in told:
            counts["lost"] += int(str(part["lost"]))
            for now, heard, ids in listed(part, "requests"):
                yield from counted(joiner.add(now, heard, ids))
            if time.monotonic() >= end:
                break
    except KeyboardInterrupt:
        pass
    yield from counted(joiner.rest())


@trace.command(
    cls=Command,
    example="kvstore trace generate chat | kvstore replay /dev/stdin\n"
    "kvstore trace generate mixed --requests 20000 --seed 7 -o mixed.jsonl",
    exits=(0, 1, 2, 130, 141),
)
@click.argument("kind", type=click.Choice(["chat", "agents", "mixed"]))
@click.option(
    "--requests",
    type=click.IntRange(1, 10_000_000),
    default=10_000,
    show_default=True,
    help="How many.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same gives the same.")
@click.option("-o", "--output", metavar="FILE", help="Write there, not to stdout.")
@click.pass_obj
def generate(call: Call, kind: str, requests: int, seed: int, output: str | None) -> None:
    """Make up a trace, as JSON lines.

    chat: many short conversations behind one of a few system prompts. agents: few long ones that
    send all they have again every few seconds. mixed: both.
    """
    from kvstore.replay.generate import Generator

    lines = Generator(kind, seed).lines(requests)
    if output is None:
        for line in lines:
            call.output.text(line)
        return
    _write(output, lines)
    document = {"file": output, "kind": kind, "requests": requests, "seed": seed}
    call.output.result(document, [f"wrote {requests} requests to {output}"])


def _write(output: str, lines: Iterator[str]) -> None:
    from kvstore import render

    with render.naming(output), open(output, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)

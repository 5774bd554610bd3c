"""``kvstore trace``: traces for ``kvstore replay``, made up or recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvstore.commands.frame import Call, Command, Group

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.group(
    cls=Group,
    example="kvstore trace generate agents --requests 5000 -o agents.jsonl",
    exits=(0, 1, 2, 130, 141),
)
def trace() -> None:
    """Make traces for kvstore replay."""


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

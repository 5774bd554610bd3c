"""``kvstore scrub``: the daemon verifies what lies on disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import INTERRUPTED, Call, Command, Group, online
from kvstore.commands.names import read_size
from kvstore.errors import CorruptStore, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.client import Client

POLL_SECONDS = 0.5
HARMLESS = ("missing", "stale", "repaired")
"""Findings that are misses, or damage that is none any more."""


@click.group(
    cls=Group,
    example="kvstore scrub start --wait\nkvstore scrub status",
    exits=online(e4="nothing to pause or stop", e5="damage was found and dropped"),
)
def scrub() -> None:
    """Have the daemon verify what is on disk.

    It goes on serving meanwhile. Every record is read and judged, in the order in which they lie
    there. One that is damaged is copied to quarantine/ and dropped: a miss from then on. A restart
    goes on where the last daemon was.
    """


@scrub.command(
    cls=Command,
    example="kvstore scrub start\nkvstore scrub start --rate 500MiB/s\nkvstore scrub start --wait",
    exits=online(
        e0="under way; with --wait, all blocks are whole", e5="with --wait: damage was found"
    ),
)
@click.option("--rate", metavar="SIZE/s|max", help="Read so much a second; else scrub_rate.")
@click.option("--wait", is_flag=True, help="Until it is over; tell what it finds.")
@click.pass_obj
def start(call: Call, rate: str | None, wait: bool) -> int:
    """Begin, or go on after a pause; change the rate of what is running."""
    speed = 0 if rate == "max" else read_size(rate and rate.removesuffix("/s"), "--rate")
    with call.client() as client:
        told = _ask(client, "start", **({} if speed is None else {"rate": speed}))
        if wait:
            return follow(call, client, told)
    call.output.result(_document(told), [str(told["done"]).replace("_", " "), *_lines(told)])
    return 0


def follow(call: Call, client: Client, told: Mapping[str, Any]) -> int:
    """Show what a pass finds until it is over; the exit code tells whether there is damage."""
    findings: list[Mapping[str, Any]] = []
    # What an earlier pass found was told then.
    heard, seen = max((one["number"] for one in told["findings"]), default=0), 0
    try:
        with call.output.progress(None, "B", scale=True) as progress:
            while told["state"] == "running":
                time.sleep(POLL_SECONDS)
                told = _ask(client, "status", since=heard)
                progress.add(told["bytes"] - seen, told["total_bytes"])
                seen = told["bytes"]
                findings += told["findings"]
                heard = max((one["number"] for one in told["findings"]), default=heard)
    except KeyboardInterrupt:
        call.output.error("Interrupted", INTERRUPTED, "interrupted; the daemon goes on")
        return INTERRUPTED
    call.output.result(
        {**_document(told), "findings": [_plain(one) for one in findings]},
        [*map(_finding_line, findings), *_lines(told)],
    )
    bad = [one for one in findings if one["kind"] not in HARMLESS]
    return CorruptStore.exit_code if bad else 0


@scrub.command(cls=Command, example="kvstore scrub pause", exits=online(e4="no scrub is running"))
@click.pass_obj
def pause(call: Call) -> None:
    """Hold it until the next start."""
    _end(call, "pause", "paused")


@scrub.command(cls=Command, example="kvstore scrub stop", exits=online(e4="there is no scrub"))
@click.pass_obj
def stop(call: Call) -> None:
    """Give it up; the next start begins anew."""
    _end(call, "stop", "stopped")


def _end(call: Call, action: str, done: str) -> None:
    with call.client() as client:
        told = _ask(client, action)
    if not told["done"]:
        raise NotFound("no scrub is running", "begin one by kvstore scrub start")
    call.output.result(_document(told), [done, *_lines(told)])


@scrub.command(
    cls=Command, example="kvstore scrub status\nkvstore scrub status --json", exits=online()
)
@click.pass_obj
def status(call: Call) -> None:
    """Show how far it is, and what it found lately."""
    with call.client() as client:
        told = _ask(client, "status")
    findings = [_plain(one) for one in told["findings"]]
    lines = [*map(_finding_line, told["findings"]), *_lines(told)]
    call.output.result({**_document(told), "findings": findings}, lines)


@scrub.command(cls=Command, example="kvstore scrub ack", exits=online())
@click.pass_obj
def ack(call: Call) -> None:
    """Clear the alarm about damage that was found.

    Copies and manifest stay in quarantine/. Only new damage makes the status degraded again.
    """
    from kvstore import render

    with call.client() as client:
        told = _ask(client, "ack")
    records = render.count(told["done"], "damaged record")
    call.output.result({"acknowledged": told["done"]}, [f"{records} acknowledged"])


def _ask(client: Client, action: str, **asked: object) -> dict[str, Any]:
    return dict(client.admin({"op": "scrub", "action": action, **asked}))


def _plain(finding: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in finding.items() if name != "number"}


def _finding_line(one: Mapping[str, Any]) -> str:
    return f"{one['kind']} {one['namespace']} {one['shard']} {one['key']} {one['path']}"


def _document(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name not in ("findings", "done")}


def _lines(told: Mapping[str, Any]) -> list[str]:
    """Return how far a scrub is, in words."""
    from kvstore import render

    found = ", ".join(f"{count} {kind}" for kind, count in told["found"].items() if count)
    text = f"{told['state']}: {render.count(told['blocks'], 'block')}"
    text += f", {render.size(told['bytes'])}"
    if told["total_bytes"]:
        text += f" of {render.size(told['total_bytes'])}"
    if told["state"] == "running":
        text += f", {render.size(told['rate'])}/s" if told["rate"] else ", no limit"
        if told["eta_seconds"]:
            text += f", {render.duration(told['eta_seconds'])} left"
    lines = [f"{text}; {found or 'nothing found'}"]
    if told["finished"] is not None:
        lines.append(f"last finished {render.utc(told['finished'])}")
    return lines

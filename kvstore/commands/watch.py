"""Commands that show a daemon at work: ``status`` and ``top``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import INTERRUPTED, Call, Command, online
from kvstore.commands.names import read_time
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

DEGRADED = 1
TELLING_BLOCKS = 10_000
"""From here on bytes per block tell of blocks, and not of what an empty index takes."""
LEAST_SECONDS = 0.1
HEADS = 20
"""Lines of ``top`` after which the titles of the columns are repeated."""


@click.command(
    cls=Command,
    example="kvstore status\nkvstore status --watch 5s\nkvstore status --json | jq .state",
    exits=online(e0="healthy", e1="degraded, or failed"),
)
@click.option(
    "--watch", metavar="[TIME]", is_flag=False, flag_value="2s", help="Again and again, every 2 s."
)
@click.option("--count", type=click.IntRange(min=1), help="With --watch: so many times.")
@click.pass_obj
def status(call: Call, watch: str | None, count: int | None) -> int:
    """Show how the daemon and its store are doing.

    With --watch until Ctrl-C; --json then gives a line for each time, and one of type "summary".
    """
    if watch is None and count is not None:
        raise UsageError("--count without --watch", "leave it out, or add --watch")
    if watch is None:
        with call.client() as client:
            found = client.status()
        call.output.result(found, _status_lines(call, found))
        return DEGRADED if found.get("state") == "degraded" else 0

    def show(found: Mapping[str, Any]) -> None:
        from kvstore import render

        if not call.output.json:
            render.clear_screen()
        call.output.line({"type": "status", **found}, [*_status_lines(call, found), ""])

    return _again_and_again(call, _interval(watch, "--watch"), count, show)


def _interval(text: str, option: str) -> float:
    seconds = read_time(text, option) or 0.0
    if seconds < LEAST_SECONDS:
        raise UsageError(f"{option} is {text!r}", "write at least 100ms")
    return seconds


def _again_and_again(
    call: Call, seconds: float, times: int | None, show: Callable[[Mapping[str, Any]], None]
) -> int:
    """Show the figures of the daemon every so often; at the end, a summary for programs."""
    shown, began, code = 0, time.monotonic(), 0
    try:
        with call.client() as client:
            while times is None or shown < times:
                if shown:
                    time.sleep(max(0.0, began + shown * seconds - time.monotonic()))
                show(client.status())
                shown += 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    if call.output.json:
        summary = {"type": "summary", "samples": shown, "seconds": time.monotonic() - began}
        call.output.result(summary, [])
    if code:
        call.output.error("Interrupted", code, "interrupted")
    return code


def _status_lines(call: Call, found: Mapping[str, Any]) -> Iterator[str]:
    from kvstore import render

    state = call.output.state(str(found.get("state")))
    yield from render.fields([("state", state), *_rows(found)])
    if waiting := found.get("restart_settings"):
        yield f"restart to apply: {', '.join(waiting)}"
    for kind in ("problems", "notes"):
        for text in found.get(kind) or ():
            yield f"{kind[:-1]}: {text}"


def _rows(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the rows of ``status`` that say something: nothing of a store not open yet."""
    from kvstore.render import count, size

    def number(name: str) -> int:
        return int(found.get(name) or 0)

    rows: list[tuple[str, object]] = [("store", found.get("store"))]
    if "capacity_bytes" not in found:
        rows += [("engine", found.get("engine")), ("version", found.get("version"))]
        scanned = count(number("scanned"), "record")
        return [*rows, ("phase", f"{found.get('phase')}, {scanned} scanned")]
    capacity, used = number("capacity_bytes"), number("used_bytes")
    asked = number("hits") + number("misses")
    share = f" ({100 * used / capacity:.0f} %)" if capacity else ""
    ratio = f" ({100 * number('hits') / asked:.1f} % hits)" if asked else ""
    reads = f"{count(number('hits'), 'hit')}, {count(number('misses'), 'miss', 'misses')}"
    dirty = f"{count(number('dirty_blocks'), 'block')}, {size(number('dirty_bytes'))}"
    floor = f"{size(number('free_bytes'))}, at least {size(number('min_free_bytes'))} stay free"
    parity = ", parity xor" if found.get("parity") == "xor" else ""
    rows += [
        ("engine", f"{found.get('engine')}, io {found.get('io')}{parity}"),
        ("version", found.get("version")),
        ("blocks", number("blocks")),
        ("live", size(number("live_bytes"))),
        ("on disk", f"{size(used)} of {size(capacity)}{share}"),
        ("disk free", f"{floor} (min_free)"),
    ]
    if number("memory_bytes") or number("dirty_blocks"):
        memory = f"{size(number('memory_bytes'))} of {size(number('memory_capacity_bytes'))}"
        rows += [("memory", memory), ("dirty", dirty)]
    if number("refused_admission"):
        rows.append(("not admitted", count(number("refused_admission"), "block")))
    if number("pinned_blocks"):
        pinned = f"{count(number('pinned_blocks'), 'block')}, {size(number('pinned_bytes'))}"
        rows.append(("pinned", pinned))
    rows += [
        ("reads", f"{reads}{ratio}"),
        ("evictions", number("evictions")),
        ("corrupt", number("corrupt_blocks")),
    ]
    if number("repaired_blocks"):
        rows.append(("repaired", number("repaired_blocks")))
    if number("blocks") >= TELLING_BLOCKS:
        rows.append(("index", f"{float(found['index_bytes_per_block']):.1f} B per block"))
    return rows


# -- top ------------------------------------------------------------------------------------------

COLUMNS = (
    ("time", 8),
    ("get/s", 8),
    ("put/s", 8),
    ("read MB/s", 9),
    ("write MB/s", 10),
    ("hit %", 6),
    ("get p50", 9),
    ("get p99", 9),
    ("put p50", 9),
    ("put p99", 9),
    ("dirty", 9),
    ("evict/s", 8),
)


@click.command(
    cls=Command,
    example="kvstore top\nkvstore top --interval 5s --count 12 --json",
    exits=online(),
)
@click.option(
    "--interval", metavar="TIME", default="1s", show_default=True, help="Time between two lines."
)
@click.option("--count", type=click.IntRange(min=1), help="So many lines; without it until Ctrl-C.")
@click.pass_obj
def top(call: Call, interval: str, count: int | None) -> int:
    """Show what the daemon does, line by line.

    The first line tells of all since the start, the others of one interval each.
    get and put are blocks, MB are 1,000,000 bytes, p50 and p99 the time that half and 99 % of the
    requests took at most, as the daemon saw them.
    """
    seconds = _interval(interval, "--interval")
    before: dict[str, Any] = {}
    shown = [0]

    def show(found: Mapping[str, Any]) -> None:
        sample = rates(found, before)
        head = [_line([name for name, _ in COLUMNS])] if shown[0] % HEADS == 0 else []
        call.output.line({"type": "sample", **sample}, [*head, _line(_cells(sample))])
        before.clear()
        before.update(found)
        shown[0] += 1

    return _again_and_again(call, seconds, count, show)


def rates(found: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what happened between two answers of ``status``; since the start if there is one only,
    or if the daemon was started anew in between."""
    if found.get("pid") != before.get("pid"):
        before = {}

    def grown(*names: str) -> int:
        return sum(int(found.get(name) or 0) - int(before.get(name) or 0) for name in names)

    passed = float(found.get("uptime_seconds") or 0) - float(before.get("uptime_seconds") or 0)
    passed = max(passed, 0.001)
    gets = grown("hits", "misses")
    return {
        "time": time.time(),
        "seconds": round(passed, 3),
        "gets_per_second": gets / passed,
        "puts_per_second": grown("stored", "already_present") / passed,
        "read_bytes_per_second": grown("read_bytes") / passed,
        "written_bytes_per_second": grown("written_bytes") / passed,
        "hit_ratio": grown("hits") / gets if gets else None,
        **_times(found, before, "get"),
        **_times(found, before, "put"),
        "dirty_bytes": int(found.get("dirty_bytes") or 0),
        "evictions_per_second": grown("evictions") / passed,
    }


def _times(found: Mapping[str, Any], before: Mapping[str, Any], what: str) -> dict[str, Any]:
    name = f"{what}_us_buckets"
    now: Sequence[int] = found.get(name) or []
    then: Sequence[int] = before.get(name) or [0] * len(now)
    new = [one - other for one, other in zip(now, then, strict=True)]
    return {f"{what}_p{part}_seconds": percentile(new, part / 100) for part in (50, 99)}


def percentile(buckets: Sequence[int], share: float) -> float | None:
    """Return the seconds that this share of requests took at most, None if there were none.

    ``buckets[i]`` counts those between 2**(i-1) and 2**i microseconds, thought to lie evenly.
    """
    wanted, passed = share * sum(buckets), 0
    for number, count in enumerate(buckets):
        if count and passed + count >= wanted:
            low = 2.0 ** (number - 1) if number else 0.0
            return (low + (2.0**number - low) * (wanted - passed) / count) / 1e6
        passed += count
    return None


def _cells(sample: Mapping[str, Any]) -> list[str]:
    from kvstore import render

    def seconds(name: str) -> str:
        value = sample[name]
        return "-" if value is None else render.duration(value)

    ratio = sample["hit_ratio"]
    return [
        time.strftime("%H:%M:%S", time.localtime(sample["time"])),
        f"{sample['gets_per_second']:,.0f}",
        f"{sample['puts_per_second']:,.0f}",
        f"{sample['read_bytes_per_second'] / 1e6:,.1f}",
        f"{sample['written_bytes_per_second'] / 1e6:,.1f}",
        "-" if ratio is None else f"{100 * ratio:.1f}",
        *(seconds(f"{what}_p{part}_seconds") for what in ("get", "put") for part in (50, 99)),
        render.size(sample["dirty_bytes"]),
        f"{sample['evictions_per_second']:,.0f}",
    ]


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))

"""``kvstore fsck``: what is wrong with a store that no daemon has, and its repair."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.elsewhere import (
    check_online,
    check_other_system,
    other_system,
    refuse,
)
from kvstore.commands.frame import INTERRUPTED, Call, Command, Option, become_owner, store_option
from kvstore.errors import ConfigError, CorruptStore, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.findings import Found
    from kvstore.fsck import Options, Report
    from kvstore.mend import Done

_STYLES = {"damage": "red", "repairable": "yellow", "note": "bold"}


@click.command(
    cls=Command,
    example=(
        "kvstore fsck /mnt/nvme/kv\nkvstore fsck --verify-data=5% --max-duration 1h\n"
        "kvstore fsck --repair -n\nkvstore fsck --repair --yes\nkvstore fsck --online\n"
        "kvstore fsck vllm-fs:/mnt/kv-cache"
    ),
    exits={
        0: "clean, or all repaired: the summary tells how many findings were",
        1: "the store could not be checked",
        2: "",
        5: "damage found and left; the summary names the next command",
        10: "",
        11: "a daemon has the store: stop it, or use --online",
        12: "--online: the daemon did not answer",
        13: "",
        14: "no space for copies of what is damaged",
        15: "",
        130: "",
        141: "",
    },
)
@store_option
@click.option("--quick", is_flag=True, help="Structure and accounting only, no headers of records.")
@click.option(
    "--verify-data",
    metavar="[PART]",
    is_flag=False,
    flag_value="100%",
    help="Read and verify payloads: all, a share (5%), or so many bytes (20GiB) from where the "
    "last such check ended.",
)
@click.option("--online", is_flag=True, help="Have the daemon check: it serves meanwhile.")
@click.option("--max-duration", metavar="TIME", help="Stop at a safe point after so long (30min).")
@click.option(
    "--engine-timeout",
    metavar="TIME",
    default="5min",
    show_default=True,
    help="How long one answer of the engine's process may take.",
)
@click.option(
    "--repair", is_flag=True, cls=Option, section="Repair", help="Put right what can be: see below."
)
@click.option(
    "-n",
    "--dry-run",
    is_flag=True,
    cls=Option,
    section="Repair",
    help="Only say what it would do.",
)
@click.option("-y", "--yes", is_flag=True, cls=Option, section="Repair", help="Do not ask.")
@click.option(
    "--quarantine",
    metavar="DIR",
    cls=Option,
    section="Repair",
    help="Where damaged data goes, instead of STORE/quarantine.",
)
@click.pass_obj
def fsck(
    call: Call,
    argument: str | None,
    store: str | None,
    quick: bool,
    verify_data: str | None,
    online: bool,
    max_duration: str | None,
    engine_timeout: str,
    repair: bool,
    dry_run: bool,
    yes: bool,
    quarantine: str | None,
) -> int:
    """Check a store that no daemon has; repair it.

    Without --repair nothing is written, and a read-only mount will do. Every finding is a line:
    severity, id, path, what is wrong. docs/fsck.md lists the ids.

    A repair drops blocks that are damaged, and takes in records that the index does not know. What
    it takes away it keeps in quarantine. It may be interrupted and begun again.

    With --online the daemon looks at its engine and verifies every record, as a scrub without a
    limit does: what is damaged it copies to quarantine and drops. STORE may be IMPORTER:DIR, the
    directory of another system as kvstore migrate reads it.
    """
    if argument and store and argument != store:
        raise UsageError(f"two stores are named, {argument} and {store}", "name one")
    given = {"--repair": repair, "-n": dry_run, "--quarantine": quarantine}
    if (other := other_system(argument or store)) is not None:
        refuse("there", {**given, "--online": online, "--verify-data": verify_data})
        return check_other_system(call, *other)
    if online:
        named = {"STORE": argument or store, "--verify-data": verify_data, **given}
        refuse("with --online: the daemon has one store, and verifies all of it", named)
        seconds = _seconds("--max-duration", max_duration) if max_duration else None
        return _check_online(call, quick=quick, seconds=seconds)
    if (dry_run or quarantine) and not repair:
        raise UsageError("-n and --quarantine are about a repair", "add --repair")
    if quick and verify_data is not None:
        raise UsageError("--quick reads no payloads", "drop it, or --verify-data")
    options = _options(quick, verify_data, max_duration, engine_timeout)
    path = call.store(argument or store)
    become_owner(path)
    return _Run(call, path, options, Path(quarantine) if quarantine else None).run(
        repair=repair, dry_run=dry_run, yes=yes
    )


def _check_online(call: Call, *, quick: bool, seconds: float | None) -> int:
    began = time.monotonic()

    def tell(found: Found) -> None:
        call.output.line(found.document(), [_line(call, found)])

    report, code, following = check_online(call, tell, quick=quick, seconds=seconds)
    told = summary(report, None, report, code, time.monotonic() - began)
    told["next_command"] = following if code else None
    call.output.line(told, _summary_lines(told))
    return code


def _line(call: Call, found: Found) -> str:
    severity = call.output.style(str(found.severity), _STYLES[str(found.severity)])
    block = f" {found.key}" if found.key else ""
    return f"{severity} {found.id}{block} {found.path or '.'}: {found.detail}"


def _options(
    quick: bool, verify_data: str | None, max_duration: str | None, engine_timeout: str
) -> Options:
    from kvstore import fsck as checks

    share, most = _part(verify_data) if verify_data is not None else (1.0, None)
    depth = checks.QUICK if quick else checks.HEADERS if verify_data is None else checks.PAYLOADS
    return checks.Options(
        depth=depth,
        share=share,
        most_bytes=most,
        max_seconds=_seconds("--max-duration", max_duration) if max_duration else None,
        engine_seconds=_seconds("--engine-timeout", engine_timeout),
    )


def _part(text: str) -> tuple[float, int | None]:
    """Return a share of the payloads, or how many bytes of them. Raises UsageError."""
    from kvstore.quantities import parse_size

    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 < share <= 1:
                return share, None
        elif not text.isdigit():
            size = parse_size(text)
            if size > 0:
                return 1.0, size
    except (ValueError, ConfigError):
        pass
    raise UsageError(
        f"--verify-data={text} is no part of the data", "write a share (5%) or a size (20GiB)"
    )


def _seconds(name: str, text: str) -> float:
    from kvstore.quantities import parse_duration

    with suppress(ValueError, ConfigError):
        if (found := parse_duration(text)) > 0:
            return found
    raise UsageError(f"{name}={text} is no time", "write 90s, 30min or 2h")


class _Run:
    """One run of the command: checks, and repairs between them."""

    def __init__(self, call: Call, path: Path, options: Options, quarantine: Path | None) -> None:
        self._call = call
        self._path = path
        self._options = options
        self._quarantine = quarantine
        self._begun = time.monotonic()
        self._told: set[tuple[str, str, str]] = set()

    def run(self, *, repair: bool, dry_run: bool, yes: bool) -> int:
        from kvstore.mend import Done

        done = Done()
        report = self._check(self._options)
        if report is None:
            return INTERRUPTED
        if not repair or not report.to_do:
            return self._finish(report, done)
        self._plan(report)
        if dry_run:
            return self._finish(report, done)
        question = f"Repair {self._path}?"
        self._call.output.confirm(question, yes=yes)
        first = report
        report = self._repair(report, done)
        return self._finish(report, done, first)

    def _check(self, options: Options) -> Report | None:
        """Check under a shared lock; None after Ctrl-C, when what was found has been told."""
        from kvstore import layout
        from kvstore.fsck import PAYLOADS, Check

        lock = layout.Lock(self._path)
        lock.acquire(exclusive=False)
        total = None if options.depth < PAYLOADS else 0
        try:
            with self._call.output.progress(total, "B", scale=True) as progress:
                last = 0

                def seen(read: int, of: int) -> None:
                    nonlocal last
                    progress.add(read - last, of)
                    last = read

                check = Check(self._path, options, self._tell, seen)
                try:
                    return check.run()
                except KeyboardInterrupt:
                    check.report.finished = False
                    self._summary(check.report, None, INTERRUPTED)
                    return None
        finally:
            lock.release()

    def _tell(self, found: Found) -> None:
        mark = (found.id, found.path, found.detail)
        if mark not in self._told:
            self._told.add(mark)
            self._call.output.line(found.document(), [_line(self._call, found)])

    def _plan(self, report: Report) -> None:
        from kvstore.findings import CLASSES

        self._call.output.note("this repair would act on:")
        for name, count in sorted(report.to_do.items()):
            self._call.output.note(f"  {count:,} {name}: {CLASSES[name].repair}")
        size = sum(found.bytes for found in report.faults)
        self._call.output.note(f"  records concerned take {size:,} bytes")

    def _repair(self, report: Report, done: Done) -> Report:
        """Repair, check again, and so on; return the last check."""
        from kvstore import mend

        options = self._options.after(report)

        def again() -> Report:
            found = self._check(options)
            if found is None:
                raise KeyboardInterrupt
            return found

        folder = mend.new_folder(self._path, self._quarantine)
        left = mend.until_done(report, again, folder, self._options.engine_seconds, done)
        left.bytes, left.checked = report.bytes, report.checked
        return left

    def _finish(self, report: Report, done: Done, first: Report | None = None) -> int:
        code = CorruptStore.exit_code if report.faults else 0
        self._summary(report, done, code, first)
        return code

    def _summary(
        self, report: Report, done: Done | None, code: int, first: Report | None = None
    ) -> None:
        told = summary(report, done, first or report, code, time.monotonic() - self._begun)
        self._call.output.line(told, _summary_lines(told))


def summary(
    report: Report, done: Done | None, first: Report, code: int, seconds: float
) -> dict[str, object]:
    """Return the last line of the command; ``first`` is the check before the repair."""
    counts = first.counts
    left = sum(report.counts[found] for found in {one.id for one in report.faults})
    return {
        "type": "summary",
        "store": str(report.store),
        "blocks": report.blocks,
        "records": report.records,
        "checked": report.checked,
        "bytes": report.bytes,
        "finished": report.finished,
        "ok": max(0, report.blocks - int(first.bad.sum())),
        "corrupt": {
            "header": counts["header-damaged"],
            "payload": counts["payload-damaged"],
            "key_mismatch": counts["wrong-record"] + counts["wrong-name"],
            "truncated": counts["truncated"],
        },
        "orphan": counts["orphan"],
        "missing": counts["missing"],
        "duplicate": counts["superseded"],
        "stale_tmp": counts["leftover"],
        "foreign": counts["foreign"] + counts["other-store"],
        "perms": counts["mode"] + counts["owner"],
        "unreadable": counts["unreadable"],
        "repaired": len(first.faults) - left if done is not None and first is not report else 0,
        "quarantined": done.quarantined if done else 0,
        "dropped": done.dropped if done else 0,
        "left": left,
        "next_command": _next(report) if left else None,
        "seconds": round(seconds, 3),
        "code": code,
    }


def _next(report: Report) -> str:
    """Return the command that helps against what is left."""
    from kvstore.fsck import BEYOND_REPAIR

    names = {one.id for one in report.faults}
    if names & {"store-file", *BEYOND_REPAIR}:
        return f"kvstore recover {report.store}"
    if names == {"owner"}:
        owner = report.store.stat()
        return f"chown -R {owner.st_uid}:{owner.st_gid} {report.store}"
    if names <= {"owner", "unreadable"}:
        return f"kvstore recover {report.store} --to NEW"
    return f"kvstore fsck --repair {report.store}"


def _summary_lines(told: Mapping[str, Any]) -> Iterator[str]:
    from kvstore import render

    state = "clean" if told["code"] == 0 else "damage found"
    if told["code"] == INTERRUPTED:
        state = "interrupted"
    yield (
        f"{told['store']}: {state}: {render.count(told['blocks'], 'block')}, "
        f"{render.count(told['records'], 'record')} looked at, "
        f"{render.size(told['bytes'])} verified, "
        f"repaired: {told['repaired']}, left: {told['left']}, {render.duration(told['seconds'])}"
    )
    if told["next_command"]:
        yield f"next: {told['next_command']}"

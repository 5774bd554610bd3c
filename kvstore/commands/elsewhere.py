"""``kvstore fsck`` of what is not an offline store: a daemon's, and other systems' directories."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.commands.frame import INTERRUPTED
from kvstore.errors import CorruptStore, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.client import Client
    from kvstore.commands.frame import Call
    from kvstore.findings import Found
    from kvstore.fsck import Report

POLL_SECONDS = 0.5
_IDS = {"damaged": "payload-damaged", "stale": "wrong-record", "repaired": "payload-repairable"}
"""Ids of what a scrub finds, where they are not its own words."""
_DETAILS = {"unreadable": "left as it is", "repaired": "the daemon writes it again"}


# -- through the daemon ---------------------------------------------------------------------------


def check_online(
    call: Call, tell: Callable[[Found], object], *, quick: bool, seconds: float | None
) -> tuple[Report, int, str | None]:
    """Have the daemon look at its engine and, unless ``quick``, verify every record as fast as it
    can; after ``seconds`` the scrub is paused. Returns report, exit code and the next command."""
    from kvstore.findings import Found, id_of
    from kvstore.fsck import Report

    with call.client() as client:
        status = client.status()
        report = Report(Path(str(status["store"])))
        report.blocks = report.records = int(str(status["blocks"]))
        for kind, path, detail in _ask(client, "check")["structure"]:
            report.found.append(Found(id_of(kind), path, detail))
            tell(report.found[-1])
        interrupted = False
        if not quick:
            try:
                _scrub(call, client, report, tell, seconds)
            except KeyboardInterrupt:
                interrupted, report.finished = True, False
                _ask(client, "pause")
    report.bad = np.ones(sum(bool(one.key) for one in report.faults), np.bool_)
    if interrupted:
        return report, INTERRUPTED, "kvstore scrub start"
    dropped = any(one.key for one in report.faults)
    structure = any(not one.key for one in report.faults)
    following = f"kvstore fsck {report.store}" if structure else "kvstore scrub ack"
    return report, CorruptStore.exit_code * (structure or dropped), following


def _scrub(
    call: Call,
    client: Client,
    report: Report,
    tell: Callable[[Found], object],
    seconds: float | None,
) -> None:
    began = time.monotonic()
    told = _ask(client, "start", rate=0)
    heard = max((one["number"] for one in told["findings"]), default=0)
    with call.output.progress(None, "B", scale=True) as progress:
        while True:
            told = _ask(client, "status", since=heard)
            for one in told["findings"]:
                heard = one["number"]
                report.found.append(_found(one))
                tell(report.found[-1])
            progress.add(told["bytes"] - report.bytes, told["total_bytes"])
            report.checked, report.bytes = told["blocks"], told["bytes"]
            if told["state"] != "running":
                break
            if seconds is not None and time.monotonic() - began > seconds:
                _ask(client, "pause")
                report.finished = False
                break
            time.sleep(POLL_SECONDS)


def _found(one: Mapping[str, Any]) -> Found:
    from kvstore.findings import Found

    detail = _DETAILS.get(one["kind"], "the daemon has dropped it")
    where = (one["namespace"], one["shard"], one["key"])
    return Found(_IDS.get(one["kind"], one["kind"]), one["path"], detail, *where)


def _ask(client: Client, action: str, **asked: object) -> dict[str, Any]:
    return dict(client.admin({"op": "scrub", "action": action, **asked}))


# -- directories of other systems -----------------------------------------------------------------


def other_system(text: str | None) -> tuple[str, Path] | None:
    """Return importer and directory of IMPORTER:DIR; None for what is no such thing."""
    from kvstore.importers import IMPORTERS

    name, colon, path = (text or "").partition(":")
    return (name, Path(path)) if colon and path and name in IMPORTERS else None


def check_other_system(call: Call, name: str, path: Path) -> int:
    """Tell what is wrong with the files of another system: 5 where blocks are lost."""
    from kvstore import render
    from kvstore.importers import check
    from kvstore.importers.base import HARMLESS

    findings = check(name, path)
    for one in findings:
        line = {"type": "finding", "id": one.kind, "path": one.path, "detail": one.detail}
        call.output.line(line, [f"{one.kind} {one.path}: {one.detail}"])
    damaged = sum(one.kind not in HARMLESS for one in findings)
    code = CorruptStore.exit_code if damaged else 0
    told = {"type": "summary", "system": name, "directory": str(path), "findings": len(findings),
            "damaged": damaged, "code": code}  # fmt: skip
    count = render.count(len(findings), "finding")
    call.output.line(told, [f"{path}: {'damage found' if damaged else 'clean'}: {count}"])
    return code


def refuse(what: str, given: Mapping[str, object]) -> None:
    """Raise UsageError for options that make no sense there."""
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} makes no sense {what}", "leave it out")

"""The order of syncs behind a durable answer, read off the system calls of a whole put."""

from __future__ import annotations

from pathlib import Path

from tests.strace_log import Call, run

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.stores import Local, block, key
local = Local(Path(sys.argv[1]))
print(local.put([key(n) for n in range(3)], [block(n) for n in range(3)], durable=True))
sys.stdout.flush()
import os
os.write(2, b"answered")
local.kill()
"""
CALLS = "fsync,fdatasync,rename,renameat,renameat2,pwrite64,pwritev,write,syncfs"


def _positions(calls: list[Call], names: tuple[str, ...], part: str) -> list[Call]:
    return [call for call in calls if call.name in names and any(part in p for p in call.paths)]


def test_a_durable_put_syncs_files_renames_syncs_directories_then_the_journal(
    tmp_path: Path,
) -> None:
    printed, calls = run(
        PROGRAM, tmp_path / "log", CALLS, arguments=[str(tmp_path / "store"), str(ROOT)]
    )
    assert printed.strip() == "[0, 0, 0]"
    answered = next(call for call in calls if call.name == "write" and "answered" in call.args)
    renames = [c for c in calls if c.name.startswith("rename") and ".kvb" in c.args]
    assert len(renames) == 3
    first, last = renames[0], renames[-1]
    file_syncs = [
        c
        for c in _positions(calls, ("fsync", "fdatasync"), "/blocks/tmp/")
        if c.begin < answered.begin
    ]
    assert len(file_syncs) == 3
    for rename, sync in zip(renames, file_syncs, strict=True):
        assert sync.end < rename.begin
    directory_syncs = [
        call
        for call in calls
        if last.end < call.begin < answered.begin
        and call.name in ("fsync", "syncfs")
        and not any("journal" in p for p in call.paths)
    ]
    assert directory_syncs, "the directories were not synced after the renames"
    journal_writes = [
        call
        for call in _positions(calls, ("pwrite64", "pwritev", "write"), "/journal.")
        if directory_syncs[-1].end < call.begin < answered.begin
    ]
    journal_syncs = [
        call
        for call in _positions(calls, ("fsync", "fdatasync"), "/journal.")
        if directory_syncs[-1].end < call.begin < answered.begin
    ]
    assert journal_writes, "PUT must follow the engine's commit"
    assert journal_syncs, "the journal was not synced"
    assert journal_writes[-1].end < journal_syncs[-1].begin < answered.begin
    begun = [
        call
        for call in _positions(calls, ("pwrite64", "pwritev", "write"), "/journal.")
        if call.end < first.begin
    ]
    assert begun, "BEGIN must precede the engine's commit"

"""The journal when the disk fails, the process is killed, or the power goes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.errors import EngineError
from kvstore.events import (
    RECORD_BYTES,
    Kind,
)
from kvstore.journal import Journal
from tests.journal_samples import (
    EPOCH,
    UNIT,
    UUID,
    event,
    load_here,
)
from tests.mounts import mounted, shut_down
from tests.test_journal import FREE, PUT, fail_with, times


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path, 1, UUID, EPOCH, UNIT)


# -- failures -------------------------------------------------------------------------------------


def test_after_a_failed_sync_nothing_is_ever_accepted_again(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise fail_with(errno.EIO)

    monkeypatch.setattr(os, "fdatasync", broken)
    journal.append(PUT)
    with pytest.raises(EngineError, match="sync"):
        journal.sync()
    assert "Input/output error" in journal.failed
    # The kernel would say success now. It must not be asked.
    for again in (journal.sync, lambda: journal.append(FREE), journal.rotate):
        with pytest.raises(EngineError, match="takes no more records"):
            again()
    assert len(calls) == 1


@pytest.mark.parametrize("written", [None, 0, RECORD_BYTES, 2 * RECORD_BYTES - 1])
def test_a_failed_or_short_write_fails_the_journal(
    written: int | None, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(PUT)
    end, write = journal.end, os.pwrite

    def broken(descriptor: int, data: memoryview, offset: int) -> int:
        if written is None:
            raise fail_with(errno.EIO)
        return write(descriptor, data[:written], offset)

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(EngineError, match="append"):
        journal.append(times(FREE, 2))
    monkeypatch.undo()
    assert journal.end == end
    with pytest.raises(EngineError, match="takes no more records"):
        journal.append(FREE)
    kinds = load_here(tmp_path).events["kind"].tolist()
    assert kinds[0] == Kind.PUT
    assert set(kinds[1:]) <= {Kind.FREE}


def test_a_closed_journal_accepts_nothing(journal: Journal) -> None:
    journal.close()
    journal.close()
    with pytest.raises(EngineError, match="closed"):
        journal.append(PUT)
    with pytest.raises(EngineError, match="closed"):
        journal.sync()
    assert journal.failed == ""


# -- a kill ---------------------------------------------------------------------------------------


def test_a_kill_leaves_a_prefix_of_what_was_appended(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tests.journal_samples import EPOCH, UNIT, UUID, event
from kvstore.events import Kind
from kvstore.journal import Journal
import numpy as np
journal = Journal.create(Path(sys.argv[1]), 1, UUID, EPOCH, UNIT)
for count in range(1, 1_000_000):
    records = np.repeat(event(Kind.FREE, 1), 50)
    records["generation"] = np.arange(50) + journal.end
    print(journal.append(records), flush=True)
"""
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.01 * attempt)
        child.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        loaded = load_here(directory)
        assert not loaded.torn
        assert loaded.end >= max(acknowledged, default=0)
        generations = loaded.events["generation"].tolist()
        assert generations == sorted(generations)
        assert loaded.end == RECORD_BYTES * (1 + len(generations))


# -- power loss -----------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("synced", [0, 1, 31, 40, 500])
@pytest.mark.parametrize(("kind", "image_mib"), [("ext4", 64), ("xfs", 320)])
def test_what_was_synced_survives_power_loss(
    kind: str, image_mib: int, synced: int, tmp_path: Path
) -> None:
    with mounted(tmp_path, kind, image_mib=image_mib) as point:
        journal = Journal.create(point, 1, UUID, EPOCH, UNIT)
        for number in range(synced):
            journal.append(event(Kind.FREE, 1, generation=number))
        journal.sync()
        for number in range(synced, synced + 100):
            journal.append(event(Kind.FREE, 1, generation=number))
        shut_down(point)
        with pytest.raises(EngineError):
            journal.sync()
        journal.close()
    again = tmp_path / "again"
    again.mkdir()
    mount_when_free(tmp_path / f"{kind}.img", again)
    try:
        loaded = load_here(again)
        generations = loaded.events["generation"].tolist()
        assert generations[:synced] == list(range(synced))
        # Of the rest anything may be left, but a gap must not go unnoticed.
        assert loaded.torn or generations == list(range(len(generations)))
        assert not loaded.missing
    finally:
        subprocess.run(["umount", str(again)], check=True)


def mount_when_free(image: Path, point: Path) -> None:
    """Mount an image whose last use may take a moment to end."""
    for _ in range(100):
        done = subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=False)
        if done.returncode == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"{image} cannot be mounted again")

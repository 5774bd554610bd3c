"""What wakes somebody up when a directory changes."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.watching import Watching

SECONDS = 10


@pytest.fixture
def watching() -> Iterator[Watching]:
    opened = Watching()
    yield opened
    opened.close()
    opened.close()


def test_changes_wake_and_looking_does_not(watching: Watching, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    woken = threading.Event()
    watching.add(tmp_path, woken.set)
    (tmp_path / "file").read_text()
    list(tmp_path.iterdir())
    assert not woken.wait(1)
    (tmp_path / "other").write_text("x")
    assert woken.wait(SECONDS)
    woken.clear()
    (tmp_path / "other").rename(tmp_path / "file")
    assert woken.wait(SECONDS)


def test_a_folder_that_was_replaced_can_be_watched_again(
    watching: Watching, tmp_path: Path
) -> None:
    folder, woken = tmp_path / "folder", threading.Event()
    for _ in range(3):
        folder.mkdir()
        watching.add(folder, woken.set)
        woken.clear()
        (folder / "file").touch()
        assert woken.wait(SECONDS)
        shutil.rmtree(folder)


def test_what_cannot_be_watched_is_a_warning(
    watching: Watching, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    woken = threading.Event()
    watching.add(tmp_path / "none", woken.set)
    assert "will not be noticed" in caplog.text
    (tmp_path / "none").mkdir()
    watching.add(tmp_path / "none", woken.set)
    (tmp_path / "none" / "file").touch()
    assert woken.wait(SECONDS)

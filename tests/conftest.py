"""What all tests share: a clean environment, and a daemon where one is asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Daemon
from tests.machine import Machine, running


@pytest.fixture(autouse=True)
def _clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keep the settings and folders of whoever runs the tests out of them."""
    for name in list(os.environ):
        if name.startswith(("KVSTORE_", "XDG_")) or name.endswith("_DIRECTORY"):
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "JOURNAL_STREAM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def tidy(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove what a test wrote, also if it failed: files made ahead are large."""
    yield
    for path in (tmp_path, *tmp_path_factory.getbasetemp().glob("machine*")):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A booted machine with kvstore installed, one for all tests that want it."""
    with running(tmp_path_factory.mktemp("booted")) as machine:
        yield machine


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon on an empty store, ready; killed at the end if a test left it running."""
    daemon = Daemon(tmp_path)
    try:
        daemon.start()
        yield daemon
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()

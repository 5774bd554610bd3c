"""A daemon that systemd started by its socket, over a store that somebody else has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.lock import Lock
from kvstore.opening import Options, create_store
from kvstore.sockets import unix_listener
from tests.stores import key
from tests.talk import Bare, Talker, activated, wait_ready


@pytest.fixture
def daemon(tmp_path: Path) -> Bare:
    """Not started yet, over a store that is there."""
    made = Bare(tmp_path)
    create_store(made.store, Options(capacity=256 << 20))
    return made


@pytest.fixture
def early(daemon: Bare) -> Iterator[Talker]:
    """A client that knocked at the socket of systemd, and so started the daemon in the end."""
    with unix_listener(daemon.folder / "s") as listener, Talker(daemon.folder / "s") as talker:
        activated(daemon, listener)
        yield talker
        if daemon.process is not None:
            daemon.stop(signal.SIGKILL)


@pytest.fixture
def lock(daemon: Bare) -> Iterator[Lock]:
    """The store's lock, as fsck holds it."""
    held = Lock(daemon.store)
    held.acquire(exclusive=False)
    yield held
    held.release()


def test_a_store_in_use_is_waited_for(lock: Lock, daemon: Bare, early: Talker) -> None:
    assert f"in use by process {os.getpid()}" in early.status()["phase"]
    assert early.put([key(1)], [b"x"], deadline_ms=300).error == "DaemonUnavailable"
    lock.release()
    wait_ready(daemon, daemon.folder / "s")
    assert early.put([key(1)], [b"x"]).meta == b"\0"
    assert daemon.stop(signal.SIGTERM) == 0, daemon.log
    assert daemon.log.count("in use by process") == 1


def test_who_waits_for_the_store_can_be_stopped(lock: Lock, daemon: Bare, early: Talker) -> None:
    assert early.status()["state"] == "recovering"
    assert daemon.stop(signal.SIGTERM) == 0, daemon.log


def test_a_store_that_is_spoiled_meanwhile_is_an_error(
    lock: Lock, daemon: Bare, early: Talker
) -> None:
    assert early.status()["state"] == "recovering"
    (daemon.store / "STORE.json").write_text("{}")
    lock.release()
    assert daemon.process is not None
    assert daemon.process.wait(20) == 5, daemon.log
    daemon.process = None

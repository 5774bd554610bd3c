"""Log lines: few of one kind, keys shortened, nothing of what blocks hold."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from kvstore import logs
from kvstore.client import Client
from tests.command import Daemon
from tests.stores import key
from tests.talk import Talker, eventually

LONG = "0123456789abcdef" * 4


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(written: io.StringIO) -> Iterator[logging.Logger]:
    """A logger whose only handler is the daemon's, with an interval of half a second."""
    found = logging.getLogger("kvstore.flooding")
    handler = logs.Limited(0.5)
    handler.setStream(written)
    handler.setFormatter(logs.TextLines())
    found.addHandler(handler)
    found.propagate = False
    found.setLevel("INFO")
    yield found
    found.removeHandler(handler)
    handler.close()


def lines(written: io.StringIO) -> list[str]:
    return [line.split(" ", 1)[1] for line in written.getvalue().splitlines()]


def test_a_flood_is_a_few_lines_and_one_that_counts_the_rest(
    log: logging.Logger, written: io.StringIO
) -> None:
    for number in range(1000):
        log.warning("disk %d is slow", number)
        if not number % 100:
            log.info("something else, %d", number)
    assert eventually(lambda: "suppressed" in written.getvalue())
    told = lines(written)
    assert told[-1] == (
        "warning: suppressed 990 more lines of this kind, the last: disk 999 is slow"
    )
    assert sum("is slow" in line for line in told) == logs.BURST + 1
    assert sum("something else" in line for line in told) == 10
    log.warning("disk %d is slow", 0)  # the time is over: they are told again
    assert lines(written)[len(told) :] == ["warning: disk 0 is slow"]


def test_the_end_tells_what_was_left_out(log: logging.Logger, written: io.StringIO) -> None:
    for number in range(12):
        log.error("no %d", number)
    log.handlers[0].close()
    assert lines(written)[10:] == ["error: suppressed 2 more lines of this kind, the last: no 11"]


def test_kinds_that_never_come_again_take_no_memory(
    log: logging.Logger, written: io.StringIO
) -> None:
    for number in range(3 * logs.MOST_KINDS):
        log.info(f"kind {number}")
    handler = log.handlers[0]
    assert isinstance(handler, logs.Limited)
    assert len(handler._seen) <= logs.MOST_KINDS


@pytest.mark.parametrize("form", [logs.TextLines, logs.JsonLines])
def test_keys_are_shortened_wherever_they_stand(form: type[logging.Formatter]) -> None:
    record = logging.LogRecord("a", 30, "", 0, "cannot read %s", (f"/kv/0000-{LONG}.kvb",), None)
    assert "cannot read /kv/0000-0123456789abcdef....kvb" in form().format(record)
    uuid = logging.LogRecord("a", 30, "", 0, "store %s", (LONG[:32],), None)
    assert LONG[:32] in form().format(uuid)


def test_clients_cannot_flood_the_log_of_a_daemon(daemon: Daemon) -> None:
    for _ in range(100):
        with Talker(daemon.socket) as talker:
            talker.sock.sendall(b"x" * 64)
            assert talker.ended()
    daemon.stop()
    told = re.findall("closing a client's connection", daemon.log)
    assert len(told) == logs.BURST + 1
    assert "suppressed 90 more lines" in daemon.log


def test_blocks_leave_no_line_each_and_nothing_of_what_they_hold(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("--log-level", "debug", "--log-format", "json", "--capacity", "64MiB")
    before = len(daemon.log.splitlines())
    with Client(str(daemon.socket)) as client:
        for start in range(0, 2000, 100):
            keys = [key(number) for number in range(start, start + 100)]
            client.put_many(keys, [b"a secret prompt" * 4000] * 100, ack="written")
            client.get_many(keys)
        client.delete(keys)
    assert daemon.stop() == 0
    new = daemon.log.splitlines()[before:]
    assert len(new) < 40, new
    assert "secret" not in daemon.log
    assert not re.search("[0-9a-f]{33}", daemon.log)
    assert all(json.loads(line)["level"] for line in new)

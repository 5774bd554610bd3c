"""The scrub: it finds what is damaged on disk, at its own pace, and remembers where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.commands.documents import LINES
from kvstore.commands.shapes import unlike
from kvstore.scrub import KINDS
from tests.command import Daemon
from tests.damage import assert_nothing_is_held, copies, file_of, flip
from tests.stores import MIB, Local, block, key

COUNT = 50


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    before = Local(tmp_path / "store")
    before.put([key(n) for n in range(COUNT)], [block(n, 100_000) for n in range(COUNT)])
    before.stop()
    opened = Local(tmp_path / "store", memory_bytes=16 * MIB)
    yield opened
    assert_nothing_is_held(opened)
    opened.kill()


def scrub(local: Local, rate: int = 0) -> dict[str, object]:
    local.store.scrub.start(rate)
    local.store.run_chores()
    return local.store.scrub.status()


def spoil(local: Local, *numbers: int) -> None:
    for number in numbers:
        flip(file_of(local, key(number)), 5000)


def restart(daemon: Daemon) -> None:
    """Empty the memory, which would make good what is damaged on disk."""
    assert daemon.stop() == 0
    daemon.start()


def test_a_whole_store_has_no_findings(local: Local) -> None:
    told = scrub(local)
    assert (told["state"], told["blocks"], told["bytes"]) == ("idle", COUNT, COUNT * 106_496)
    assert told["found"] == dict.fromkeys(KINDS, 0)
    assert local.core.counters.hits == local.core.counters.misses == 0
    assert not local.store.problems()


def test_damage_on_disk_is_found_though_memory_has_the_block(local: Local) -> None:
    assert local.get([key(7)]) == [block(7, 100_000)]
    spoil(local, 7, 30)
    file_of(local, key(11)).unlink()
    told = scrub(local)
    nothing = dict.fromkeys(KINDS, 0)
    assert told["found"] == nothing | {"damaged": 1, "missing": 1, "repaired": 1}
    found = {(one["kind"], one["key"]) for one in local.store.scrub.findings}
    assert found == {
        ("repaired", key(7).hex()), ("damaged", key(30).hex()), ("missing", key(11).hex())
    }  # fmt: skip
    assert local.get([key(7), key(30), key(11)]) == [block(7, 100_000), None, None]
    assert len(copies(local.path)) == 1
    assert scrub(local)["found"] == dict.fromkeys(KINDS, 0)


def test_the_alarm_lasts_until_somebody_has_seen_it(local: Local, tmp_path: Path) -> None:
    spoil(local, 3, 4)
    scrub(local)
    assert "2 damaged blocks" in local.store.problems()[0]
    local.kill()
    again = Local(local.path)
    assert "2 damaged blocks" in again.store.problems()[0]
    assert again.core.quarantine.acknowledge() == 2
    assert not again.store.problems()
    spoil(again, 5)
    scrub(again)
    assert "1 damaged blocks" in again.store.problems()[0]
    again.kill()
    third = Local(local.path)
    assert "1 damaged blocks" in third.store.problems()[0]
    third.kill()


def test_it_keeps_to_its_rate(local: Local) -> None:
    waits: list[float] = []

    def timer(seconds: float, act: object) -> None:
        waits.append(seconds)
        assert callable(act)
        if len(waits) < 100:
            act()

    local.core.timer = timer
    told = scrub(local, MIB)
    assert told["state"] == "idle"
    # The last wait ends when as many seconds have gone as MiB were read; a second may be ahead.
    assert waits[-1] == pytest.approx(COUNT * 106_496 / MIB - 1, abs=0.5)


def test_a_pause_and_a_restart_go_on_where_it_was(local: Local) -> None:
    local.core.timer = lambda _seconds, _act: None
    first = scrub(local, 1)
    assert first["state"] == "running"
    assert 0 < first["blocks"] < COUNT  # type: ignore[operator]
    assert local.store.scrub.pause()
    assert not local.store.scrub.pause()
    local.stop()
    again = Local(local.path)
    assert again.store.scrub.status()["state"] == "paused"
    again.tick()
    assert again.store.scrub.status()["blocks"] == first["blocks"]
    assert again.store.scrub.start(0) == "resumed"
    again.store.run_chores()
    told = again.store.scrub.status()
    assert (told["state"], told["blocks"]) == ("idle", COUNT)
    assert not again.store.scrub.stop()
    again.stop()


def test_one_that_runs_goes_on_by_itself_after_a_restart(local: Local) -> None:
    local.core.timer = lambda _seconds, _act: None
    scrub(local, 1)
    local.stop()
    again = Local(local.path)
    again.store.scrub.progress.rate = 0
    again.tick()
    assert (again.store.scrub.status()["state"], again.store.scrub.progress.blocks) == (
        "idle",
        COUNT,
    )
    again.stop()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"place": -7}', '{"state": "gone"}', "9" * 70000])
def test_a_state_that_makes_no_sense_is_none(local: Local, text: str) -> None:
    local.stop()
    (local.path / "scrub.json").write_text(text)
    again = Local(local.path)
    assert scrub(again)["blocks"] == COUNT
    again.stop()


def test_the_command(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    with Client(str(daemon.socket)) as client:
        names = [key(n) for n in range(COUNT)]
        client.put_many(names, [block(n, 9000) for n in range(COUNT)], ack="written")
    assert daemon.run("scrub", "start", "--wait").code == 0
    assert daemon.run("scrub", "pause").code == 4
    restart(daemon)
    victim = next(iter(sorted((daemon.store / "blocks").rglob("*.kvb"))))
    flip(victim, 4096 + 17)
    ran = daemon.run("scrub", "start", "--wait", "--rate", "max", "--json")
    assert ran.code == 5
    findings = ran.json()["findings"]
    assert isinstance(findings, list)
    assert [one["kind"] for one in findings] == ["damaged"]
    assert daemon.run("status").code == 1
    assert daemon.run("scrub", "ack").text == "1 damaged record acknowledged\n"
    assert daemon.run("status").code == 0
    text = daemon.run("scrub", "status").text
    assert text.startswith("damaged ")
    assert "idle: 50 blocks" in text
    state = json.loads((daemon.store / "scrub.json").read_text())
    assert state["found"]["damaged"] == 1
    assert daemon.stop() == 0


def test_fsck_through_the_daemon(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    with Client(str(daemon.socket)) as client:
        names = [key(n) for n in range(COUNT)]
        client.put_many(names, [block(n, 9000) for n in range(COUNT)], ack="written")
    ran = daemon.run("fsck", "--online")
    assert (ran.code, "clean: 50 blocks" in ran.text) == (0, True), ran
    restart(daemon)
    first, second = sorted((daemon.store / "blocks").rglob("*.kvb"))[:2]
    flip(first, 4096 + 17)
    second.unlink()
    (daemon.store / "blocks" / "stray").symlink_to("/etc")
    assert daemon.run("fsck", "--online", "--quick").code in (0, 5)
    ran = daemon.run("fsck", "--online", "--json")
    assert ran.code == 5
    lines = [json.loads(line) for line in ran.text.splitlines()]
    finding, summary = LINES["fsck"]
    assert [unlike(line, finding) for line in lines[:-1]] == [[]] * (len(lines) - 1)
    assert unlike(lines[-1], summary) == []
    assert {"payload-damaged", "missing"} <= {line["id"] for line in lines[:-1]}
    assert (lines[-1]["corrupt"]["payload"], lines[-1]["checked"]) == (1, COUNT)
    assert lines[-1]["next_command"]
    assert daemon.run("fsck", "--online", "--repair").code == 2
    assert daemon.run("fsck", "--online", daemon.store).code == 2
    assert daemon.run("fsck", daemon.store).code == 11
    assert daemon.stop() == 0

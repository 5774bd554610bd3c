"""Commands that decide what stays where: evict, warm, pin, unpin, pins, flush, inspect."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.answers import Ack
from kvstore.client import Client
from kvstore.keys import Prompt, block_hashes, block_keys, named, namespace_id
from kvstore.protocol import Op
from tests.command import COMMAND, Daemon, Ran, run_command
from tests.mounts import read_only
from tests.stores import block, key
from tests.talk import Talker, bare, eventually, head

SIZE = 60_000
RECORD = 65_536
DEFAULT = namespace_id(named("default")).hex()
BIG = ("--capacity", "256MiB", "--memory", "64MiB", "--min-free", "0")


def chain(daemon: Daemon, numbers: Sequence[int], parent: int | None = None) -> None:
    """Put blocks that follow each other."""
    names = [key(number) for number in numbers]
    with Client(str(daemon.socket)) as client:
        above = b"" if parent is None else key(parent)
        statuses = client.put_many(
            names,
            [block(number, SIZE) for number in numbers],
            ack="written",
            chain=True,
            parent=above,
        )
    assert not statuses.any()


def listed(daemon: Daemon) -> set[str]:
    return set(daemon.run("list").text.splitlines())


def named_keys(ran: Ran) -> set[bytes]:
    return {bytes.fromhex(line.split()[2]) for line in ran.text.splitlines()}


def keys(numbers: Sequence[int]) -> set[bytes]:
    return {key(number) for number in numbers}


# -- evict ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_evict_to_size_does_what_the_dry_run_prints(daemon: Daemon, share: float) -> None:
    for first in range(0, 200, 20):
        chain(daemon, range(first, first + 20))
    chain(daemon, range(200, 230), parent=5)  # a branch, so that not every chain is a line
    status = daemon.status()
    used, live = int(str(status["used_bytes"])), int(str(status["live_bytes"]))
    size = used - int(live * share)
    before = listed(daemon)
    dry = daemon.run("evict", "--to-size", f"{size}B", "-n")
    assert dry.code == 0, dry.stderr
    assert listed(daemon) == before
    ran = daemon.run("evict", "--to-size", f"{size}B", "--json")
    assert ran.code == 0, ran.stderr
    gone = before - listed(daemon)
    assert gone == set(dry.text.splitlines())
    told = ran.json()["blocks"]
    assert isinstance(told, list)
    assert {f"{one['namespace']} {one['shard']} {one['key']}" for one in told} == gone
    status = daemon.status()
    assert int(str(status["used_bytes"])) <= size
    # No more than was needed: one record less would have been too few.
    assert live - int(str(status["live_bytes"])) <= used - size + 2 * RECORD + (2 << 20)
    assert status["ghosts"] == 0, "a block whose parent is gone leaves a ghost"


def test_evict_keeps_what_is_pinned_and_what_leads_to_it(daemon: Daemon) -> None:
    chain(daemon, range(8))
    chain(daemon, range(10, 14))
    assert daemon.run("pin", key(5).hex()).code == 0
    ran = daemon.run("evict", "--all", "-y")
    assert ran.code == 3
    assert re.search(r"evicted 6 blocks.* 6 blocks stay \(1 pinned, 5 needed by others\)", ran.text)
    assert {bytes.fromhex(line.split()[2]) for line in listed(daemon)} == keys(range(6))
    assert daemon.run("unpin", key(5).hex()).code == 0
    ran = daemon.run("evict", "--all", "--yes", "--json")
    assert (ran.code, ran.json()["count"]) == (0, 6)
    assert listed(daemon) == set()


def test_evict_of_a_chain_stops_before_what_others_share(daemon: Daemon) -> None:
    chain(daemon, range(6))
    chain(daemon, range(10, 13), parent=2)
    ran = daemon.run("evict", "--chain", key(3).hex())
    assert ran.code == 2
    assert "--subtree" in ran.stderr
    assert named_keys(daemon.run("evict", "--chain", key(5).hex(), "-n")) == keys([5, 4, 3])
    assert daemon.run("evict", "--chain", key(5).hex()[:9]).code == 0
    assert named_keys(daemon.run("list")) == keys([0, 1, 2, 10, 11, 12])
    assert named_keys(daemon.run("evict", "--chain", key(12).hex(), "-n")) == keys(
        [12, 11, 10, 2, 1, 0]
    )
    assert daemon.run("evict", "--subtree", key(2).hex()).code == 0
    assert named_keys(daemon.run("list")) == keys([0, 1])


def test_evict_by_age_and_namespace(daemon: Daemon) -> None:
    chain(daemon, range(3))
    put = ["put", "-i", "-", "--namespace", "llama", "--create-namespace", "--wait"]
    daemon.run(*put, key(7).hex(), stdin=b"x")
    time.sleep(6.1)
    chain(daemon, range(20, 23))
    assert named_keys(daemon.run("evict", "--older-than", "6s", "-n")) == keys([0, 1, 2, 7])
    older = ["evict", "--older-than", "6s", "--namespace", "llama"]
    assert daemon.run(*older).code == 0
    assert named_keys(daemon.run("list")) == keys([0, 1, 2, 20, 21, 22])
    assert daemon.run("evict", "--older-than", "1h", "--json").json()["count"] == 0
    # Whoever uses a block uses what it follows: nothing of the chain is old any more.
    daemon.run("get", key(2).hex())
    assert not named_keys(daemon.run("evict", "--older-than", "6s", "-n")) & keys([0, 1, 2])
    assert daemon.run("evict", "--namespace", DEFAULT, "-y").code == 0
    assert daemon.run("evict", "--namespace", "nowhere").code == 4
    assert daemon.run("evict", "--chain", "dead").code == 4


def test_evict_writes_first_what_waits(daemon: Daemon) -> None:
    with Client(str(daemon.socket)) as client:
        client.put_many([key(n) for n in range(20)], [block(n, SIZE) for n in range(20)])
    assert daemon.run("evict", "--all", "-y", "--json").json()["count"] == 20
    assert listed(daemon) == set()


def test_evict_says_why_a_size_was_not_reached(daemon: Daemon) -> None:
    chain(daemon, range(3))
    daemon.run("pin", key(1).hex())
    ran = daemon.run("evict", "--to-size", "1B")
    assert ran.code == 3
    assert "2 blocks stay" in ran.text
    assert "; the store still takes " in ran.text
    daemon.run("unpin", key(1).hex())
    ran = daemon.run("evict", "--to-size", "1B")
    assert ran.code == 3
    assert re.search(r"evicted 2 blocks.*; the store still takes .* for its own files\n", ran.text)


def test_evict_wants_units(daemon: Daemon) -> None:
    """``--to-size 300`` of somebody who thinks of GiB must not empty the store."""
    chain(daemon, range(3))
    for option, hint in (("--to-size", "300GiB"), ("--older-than", "300d")):
        for number in ("300", " 300 ", "300.0"):
            ran = daemon.run("evict", option, number)
            assert (ran.code, ran.text) == (2, "")
            assert "no unit" in ran.stderr
        assert f"Write for example {hint}." in daemon.run("evict", option, "300").stderr
    assert len(listed(daemon)) == 3


@pytest.mark.parametrize("command", ["evict", "warm", "pins", "list"])
def test_an_unknown_namespace_is_named_as_it_was_written(daemon: Daemon, command: str) -> None:
    ran = daemon.run(command, "--namespace", "llama")
    assert ran.code == 4
    assert "namespace 'llama' " in ran.stderr


@pytest.mark.parametrize("sweep", [["--all"], ["--namespace", "default"]])
def test_evict_asks_before_it_sweeps(daemon: Daemon, sweep: list[str]) -> None:
    chain(daemon, range(3))
    assert daemon.run("evict", *sweep, "-n").code == 0
    ran = daemon.run("evict", *sweep)
    assert ran.code == 2
    assert "3 blocks, 192 KiB" in ran.stderr
    assert "--yes" in ran.stderr
    for answer, code, left in (("n", 2, 3), ("y", 0, 0)):
        leader, follower = pty.openpty()
        try:
            os.write(leader, f"{answer}\n".encode())
            command = [str(COMMAND), "--socket", str(daemon.socket), "evict", *sweep]
            done = subprocess.run(command, stdin=follower, capture_output=True, timeout=60)
        finally:
            os.close(leader)
            os.close(follower)
        assert done.returncode == code, done.stderr
        assert b"evict 3 blocks, 192 KiB? [y/N]" in done.stderr
        assert len(listed(daemon)) == left


def test_evict_survives_a_restart(daemon: Daemon) -> None:
    chain(daemon, range(10))
    assert daemon.run("evict", "--subtree", key(4).hex()).code == 0
    daemon.stop(signal.SIGKILL)
    daemon.start()
    assert named_keys(daemon.run("list")) == keys(range(4))


def test_a_block_that_is_used_meanwhile_stays(daemon: Daemon) -> None:
    chain(daemon, range(4))
    assert daemon.run("contains", key(3).hex()).code == 0  # a lease of 5 s
    ran = daemon.run("evict", "--all", "-y", "--json")
    assert (ran.code, ran.json()["count"]) == (3, 0)
    assert ran.json()["kept"] == {"pinned": 0, "in_use": 1, "needed_by_others": 3}


def test_evict_ends_at_ctrl_c_and_tells_what_it_did(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "512MiB", "--memory", "64MiB", "--min-free", "0"))
    daemon.start()
    try:
        names = [key(number) for number in range(12_000)]
        with Client(str(daemon.socket)) as client:
            for start in range(0, len(names), 1000):
                client.put_many(names[start : start + 1000], [b"x"] * 1000, ack="written")
        command = [str(COMMAND), "--socket", str(daemon.socket), "evict", "--all", "-y", "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert eventually(lambda: int(str(daemon.status()["evictions"])) > 0, 30)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        left = len(listed(daemon))
        if process.returncode == 0:
            pytest.skip("it was quicker than Ctrl-C")
        assert process.returncode == 130, err
        told = json.loads(out)
        assert told["interrupted"] is True
        assert json.loads(err)["error"] == "Interrupted"
        # A batch may have been on its way to us.
        assert 0 <= len(names) - left - told["count"] <= 1024
        assert left > 0
    finally:
        assert daemon.stop() == 0


# -- warm -----------------------------------------------------------------------------------------


def test_warm_ends_at_ctrl_c_and_tells_what_it_did(daemon: Daemon, tmp_path: Path) -> None:
    chain(daemon, range(20))
    (tmp_path / "names").write_bytes(daemon.run("list").stdout)
    daemon.stop()
    daemon.start()
    slow = ["warm", "--from", str(tmp_path / "names"), "--rate", "64KiB/s", "--json"]
    command = [str(COMMAND), "--socket", str(daemon.socket), *slow]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert eventually(lambda: int(str(daemon.status()["memory_blocks"])) > 1, 30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads(err)["error"] == "Interrupted"
    told = json.loads(out)
    assert told["interrupted"] is True
    assert 1 <= told["loaded"] < 20


def read_bytes(daemon: Daemon) -> int:
    text = Path(f"/proc/{daemon.pid}/io").read_text()
    return int(re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]


def test_after_a_warm_gets_read_no_disk(daemon: Daemon, tmp_path: Path) -> None:
    chain(daemon, range(100))
    with Client(str(daemon.socket)) as client:
        client.put_many([key(500)], [b"y" * SIZE], shard=3, ack="written")
    listing = tmp_path / "blocks.txt"
    listing.write_text(daemon.run("list").text + f"\n{key(900).hex()}\n")
    assert daemon.stop() == 0
    daemon.start()
    ran = daemon.run("warm", "--from", listing, "--json")
    assert ran.code == 0, ran.stderr
    counts = {"loaded": 101, "present": 0, "absent": 1, "skipped": 0, "failed": 0}
    assert ran.json() == {**counts, "bytes": 101 * RECORD, "interrupted": False}
    before = read_bytes(daemon)
    with Client(str(daemon.socket)) as client:
        found = client.get_many([key(number) for number in range(100)])
        assert [bytes(one or b"") for one in found] == [block(n, SIZE) for n in range(100)]
    assert read_bytes(daemon) == before
    status = daemon.status()
    assert (status["hits"], status["misses"], status["memory_hits"]) == (100, 0, 100)
    again = daemon.run("warm", "--from", "-", stdin=listing.read_bytes())
    assert again.text.startswith("loaded 0, present 101, absent 1, skipped 0, failed 0; ")


VLLM = {
    "engine": "vllm",
    "model": "m",
    "hash": "sha256",
    "seed": "vllm-none-hash",
    "tokens_per_hash": 32,
    "blocks_per_chunk": 1,
    "groups": [{"id": 0, "tokens": 32}],
    "weights": "a",
}


def test_prompts_of_a_vllm(daemon: Daemon, tmp_path: Path) -> None:
    """They are warmed by their tokens; its namespaces and their differences are shown."""
    record, prompts = tmp_path / "vllm.json", tmp_path / "prompts"
    record.write_text(json.dumps(VLLM))
    prompts.write_text(f"{list(range(70))}\n\n" + json.dumps({"prompt": [7] * 32}))
    keys = [key.hex() for key in block_keys(block_hashes(Prompt(range(64)), 32))]
    put = ["put", keys[1], "--namespace", f"@{record}", "--create-namespace", "-i", str(record)]
    assert daemon.run(*put).code == 0
    named = ["--namespace", f"@{record}"]
    ran = daemon.run("warm", "--tokens", prompts, *named, "--json")
    assert {name: ran.json()[name] for name in ("present", "absent")} == {"present": 1, "absent": 2}
    listed = daemon.run("warm", "--tokens", "-", *named, "-n", stdin=prompts.read_bytes())
    assert [line.split()[2] for line in listed.text.splitlines()][:2] == keys
    bad = daemon.run("warm", "--tokens", "-", *named, stdin=b"[1]\nx\n")
    assert (bad.code, "line 2 of -" in bad.stderr) == (2, True)

    other = {**VLLM, "weights": "b", "random_seed": 1}
    record.write_text(json.dumps(other))
    assert daemon.run(*put).code == 0
    notes: Any = daemon.status()["notes"]
    (note,) = [one for one in notes if "PYTHONHASHSEED" in one]
    assert namespace_id(other).hex() in note
    assert "  random_seed:" in daemon.run("inspect", "--namespaces").text
    told: Any = daemon.run("inspect", "--namespaces", "--json").json()["differences"]
    fields = told[0]["fields"]
    assert sorted(fields) == ["random_seed", "weights"]
    assert sorted(fields["weights"]) == ["a", "b"]


def test_warm_recent_takes_what_was_used_last(daemon: Daemon) -> None:
    chain(daemon, range(30))
    chain(daemon, range(50, 60))
    daemon.stop()
    daemon.start()
    recent = ["warm", "--recent", f"{10 * RECORD}"]
    assert named_keys(daemon.run(*recent, "-n")) == keys(range(50, 60))
    assert daemon.run(*recent, "--json").json()["loaded"] == 10
    assert daemon.status()["memory_blocks"] == 10
    ran = daemon.run("warm", "--namespace", "default", "--json")
    assert (ran.json()["loaded"], ran.json()["present"]) == (30, 10)


def test_warm_stops_when_memory_is_full_of_it(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "256MiB", "--memory", "8MiB", "--min-free", "0"))
    daemon.start()
    try:
        for first in range(0, 256, 64):
            chain(daemon, range(first, first + 64))
        listing = daemon.run("list").stdout
        daemon.stop()
        daemon.start()
        found = daemon.run("warm", "--from", "-", "--json", stdin=listing).json()
        assert 100 <= int(str(found["loaded"])) <= 130
        assert int(str(found["loaded"])) + int(str(found["skipped"])) == 256
    finally:
        assert daemon.stop() == 0


def test_blocks_that_are_deleted_while_they_are_warmed_are_no_failures(tmp_path: Path) -> None:
    names = [key(number) for number in range(100)]
    warmed: list[dict[str, object]] = []
    with bare(tmp_path) as daemon:
        with Client(str(daemon.socket)) as client:
            client.put_many(names, [block(n, 300_000) for n in range(100)], ack="written")
        daemon.stop()
        daemon.start()
        with Client(str(daemon.socket)) as client, Client(str(daemon.socket)) as other:
            daemon.shut()
            asked = {"op": "warm", "keys": [name.hex() for name in names]}
            warming = threading.Thread(target=lambda: warmed.append(client.admin(asked)))
            warming.start()
            eventually(daemon.inside)
            deleting = threading.Thread(target=other.delete, args=(names,))
            deleting.start()
            eventually(lambda: not other.contains(names).any())
            daemon.open()
            warming.join()
            deleting.join()
    (told,) = warmed
    assert (told["done"], told["failed"], told["bytes"]) == (100, 0, 0)
    assert int(str(told["absent"])) > 50


def test_warm_without_memory_says_so(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "64MiB", "--memory", "0", "--min-free", "0"))
    daemon.start()
    try:
        ran = daemon.run("warm", "--from", "-", stdin=b"00ff\n")
        assert ran.code == 1
        assert "--memory" in ran.stderr
    finally:
        assert daemon.stop() == 0


def test_warm_keeps_to_its_rate(daemon: Daemon) -> None:
    chain(daemon, range(32))
    daemon.stop()
    daemon.start()
    began = time.monotonic()
    ran = daemon.run("warm", "--recent", "1GiB", "--rate", "1MiB/s", "--json")
    assert ran.json()["loaded"] == 32
    assert time.monotonic() - began > 1.9


def test_warm_names_a_damaged_block(daemon: Daemon) -> None:
    chain(daemon, range(3))
    daemon.stop()
    for path in (daemon.store / "blocks").rglob("*.kvb"):
        if key(1).hex() in path.name:
            with path.open("r+b") as file:
                file.seek(5000)
                file.write(b"flipped")
    daemon.start()
    ran = daemon.run("warm", "--namespace", "default", "--json")
    assert (ran.code, ran.json()["failed"], ran.json()["loaded"]) == (3, 1, 2)


def test_gets_go_on_while_much_is_warmed(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "1GiB", "--memory", "512MiB", "--min-free", "0"))
    daemon.start()
    try:
        with Client(str(daemon.socket)) as client:
            for first in range(0, 160, 16):
                names = [key(number) for number in range(first, first + 16)]
                client.put_many(names, [block(number, 1 << 20) for number in range(16)])
            client.flush()
            daemon.stop()
            daemon.start()
            command = [str(COMMAND), "--socket", str(daemon.socket), "warm", "--recent", "1GiB"]
            times = []
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                while process.poll() is None:
                    began = time.monotonic()
                    assert client.get(key(0)) is not None
                    times.append(time.monotonic() - began)
                assert process.wait() == 0
            assert daemon.status()["memory_blocks"] == 160
        assert sorted(times)[len(times) // 2] < 0.1
    finally:
        assert daemon.stop() == 0


# -- pins -----------------------------------------------------------------------------------------


def test_pins_are_listed_with_the_time_that_is_left(daemon: Daemon) -> None:
    chain(daemon, range(6))
    ran = daemon.run("pin", "--chain", key(2).hex(), "--for", "90min", "--json")
    assert ran.code == 0, ran.stderr
    expected = {"pinned": 3, "absent": 0, "refused": 0, "seconds": 5400}
    assert ran.json() == {**expected, "pinned_bytes": 3 * RECORD}
    assert named_keys(daemon.run("pins")) == keys([0, 1, 2])
    found = daemon.run("pins", "--json").json()["pins"]
    assert isinstance(found, list)
    assert all(5300 < one["seconds"] <= 5400 and one["administrator"] for one in found)
    assert daemon.run("pin", key(4).hex(), "dead" * 16).code == 4
    assert re.search(r"^pinned +4 blocks", daemon.run("status").text, re.MULTILINE)
    assert daemon.run("unpin", "--subtree", key(2).hex()).code == 4  # 3 and 5 are not pinned
    assert named_keys(daemon.run("pins")) == keys([0, 1])
    assert daemon.run("pins", "--namespace", "nowhere").code == 4


def test_pins_keep_a_quarter_at_most(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "64MiB", "--memory", "32MiB", "--min-free", "0"))
    daemon.start()
    try:
        with Client(str(daemon.socket)) as client:
            names = [key(number) for number in range(5)]
            client.put_many(names, [b"x" * (4 << 20)] * 5, ack="written")
        ran = daemon.run("pin", *[name.hex() for name in names], "--json")
        assert ran.code == 14
        assert (ran.json()["pinned"], ran.json()["refused"]) == (3, 2)
    finally:
        assert daemon.stop() == 0


# -- flush ----------------------------------------------------------------------------------------


def test_flush_makes_durable(daemon: Daemon) -> None:
    daemon.run("put", "00ff", "-i", "-", stdin=b"x")
    ran = daemon.run("flush")
    assert (ran.code, ran.text) == (0, "everything is durable\n")
    assert daemon.run("flush", "--json").json() == {"errors": []}


# -- inspect --------------------------------------------------------------------------------------


def test_inspect_tells_the_same_of_a_block_with_and_without_the_daemon(daemon: Daemon) -> None:
    put = ["--wait", "--label", "first of all", "-i", "-"]
    daemon.run("put", "aabbccdd01", *put, stdin=b"x" * SIZE)
    daemon.run("put", "aabbccdd02", "--parent", "aabbccdd01", *put, stdin=b"y" * SIZE)
    daemon.run("put", "aabbccee01", "--shard", "1", *put, stdin=b"z" * SIZE)
    asked = daemon.run("inspect", "aabbccdd02", "--json")
    assert asked.code == 0, asked.stderr
    told = asked.json()
    assert (told["parent"], told["bytes"], told["verdict"]) == ("aabbccdd01", SIZE, "ok")
    assert told["envelope"]["label"] == "first of all"  # type: ignore[index]
    ambiguous = daemon.run("inspect", "AABBCCDD")
    assert ambiguous.code == 2
    assert f"{DEFAULT} 0 aabbccdd01" in ambiguous.stderr
    assert daemon.run("inspect", "aabbcce").code == 4
    assert daemon.run("inspect", "aabbccee0").text.startswith("key         aabbccee01\n")
    assert daemon.run("inspect", "aabbccdd02", "--shard", "1").code == 4
    whole = daemon.run("inspect", "--json").json()
    assert (whole["blocks"], whole["clean"]) == (3, None)
    daemon.stop(signal.SIGKILL)
    again = run_command("inspect", daemon.store, "aabbccdd02", "--json")
    same = {**told, "memory": False, "last_use": again.json()["last_use"]}
    assert (again.code, again.json()) == (0, same)
    assert run_command("inspect", "aabbccdd", "--store", daemon.store).code == 2
    # Nobody listens any more: the store of the settings is read.
    read = run_command(
        "--socket", daemon.socket, "inspect", "aabbccee", env={"KVSTORE_STORE": str(daemon.store)}
    )
    assert read.code == 0
    assert (daemon.store / "blocks" / re.search(r"path +(\S+)", read.text)[1]).is_file()  # type: ignore[index]


def test_inspect_tree_shows_the_chain(daemon: Daemon) -> None:
    chain(daemon, range(4))
    chain(daemon, range(10, 12), parent=1)
    online = daemon.run("inspect", key(1).hex(), "--tree")
    lines = [line.split()[0] for line in online.text.splitlines()]
    assert lines[:2] == [key(0).hex(), key(1).hex()]
    assert {bytes.fromhex(line) for line in lines} == keys([0, 1, 2, 3, 10, 11])
    indented = [line for line in online.text.splitlines() if line.startswith("  ")]
    assert len(indented) == 4
    assert "\033[1m" in daemon.run("inspect", key(1).hex(), "--tree", "--color", "always").text
    assert daemon.run("delete", key(1).hex()).code == 0
    ghostly = daemon.run("inspect", key(3).hex(), "--tree", "--json").json()["blocks"]
    assert isinstance(ghostly, list)
    assert [(one["key"], one["there"]) for one in ghostly[:2]] == [
        (key(0).hex(), True),
        (key(1).hex(), False),
    ]
    short = daemon.run("inspect", key(3).hex(), "--tree", "--limit", "2", "--json").json()
    assert (len(short["blocks"]), short["more"]) == (2, True)  # type: ignore[arg-type]
    daemon.stop()
    offline = run_command("inspect", daemon.store, key(3).hex(), "--tree", "--json")
    assert offline.json()["blocks"] == ghostly


def test_inspect_names_a_damaged_record(daemon: Daemon) -> None:
    chain(daemon, range(1))
    (path,) = (daemon.store / "blocks").rglob("*.kvb")
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"flipped")
    for command in ([], ["--store", str(daemon.store)]):
        if command:
            daemon.stop(signal.SIGKILL)
        ran = daemon.run("inspect", key(0).hex(), *command)
        assert ran.code == 5
        assert re.search("record +damaged: the payload has checksum", ran.text)
        assert "checksum " in ran.text.split("envelope")[1]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_inspect_reads_a_read_only_mount(daemon: Daemon) -> None:
    chain(daemon, range(3))
    daemon.stop(signal.SIGKILL)
    with read_only(daemon.store) as place:
        ran = run_command("inspect", place, key(2).hex(), "--json")
        assert (ran.code, ran.json()["verdict"]) == (0, "ok"), ran.stderr
        assert run_command("inspect", place, key(2).hex(), "--tree").code == 0
        assert run_command("inspect", place).code == 0
        assert run_command("inspect", place, "--namespaces").code == 0


def test_a_namespace_can_be_given_by_its_id(daemon: Daemon) -> None:
    put = ["put", "00ff", "-i", "-", "--namespace", "llama", "--create-namespace", "--wait"]
    daemon.run(*put, stdin=b"x")
    identity = daemon.run("list").text.split()[0]
    assert identity == namespace_id(named("llama")).hex()
    assert daemon.run("get", "00ff", "--namespace", identity).stdout == b"x"
    assert daemon.run("list", "--namespace", identity).text.count("\n") == 1
    assert daemon.run("get", "00ff", "--namespace", "0" * 32).code == 4
    shares = daemon.run("inspect", "--namespaces", "--json").json()["namespaces"]
    assert isinstance(shares, list)
    (mine,) = (share for share in shares if share["id"] == identity)
    expected = {"record": {"name": "llama"}, "key_length": 2, "blocks": 1, "live_bytes": 8192}
    assert mine == {"id": identity, "quota_bytes": None, **expected}


def test_keys_of_an_empty_namespace_may_have_any_length(daemon: Daemon) -> None:
    """With the daemon and without, whatever its first keys were."""
    daemon.run("put", "00ff", "-i", "-", "--wait", stdin=b"x")
    for place, length in (([], 2), ([], None), ([], None), ([str(daemon.store)], None)):
        if place:
            assert daemon.stop() == 0
        told = run_command("--socket", daemon.socket, "inspect", *place, "--json").json()
        (share,) = list(told["namespaces"])  # type: ignore[call-overload]
        assert (share["key_length"], share["blocks"]) == (length, 0 if length is None else 1)
        if length is not None:
            daemon.run("delete", "00ff")
            assert daemon.stop() == 0
            daemon.start()
    daemon.start()
    assert daemon.run("put", "00ff00", "-i", "-", "--wait", stdin=b"x").code == 0
    assert daemon.stop() == 0
    (share,) = list(run_command("inspect", daemon.store, "--json").json()["namespaces"])  # type: ignore[call-overload]
    assert share["key_length"] == 3
    daemon.start()


# -- the protocol ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"op": "evict"}, "UsageError"),
        ({"op": "evict", "to_size": -1}, "UsageError"),
        ({"op": "evict", "to_size": "1"}, "UsageError"),
        ({"op": "evict", "to_size": True}, "UsageError"),
        ({"op": "evict", "older_than": "x"}, "UsageError"),
        ({"op": "evict", "older_than": float("inf")}, "UsageError"),
        ({"op": "evict", "older_than": float("nan")}, "UsageError"),
        ({"op": "evict", "to_size": 1 << 70}, "UsageError"),
        ({"op": "warm", "keys": ["00"], "shard": 65536}, "InvalidKey"),
        ({"op": "inspect", "key": "00", "shard": 1 << 40}, "InvalidKey"),
        ({"op": "evict", "namespace": "00"}, "UnknownNamespace"),
        ({"op": "evict", "chain": True}, "UsageError"),
        ({"op": "evict", "chain": True, "key": "xy"}, "UsageError"),
        ({"op": "evict", "chain": True, "key": "00"}, "NotFound"),
        ({"op": "inspect", "key": 5}, "UsageError"),
        ({"op": "inspect", "key": "0" * 129}, "UsageError"),
        ({"op": "tree", "key": "00112233"}, "NotFound"),
        ({"op": "warm"}, "InvalidKey"),
        ({"op": "warm", "keys": [1]}, "InvalidKey"),
        ({"op": "warm", "keys": ["00", "0011"]}, "InvalidKey"),
        ({"op": "warm", "keys": ["00"], "shard": "0"}, "UsageError"),
        ({"op": "recent", "bytes": 1.5}, "UsageError"),
        ({"op": "pins", "namespace": 7}, "UnknownNamespace"),
        ({"op": "list", "handle": "0"}, "UsageError"),
    ],
    ids=str,
)
def test_bad_administration_is_refused(
    daemon: Daemon, asked: dict[str, object], error: str
) -> None:
    with Talker(daemon.socket) as talker:
        assert talker.json(Op.ADMIN, **asked).error == error
        assert talker.status()["failed_requests"] == 0


def test_an_eviction_ends_with_its_connection(daemon: Daemon) -> None:
    names = [key(number) for number in range(40)]
    with Talker(daemon.socket) as talker:
        talker.put(names, [b"x"] * 40, ack=Ack.WRITTEN)
        assert head(names)["count"] == 40
        talker.send(Op.ADMIN, json.dumps({"op": "evict", "all": True}).encode())
    assert eventually(lambda: daemon.status()["clients"] == 1)
    assert daemon.status()["failed_requests"] == 0

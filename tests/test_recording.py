"""Recording what clients ask for: calls that are one request, hashes instead of keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.recording import MOST_WAITING, Recording
from kvstore.replay import readers
from kvstore.replay.joining import JOIN_SECONDS, Joiner
from tests.command import Daemon
from tests.stores import Local, block, key


def test_calls_of_one_request_are_joined() -> None:
    joiner = Joiner(16)
    calls: list[tuple[float, int, list[int]]] = [
        (1.0, 0, [1, 2]),  # a look-up finds two
        (1.1, 2, [1, 2, 3]),  # its second part
        (1.2, 0, [1, 9]),  # another request
        (5.0, 5, [1, 2, 3, 4, 5]),  # what was missing of the first is put
        (6.0, 0, [1, 2, 3, 4, 5]),  # and asked for again
        (7.0, 3, [7, 8]),  # a put that nobody asked for before
    ]
    lines = [line for call in calls for line in joiner.add(*call)]
    assert lines == []
    found = [json.loads(line) for line in joiner.rest()]
    assert [one["hash_ids"] for one in found] == [
        [1, 2, 3, 4, 5],
        [1, 9],
        [1, 2, 3, 4, 5],
        [7, 8],
    ]
    assert [one["timestamp"] for one in found] == [0, 200, 5000, 6000]
    assert found[0]["input_length"] == 80


def test_a_late_put_is_a_request_of_its_own() -> None:
    joiner = Joiner(16)
    assert list(joiner.add(0.0, 0, [1])) == []
    early = list(joiner.add(JOIN_SECONDS + 1, 2, [1, 2]))
    assert [json.loads(line)["hash_ids"] for line in early + list(joiner.rest())] == [[1], [1, 2]]


def test_a_recording_tells_chains_by_salted_hashes(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    first, second = Recording(local.core), Recording(local.core)
    keys = [key(number) for number in range(3)]
    local.put(keys, [block(number) for number in range(3)], chain=True)
    local.get(keys[:2])
    local.put([key(8), key(9)], [block(8), block(9)])
    told: Any = first.take()
    put, got, *single = [(heard, ids) for _, heard, ids in told["requests"]]
    assert put[0] == 3
    assert got == (0, put[1][:2])
    assert [len(ids) for _, ids in single] == [1, 1]
    other: Any = second.take()
    assert other["requests"][0][2] != put[1]
    assert all(one < 2**53 for one in put[1])
    assert first.take() == {"requests": [], "lost": 0}
    first.close()
    local.get(keys)
    assert first.take()["requests"] == []
    second.close()
    local.stop()


def test_a_recording_that_nobody_reads_is_bounded(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    recording = Recording(local.core)
    local.put([key(1)], [block(1)])
    recording._blocks = MOST_WAITING
    local.get([key(1)])
    told: Any = recording.take()
    assert (len(told["requests"]), told["lost"]) == (1, 1)
    recording.close()
    local.stop()


def test_a_daemon_is_recorded_and_replayed(daemon: Daemon, tmp_path: Path) -> None:
    file, joiner, calls = tmp_path / "trace.jsonl", Joiner(16), 0
    lines: list[str] = []
    with Client(str(daemon.socket)) as client, Client(str(daemon.socket)) as observer:
        told: Any = observer.follow({"op": "record"})
        next(told)
        keys = [key(number) for number in range(6)]
        for stop in (3, 6):
            client.get_many(keys[:stop])
            client.put_many(keys[:stop], [block(number) for number in range(stop)], chain=True)
        while calls < 3:  # the first look-up found nothing, so nothing was used
            for call in next(told)["requests"]:
                lines += joiner.add(*call)
                calls += 1
        told.close()
    file.write_text("\n".join([*lines, *joiner.rest()]))
    trace = readers.read(file)
    assert trace.lengths.tolist() == [3, 6]
    assert trace.blocks == 6

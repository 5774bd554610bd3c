"""Replays: exact counts against plain models, the formats of traces, and no look at the future."""

from __future__ import annotations

import gzip
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import NotFound, UsageError
from kvstore.replay import policies, readers, result
from kvstore.replay.generate import KINDS, Generator
from kvstore.replay.optimum import optimum
from kvstore.replay.readers import Reading
from kvstore.replay.tiers import Counts, Plan, Tiers
from kvstore.replay.trace import Builder, Trace
from tests.command import run_command

SMALL = Path(__file__).parent / "golden" / "traces" / "mixed.jsonl.gz"
"""500 requests of ``kvstore trace generate mixed --seed 3``."""


@pytest.fixture(scope="module")
def small() -> Trace:
    return readers.read(SMALL)


def paths_of(trace: Trace) -> list[list[int]]:
    """Every path, root first, by climbing block by block."""
    parents, found = trace.parents.tolist(), []
    for leaf in trace.leaves.tolist():
        path = []
        while leaf >= 0:
            path.append(leaf)
            leaf = parents[leaf]
        found.append(path[::-1])
    return found


def plain_lru(trace: Trace, disk: int, memory: int, *, late: bool) -> tuple[int, int, int]:
    """The counting rules, written down with two ordered dictionaries: hits, in memory, writes."""
    near: OrderedDict[int, None] = OrderedDict()
    far: OrderedDict[int, None] = OrderedDict()
    ends: dict[int, bool] = {}
    hits = near_hits = writes = 0
    for path, partial in zip(paths_of(trace), trace.partial.tolist(), strict=True):
        for block in path:
            if block not in near and block not in far:
                break
            hits += 1
            near_hits += block in near
        for block in reversed(path):
            near[block] = None
            near.move_to_end(block)
            writes += not late and block not in far
            if block in far or not late:
                far[block] = None
                far.move_to_end(block)
            ends[block] = partial and block == path[-1]
        while len(near) > memory:
            block, _ = near.popitem(last=False)
            if late and block not in far and not ends[block]:
                far[block] = None
                writes += 1
        while len(far) > disk:
            far.popitem(last=False)
    return hits, near_hits, writes


def plain_optimum(trace: Trace, room: int) -> int:
    """Belady's rule block by block: drop the farthest next use, the deepest first."""
    paths = paths_of(trace)
    uses: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        for block in path:
            uses.setdefault(block, []).append(number)
    kept: dict[int, tuple[int, int]] = {}
    hits = 0
    for path in paths:
        hits += next((at for at, block in enumerate(path) if block not in kept), len(path))
        for depth, block in enumerate(path):
            uses[block].pop(0)
            kept[block] = (uses[block][0] if uses[block] else len(paths), depth)
        for block in [block for block in kept if kept[block][0] == len(paths)]:
            del kept[block]
        for block in sorted(kept, key=kept.__getitem__, reverse=True)[: max(0, len(kept) - room)]:
            del kept[block]
    return hits


def replayed(trace: Trace, plan: Plan) -> Counts:
    return Tiers(trace, plan, policies.make(plan.policy, plan.disk)).run()


# -- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["late", "through"])
@pytest.mark.parametrize(("disk", "memory"), [(100, 40), (1000, 150), (3000, 1000), (60, 500)])
def test_lru_counts_as_the_rules_say(small: Trace, disk: int, memory: int, write: str) -> None:
    found = replayed(small, Plan("lru", disk, memory, write, "order"))
    counted = found.hits, found.memory_hits, found.writes
    assert counted == plain_lru(small, disk, memory, late=write == "late")


def test_lru_counts_are_what_they_were(small: Trace) -> None:
    """So that a change of trace reader, generator or rules is noticed as such."""
    assert (small.requests, small.refs, small.blocks) == (500, 8859, 3494)
    found = [replayed(small, Plan("lru", disk, 69, "late", "order")) for disk in (174, 349, 698)]
    assert [(one.hits, one.writes) for one in found] == [(2534, 5752), (3003, 5289), (3916, 4379)]


@pytest.mark.parametrize("room", [1, 30, 300, 1500, 10_000])
def test_the_optimum_is_beladys(small: Trace, room: int) -> None:
    part = small.first(250)
    assert optimum(part, room) == plain_optimum(part, room)


@pytest.mark.parametrize("name", policies.names())
def test_nothing_beats_the_optimum_or_leaves_orphans(small: Trace, name: str) -> None:
    worst = plain_lru(small, 60, 40, late=False)[0]
    for write in ("late", "through"):
        found = replayed(small, Plan(name, 464, 92, write, "leaf"))
        assert worst < found.hits <= optimum(small, 464 + 92)
        assert found.orphans == 0
        assert found.peak_ghosts <= 4 * 464


@pytest.mark.parametrize("name", policies.names())
def test_what_comes_later_changes_nothing(small: Trace, name: str) -> None:
    for rule in ("leaf", "order"):
        whole = replayed(small, Plan(name, 300, 92, "late", rule, count_to=311))
        assert replayed(small.first(311), Plan(name, 300, 92, "late", rule)) == whole


def test_windows_add_up(small: Trace) -> None:
    plan = Plan("lru", 464, 92)
    parts = [
        replayed(small, Plan("lru", 464, 92, count_from=start, count_to=stop))
        for start, stop in ((0, 123), (123, 500))
    ]
    whole = replayed(small, plan)
    assert sum(one.hits for one in parts) == whole.hits
    assert sum(one.refs for one in parts) == whole.refs
    assert sum(optimum(small, 556, *ends) for ends in ((0, 123), (123, 500))) == optimum(small, 556)


def test_writes_become_bytes_a_day(small: Trace) -> None:
    found = result.run(small, Plan("lru", 464, 92), result.Drive(1 << 21, 10**12))
    daily = int(str(found["ssd_writes"])) * (1 << 21) * 86400 / small.seconds
    assert found["bytes_per_day"] == pytest.approx(daily)
    assert found["drive_writes_per_day"] == pytest.approx(daily / 1e12)
    nothing = result.run(small, Plan("lru", 464, 92), result.Drive())
    assert nothing["bytes_per_day"] is None


# -- the published figures ------------------------------------------------------------------------

VECTORS = {
    "mooncake_conversation_dev.npz": [
        (5863, 2345, 62738, (24287, 155725), (31223, 139537)),
        (11727, 2345, 62738, (40391, 139621), (43371, 127645)),
        (23454, 2345, 62738, (53628, 126384), (55153, 116114)),
        (58637, 2345, 62738, (62375, 117637), (62390, 108942)),
    ],
    "weka_agentic_dev.npz": [
        (1826, 365, 3333005, (1857214, 2655666), (2021961, 2457018)),
        (3653, 913, 4033324, (3334025, 1178855), (3438103, 1056710)),
        (36536, 3653, 4330200, (4323861, 189019), (4324094, 186758)),
    ],
}


@pytest.mark.parametrize("name", VECTORS)
def test_the_published_counts_come_out(name: str) -> None:
    """``make vectors TRACES=DIR``: the traces are not part of the project."""
    if "TRACES" not in os.environ:
        pytest.skip("TRACES names no directory with the development traces")
    trace = readers.read(Path(os.environ["TRACES"]) / name)
    for disk, memory, best, through, late in VECTORS[name]:
        assert optimum(trace, disk + memory) == best
        for write, wanted in (("through", through), ("late", late)):
            found = replayed(trace, Plan("lru", disk, memory, write, "order"))
            assert (found.hits, found.writes) == wanted


# -- traces ---------------------------------------------------------------------------------------


def same(one: Trace, other: Trace) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("parents", "leaves", "lengths", "arrivals", "input_tokens", "output_tokens")
    ) and (one.block_tokens == other.block_tokens)


def test_paths_are_what_climbing_gives(small: Trace) -> None:
    for start, stop in ((0, 500), (17, 18), (3, 90), (20, 20)):
        found = small.paths(start, stop)
        cut = [
            found.blocks[begin:end].tolist()
            for begin, end in zip(found.starts[:-1], found.starts[1:], strict=True)
        ]
        assert cut == paths_of(small)[start:stop]


def test_a_tree_is_read_as_its_lines_are(small: Trace, tmp_path: Path) -> None:
    file = tmp_path / "tree.npz"
    np.savez_compressed(
        file,
        parent=small.parents,
        leaf=small.leaves,
        n_blocks=small.lengths,
        ts_ms=small.arrivals,
        in_tok=small.input_tokens,
        out_tok=small.output_tokens,
        block_tokens=small.block_tokens,
    )
    assert same(readers.read(file), small)
    packed = tmp_path / "tree.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert same(readers.read(packed), small)


def test_bailian_counts_in_seconds_and_small_blocks(tmp_path: Path) -> None:
    lines = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40,
         "output_length": 5, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 2.25, "input_length": 32,
         "output_length": 6, "type": "text", "turn": 2, "hash_ids": [7, 8]},
    ]  # fmt: skip
    file = tmp_path / "bailian.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = readers.read(file)
    assert (trace.block_tokens, trace.arrivals.tolist()) == (16, [1500, 2250])
    assert (trace.parents.tolist(), trace.leaves.tolist()) == ([-1, 0, 1], [2, 1])
    assert trace.partial.tolist() == [True, False]
    grouped = readers.read(file, Reading(group=2))
    assert (grouped.block_tokens, grouped.parents.tolist()) == (32, [-1])
    assert grouped.partial.tolist() == [False, False]


def session(first: int, model: str = "m") -> dict[str, object]:
    request = {"t": 0.5, "type": "s", "model": model, "in": 200, "out": 3, "hash_ids": [1, 2, 3]}
    inner = {**request, "t": 1.0, "type": "n", "model": "small", "hash_ids": [1, first]}
    return {
        "id": str(first),
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {"type": "subagent", "t": 2.0, "requests": [inner]},
            request,
        ],
    }


def test_sessions_share_nothing_and_begin_when_the_seed_says(tmp_path: Path) -> None:
    for number in (5, 6):
        (tmp_path / f"{number}.json").write_text(json.dumps(session(number)))
    trace = readers.read(tmp_path, Reading(spread=1000.0, seed=4))
    assert np.count_nonzero(trace.parents == -1) == 4  # per session and model
    assert np.all(np.diff(trace.arrivals) >= 0)
    assert same(trace, readers.read(tmp_path, Reading(spread=1000.0, seed=4)))
    assert not same(trace, readers.read(tmp_path, Reading(spread=1000.0, seed=5)))
    one = readers.read(tmp_path / "5.json")
    assert one.arrivals.tolist() == [500, 3000]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no trace at all", "no JSON"),
        (b'{"hash_ids": [1], "timestamp": 1}\n', "line 1"),
        (
            b'{"hash_ids": [1], "timestamp": 1, "input_length": 1, "output_length": 1}\n{"a',
            "line 2",
        ),
        (b"PK\x03\x04 nothing that numpy knows", "no trace"),
        (b"\x1f\x8b no gzip", "cannot be read"),
        (b"[1, 2]", "no trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        readers.read(file)
    with pytest.raises(NotFound):
        readers.read(tmp_path / "absent")


def test_a_tree_that_is_none_is_refused(tmp_path: Path) -> None:
    good: dict[str, object] = {
        "parent": [-1, 0], "leaf": [1], "n_blocks": [2], "ts_ms": [0], "in_tok": [9],
        "out_tok": [1], "block_tokens": 4,
    }  # fmt: skip
    for name, value in (("parent", [-1, 1]), ("leaf", [2]), ("n_blocks", [1]), ("ts_ms", [0, 1])):
        file = tmp_path / "bad.npz"
        arrays: Any = {key: np.array(one) for key, one in {**good, name: value}.items()}
        np.savez(file, **arrays)
        with pytest.raises(UsageError, match="no trace that is known"):
            readers.read(file)


def test_requests_without_blocks_are_left_out() -> None:
    builder = Builder("t", 512)
    builder.add(0, 10, 1, [])
    builder.add(1, 10, 1, [4])
    assert builder.finish().requests == 1


# -- made up --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_traces_are_read_back(kind: str, tmp_path: Path) -> None:
    lines = list(Generator(kind, 5).lines(300))
    assert lines == list(Generator(kind, 5).lines(300)) != list(Generator(kind, 6).lines(300))
    file = tmp_path / "made.jsonl"
    file.write_text("\n".join(lines))
    trace = readers.read(file)
    assert trace.requests == 300
    assert np.all(np.diff(trace.arrivals) >= 0)
    assert np.array_equal(trace.lengths, -(-trace.input_tokens // 512))
    assert 0.2 < optimum(trace, trace.blocks) / trace.refs < 1


def test_the_golden_trace_is_what_the_generator_makes() -> None:
    with gzip.open(SMALL, "rt") as file:
        assert file.read().splitlines() == list(Generator("mixed", 3).lines(500))


# -- the command ----------------------------------------------------------------------------------


def test_the_command_tells_what_it_counted(tmp_path: Path) -> None:
    ran = run_command("replay", SMALL, "--ssd-blocks", "464", "--dram", "2%", "--optimum", "--json")
    found: Any = ran.json()
    assert (found["ssd_blocks"], found["dram_blocks"]) == (464, 69)
    assert found["hits"] == found["hits_dram"] + found["hits_ssd"] <= found["optimum"]
    text = run_command("replay", SMALL, "--ssd", "2GiB", "--block-size", "4MiB").text
    assert "512 on disk" in text
    two = ["--policy", "lru", "--policy", "fifo", "--count-to", "99", "--optimum"]
    table = run_command("replay", SMALL, "--sweep", *two).text.splitlines()
    assert table[0].split() == ["blocks", "on", "disk", "lru", "fifo", "optimum"]
    assert len(table) == 7


@pytest.mark.parametrize(
    "words",
    [
        ["--ssd", "2GiB"],
        ["--ssd", "200%"],
        ["--ssd", "0%"],
        ["--policy", "best"],
        ["--policy", "lru", "--policy", "fifo"],
        ["--plot", "x.png"],
    ],
)
def test_the_command_refuses_what_makes_no_sense(words: list[str]) -> None:
    assert run_command("replay", SMALL, *words).code == 2

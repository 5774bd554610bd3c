"""Settling events into rows: rule by rule, and against replay one event at a time."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.events import NONE, RECORD, Kind, Records, blank
from kvstore.settle import MAX_DEPTH, Settled, settle
from tests.journal_samples import (
    NAMESPACE,
    OTHER_NAMESPACE,
    event,
    joined,
    opening,
    touch,
)
from tests.replay_model import replay


def put(row: int, generation: int, key: bytes = b"", **fields: int) -> Records:
    return event(Kind.PUT, row, generation=generation, key=key or bytes([row]), **fields)  # type: ignore[arg-type]


def begin(row: int, generation: int, key: bytes = b"", **fields: int) -> Records:
    return event(Kind.BEGIN, row, generation=generation, key=key or bytes([row]), **fields)  # type: ignore[arg-type]


def free(row: int, generation: int) -> Records:
    return event(Kind.FREE, row, generation=generation)


def ghost(row: int, **fields: int) -> Records:
    return event(Kind.GHOST, row, key=bytes([row]), **fields)  # type: ignore[arg-type]


def pin(row: int, until: int) -> Records:
    return event(Kind.PIN, row, last_use=until)


def live(settled: Settled) -> dict[int, int]:
    rows = settled.rows[settled.rows["kind"] == Kind.PUT]
    return dict(zip(rows["row"].tolist(), rows["generation"].tolist(), strict=True))


def ghosts(settled: Settled) -> list[int]:
    found: list[int] = settled.rows["row"][settled.rows["kind"] == Kind.GHOST].tolist()
    return found


def parents(settled: Settled) -> dict[int, int]:
    rows = settled.rows
    linked = rows[rows["parent"] != NONE]
    return dict(zip(linked["row"].tolist(), linked["parent"].tolist(), strict=True))


def leftovers(settled: Settled) -> list[int]:
    found: list[int] = settled.leftovers["generation"].tolist()
    return found


# -- rule by rule ---------------------------------------------------------------------------------


def test_nothing_settles_to_nothing() -> None:
    settled = settle(blank(0, Kind.PUT))
    assert len(settled.rows) == len(settled.leftovers) == 0
    assert (settled.pins, settled.synced, settled.max_generation, settled.max_stamp) == (
        {},
        0,
        0,
        0,
    )
    assert live(settle(joined(opening(), event(Kind.CLOSE), free(4, 4), touch([4], 1)))) == {}


def test_a_put_is_live_until_a_free_of_its_generation() -> None:
    assert live(settle(put(3, 10))) == {3: 10}
    assert live(settle(joined(put(3, 10), free(3, 9)))) == {3: 10}
    assert live(settle(joined(free(3, 10), put(3, 10)))) == {3: 10}
    settled = settle(joined(put(3, 10), free(3, 10), free(3, 10)))
    assert live(settled) == {}
    assert leftovers(settled) == [10]


def test_a_late_free_of_the_old_version_does_not_hit_the_new_one() -> None:
    settled = settle(joined(put(3, 10), put(3, 11), free(3, 10)))
    assert live(settled) == {3: 11}
    assert leftovers(settled) == [10]


def test_begun_versions_are_left_over_until_they_are_put() -> None:
    settled = settle(joined(begin(1, 5), begin(2, 6), put(2, 6)))
    assert live(settled) == {2: 6}
    assert leftovers(settled) == [5]


def test_an_overwrite_that_was_only_begun_leaves_the_old_version() -> None:
    settled = settle(joined(put(1, 5, place=50), begin(1, 6)))
    assert live(settled) == {1: 5}
    assert settled.rows["place"].tolist() == [50]
    assert leftovers(settled) == [6]


def test_a_free_that_names_its_key_is_left_over_without_any_put() -> None:
    settled = settle(event(Kind.FREE, 1, generation=5, key=b"k", place=9))
    assert leftovers(settled) == [5]
    assert settled.leftovers["place"].tolist() == [9]
    assert leftovers(settle(free(1, 5))) == []


def test_the_leftover_that_knows_the_place_is_given() -> None:
    events = [begin(1, 5), put(1, 5, place=7), event(Kind.LEFTOVER, 1, generation=5, key=b"\1")]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        settled = settle(joined(*(events[number] for number in order), free(1, 5)))
        assert settled.leftovers["place"].tolist() == [7]
        assert settled.leftovers["kind"].tolist() == [Kind.PUT]


def test_a_leftover_of_another_row_id_is_never_a_live_version() -> None:
    stray = event(Kind.LEFTOVER, 8, generation=5, key=b"\1")
    settled = settle(joined(stray, put(1, 5)))
    assert live(settled) == {1: 5}
    assert leftovers(settled) == []


def test_a_freed_row_stays_as_a_ghost_while_a_live_row_descends_from_it() -> None:
    chain = joined(put(1, 1, last_use=9), put(2, 2, parent=1), put(3, 3, parent=2))
    settled = settle(joined(chain, free(1, 1), free(2, 2)))
    assert (live(settled), ghosts(settled)) == ({3: 3}, [1, 2])
    assert parents(settled) == {2: 1, 3: 2}
    for name in ("length", "place", "generation"):
        assert settled.rows[name][:2].tolist() == [0, 0]
    assert settled.rows["key"][0][0] == 1
    settled = settle(joined(chain, free(1, 1), free(2, 2), free(3, 3)))
    assert len(settled.rows) == 0
    assert leftovers(settled) == [1, 2, 3]


def test_ghosts_without_live_descendants_are_gone() -> None:
    settled = settle(joined(ghost(1), ghost(2, parent=1), begin(3, 3, parent=2)))
    assert len(settled.rows) == 0


def test_a_ghost_turns_real_and_keeps_its_children() -> None:
    settled = settle(joined(ghost(1), put(2, 2, parent=1), put(1, 3)))
    assert (live(settled), parents(settled)) == ({1: 3, 2: 2}, {2: 1})


def test_a_parent_whose_put_failed_stays_as_a_ghost() -> None:
    # One batch: the child's put went well, the parent's did not, and a kill came before more.
    settled = settle(joined(begin(1, 1), begin(2, 2, parent=1), put(2, 2, parent=1)))
    assert (live(settled), ghosts(settled), parents(settled)) == ({2: 2}, [1], {2: 1})
    assert settled.rows["key"][0][0] == 1
    assert leftovers(settled) == [1]


def test_a_parent_nobody_knows_is_dropped() -> None:
    assert parents(settle(put(2, 2, parent=1))) == {}
    assert parents(settle(put(2, 2, parent=NONE - 1))) == {}


@pytest.mark.parametrize("other", [{"shard": 1}, {"namespace": OTHER_NAMESPACE}])
def test_a_parent_of_another_space_is_dropped(other: dict[str, object]) -> None:
    stranger = event(Kind.PUT, 1, generation=1, key=b"\1", **other)  # type: ignore[arg-type]
    assert parents(settle(joined(stranger, put(2, 2, parent=1)))) == {}


def test_of_two_rows_of_one_identity_the_higher_generation_wins() -> None:
    old = joined(put(1, 4, b"same"), put(3, 6, parent=1))
    for events in (joined(old, put(2, 5, b"same")), joined(put(2, 5, b"same"), old)):
        settled = settle(events)
        assert live(settled) == {2: 5, 3: 6}
        assert parents(settled) == {3: 2}
        assert leftovers(settled) == [4]


@pytest.mark.parametrize("other", [{"shard": 1}, {"namespace": OTHER_NAMESPACE}, {"key": b"samf"}])
def test_rows_that_differ_in_one_part_of_the_identity_are_two(other: dict[str, object]) -> None:
    fields = {"generation": 5, "key": b"same"} | other
    settled = settle(joined(put(1, 4, b"same"), event(Kind.PUT, 2, **fields)))  # type: ignore[arg-type]
    assert live(settled) == {1: 4, 2: 5}


def test_a_ghost_gives_way_to_a_live_row_of_its_identity() -> None:
    same = event(Kind.GHOST, 1, key=b"same")
    settled = settle(joined(same, put(3, 3, parent=1), put(2, 2, b"same")))
    assert (live(settled), ghosts(settled), parents(settled)) == ({2: 2, 3: 3}, [], {3: 2})


def test_the_last_use_is_the_latest_stamp() -> None:
    settled = settle(joined(put(1, 1, last_use=10), put(2, 2, last_use=11), touch([1, 7, 2], 20)))
    assert settled.rows["last_use"].tolist() == [20, 22]
    # A row captured late carries a stamp whose TOUCH was never written.
    settled = settle(joined(put(1, 1, last_use=99), put(1, 1, last_use=10), touch([1], 20)))
    assert settled.rows["last_use"].tolist() == [99]
    assert settled.max_stamp == 99


def test_a_touch_that_claims_too_many_rows_is_read_to_its_end() -> None:
    long = touch(list(range(20)), 100)
    long["length"] = 2**32 - 1
    settled = settle(joined(put(19, 1), long))
    assert settled.rows["last_use"].tolist() == [119]
    assert settled.max_stamp == 119


def test_pins_belong_to_the_version_that_was_pinned() -> None:
    assert settle(joined(put(1, 1), pin(1, 70))).pins == {1: 70}
    assert settle(joined(put(1, 1), pin(1, 70), pin(1, 80))).pins == {1: 80}
    assert settle(joined(put(1, 1), pin(1, 70), pin(1, 0))).pins == {}
    assert settle(joined(pin(1, 70), put(1, 1))).pins == {}
    assert settle(joined(put(1, 1), pin(1, 70), free(1, 1), put(1, 2))).pins == {}
    assert settle(joined(put(1, 1), pin(1, 70), put(1, 2), free(1, 1))).pins == {1: 70}
    assert settle(joined(put(1, 1), pin(1, 70), ghost(1), put(1, 2))).pins == {}
    assert settle(joined(put(1, 1), pin(1, 70), free(1, 1))).pins == {}
    assert settle(joined(put(1, 1), pin(5, 70))).pins == {}


def test_a_deadline_is_no_stamp_and_no_generation_is_overlooked() -> None:
    settled = settle(joined(put(1, 3, last_use=5), pin(1, 10**18), event(Kind.SYNC, generation=2)))
    assert (settled.max_stamp, settled.synced, settled.max_generation) == (5, 2, 3)
    for record in (
        opening(generation=50),
        event(Kind.SYNC, generation=50),
        begin(2, 50),
        free(2, 50),
    ):
        assert settle(joined(put(1, 3), record)).max_generation == 50
    assert settle(joined(put(1, 1), touch([9, 9, 9], 30))).max_stamp == 32


def test_events_that_make_no_sense_are_ignored() -> None:
    nameless, endless = put(1, 1), put(2, 2)
    nameless["key_length"], endless["key_length"] = 0, 65
    rowless, unknown = put(3, 3), put(4, 4)
    rowless["row"], unknown["kind"] = NONE, 77
    settled = settle(joined(nameless, endless, rowless, unknown, put(5, 5)))
    assert live(settled) == {5: 5}
    assert leftovers(settled) == []


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_cycles_are_cut(length: int) -> None:
    ring = [put(row, row + 1, parent=(row + 1) % length) for row in range(length)]
    tail = [put(100, 100, parent=0), put(101, 101, parent=100)]
    settled = settle(joined(*ring, *tail))
    assert len(live(settled)) == length + 2
    assert parents(settled) == {100: 0, 101: 100}


def test_chains_are_cut_at_the_deepest_link_allowed() -> None:
    events = blank(MAX_DEPTH + 10, Kind.PUT)
    events["row"] = np.arange(len(events))
    events["parent"][1:] = np.arange(len(events) - 1)
    events["generation"] = np.arange(1, len(events) + 1)
    events["key_length"] = 4
    events["key"][:, :4] = np.arange(len(events), dtype="<u4").view(np.uint8).reshape(-1, 4)
    events["namespace"] = np.frombuffer(NAMESPACE, np.uint8)
    cut = set(range(1, len(events))) - set(parents(settle(events)))
    assert cut == {MAX_DEPTH + 1}
    assert set(range(1, MAX_DEPTH + 1)) == set(parents(settle(events[: MAX_DEPTH + 1])))


def test_row_ids_may_be_few_and_far_apart() -> None:
    far = NONE - 1
    settled = settle(
        joined(
            put(far, 1, b"far"), event(Kind.PUT, 7, generation=2, key=b"k", parent=far),
            touch([far, 12], 50), pin(far, 9), free(1000, 3), free(7, 1),
        )
    )  # fmt: skip
    assert live(settled) == {7: 2, far: 1}
    assert parents(settled) == {7: far}
    assert settled.rows["last_use"].tolist() == [0, 50]
    assert settled.pins == {far: 9}


def test_rows_come_by_ascending_id_and_the_events_stay_as_they_are() -> None:
    events = joined(put(9, 1), put(2, 2, parent=9), ghost(5), put(3, 3, parent=5), touch([9], 4))
    before = events.tobytes()
    settled = settle(events)
    assert settled.rows["row"].tolist() == [2, 3, 5, 9]
    assert events.tobytes() == before


# -- against replay one event at a time -----------------------------------------------------------


def compare(settled: Settled, events: Records) -> None:
    expected = replay(events)
    rows = settled.rows
    assert rows["row"].tolist() == list(expected.rows)
    assert live(settled) == {number: row.generation for number, row in expected.live.items()}
    for number, found in zip(rows["row"].tolist(), rows, strict=True):
        row = expected.rows[number]
        key = bytes(found["key"])[: found["key_length"]]
        assert (bytes(found["namespace"]), int(found["shard"]), key) == row.identity
        assert int(found["parent"]) == row.parent
        assert (int(found["length"]), int(found["place"])) == (
            (row.length, row.place) if row.generation is not None else (0, 0)
        )
        if row.generation is not None:
            assert int(found["last_use"]) == expected.uses[number]
    assert set(leftovers(settled)) == expected.leftovers
    assert len(leftovers(settled)) == len(expected.leftovers)
    assert settled.pins == expected.pins
    assert settled.synced == expected.synced
    assert settled.max_generation == expected.max_generation
    assert settled.max_stamp == expected.max_stamp


def random_events(chance: random.Random, count: int, rows: int, spread: int) -> Records:
    """Return events of all kinds in no sensible order; a generation always means one row."""
    made = []
    for stamp in range(1, count + 1):
        generation = chance.randrange(1, 3 * rows)
        row = generation % rows * spread
        kind = chance.choice([*Kind][1:])
        if kind is Kind.TOUCH:
            made.append(touch([chance.randrange(rows) * spread for _ in range(3)], 10 * stamp))
            continue
        made.append(
            event(
                kind,
                row,
                generation=generation,
                key=bytes([chance.randrange(rows)]) if chance.random() < 0.9 else b"",
                parent=chance.choice([NONE, chance.randrange(rows) * spread]),
                length=generation,
                place=generation * 7,
                last_use=10 * stamp if kind is not Kind.PIN or chance.random() < 0.7 else 0,
                shard=chance.choice([0, 0, 0, 1]),
                namespace=chance.choice([NAMESPACE, NAMESPACE, OTHER_NAMESPACE]),
            )
        )
    return joined(*made)


@pytest.mark.parametrize("seed", range(150))
def test_events_in_any_order_settle_as_they_replay(seed: int) -> None:
    chance = random.Random(seed)
    events = random_events(
        chance, chance.choice([3, 30, 200]), chance.choice([2, 6, 20]), chance.choice([1, 10_000])
    )
    compare(settle(events), events)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=128 * 12), rows=st.integers(1, 4))
def test_arbitrary_bytes_as_events_never_raise(data: bytes, rows: int) -> None:
    events = np.frombuffer(data[: len(data) // 128 * 128], RECORD).copy()
    events["kind"] %= 13
    events["row"] %= rows
    events["parent"] %= rows + 1
    events["key_length"] %= 70
    settled = settle(events)
    assert set(leftovers(settled)).isdisjoint(live(settled).values())


# -- speed ----------------------------------------------------------------------------------------


def test_two_hundred_thousand_events_take_no_loop() -> None:
    count = 100_000
    events = blank(2 * count, Kind.BEGIN)
    events["kind"][count:] = Kind.PUT
    events["row"] = np.tile(np.arange(count), 2)
    events["generation"] = events["row"] + np.uint64(1)
    events["key_length"] = 36
    events["key"][:, :36] = np.tile(
        np.random.default_rng(1).integers(0, 256, (count, 36), np.uint8), (2, 1)
    )
    events["parent"] = np.where(events["row"] % 256 == 0, NONE, events["row"] - 1)
    best = 9.9
    for _ in range(3):
        start = time.perf_counter()
        settled = settle(events)
        best = min(best, time.perf_counter() - start)
    assert len(settled.rows) == count
    assert len(settled.leftovers) == 0
    # About 0.04 s on a quiet machine; a Python loop over the events would take over a second.
    assert best < 0.5

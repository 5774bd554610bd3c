"""How much may be written, how much must go: pure arithmetic."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.space import Space, Usage, check_capacity, default_floor, quarantine_limit

MIB = 1 << 20
GIB = 1 << 30


def usage(
    live: int, *, coming: int = 0, going: int = 0, overhead: int = 0, free: int = 100 * GIB
) -> Usage:
    return Usage(live, coming, going, overhead, free)


def space(
    capacity: int = 100 * MIB, *, factor: float = 1.0, floor: int = 0, frees: bool = True
) -> Space:
    return Space(capacity, factor, floor, frees_space=frees)


def test_capacity_has_a_minimum() -> None:
    assert check_capacity(64 * MIB) == 64 * MIB
    with pytest.raises(ConfigError, match="64MiB"):
        check_capacity(64 * MIB - 1)


@pytest.mark.parametrize(
    ("filesystem", "floor"),
    [
        (2 * GIB, 2 * GIB // 10),
        (100 * GIB, 10 * GIB),
        (150 * GIB, 10 * GIB),
        (1000 * GIB, 50 * GIB),
    ],
)
def test_the_floor_is_five_percent_at_least_ten_gib_at_most_ten_percent(
    filesystem: int, floor: int
) -> None:
    assert default_floor(filesystem) == floor


@pytest.mark.parametrize(
    ("capacity", "limit"),
    [(100 * MIB, 5 * MIB), (2 * GIB, 64 * MIB), (100 * GIB, GIB)],
)
def test_quarantine_has_a_share(capacity: int, limit: int) -> None:
    assert quarantine_limit(capacity) == limit


def test_nothing_leaves_below_the_high_watermark() -> None:
    assert space().to_evict(usage(90 * MIB), 5 * MIB) == 0


def test_a_put_above_the_high_watermark_takes_the_place_of_as_much() -> None:
    assert space().to_evict(usage(95 * MIB), MIB) == MIB


def test_room_is_made_down_to_the_low_watermark() -> None:
    assert space().above_low(usage(95 * MIB)) == pytest.approx(3 * MIB, abs=8)
    assert space().above_low(usage(91 * MIB)) == 0


def test_a_store_above_its_capacity_does_not_grow() -> None:
    above = usage(200 * MIB)
    assert space().to_evict(above, MIB) == MIB
    assert space().allows(above, MIB, evicted=MIB)
    assert not space().allows(above, MIB, evicted=0)
    assert space().above_low(above) == pytest.approx(108 * MIB, abs=8)


def test_bytes_under_way_count_as_live() -> None:
    assert space().to_evict(usage(80 * MIB, coming=15 * MIB), MIB) > 0


def test_the_space_factor_of_the_engine_lowers_the_watermarks() -> None:
    assert space(factor=2.0).to_evict(usage(46 * MIB), MIB) == 0
    assert space(factor=2.0).to_evict(usage(47 * MIB), MIB) > 0


def test_overhead_beyond_the_margin_lowers_the_watermarks() -> None:
    assert space().high(overhead=5 * MIB) == 95 * MIB
    assert space().high(overhead=20 * MIB) == 80 * MIB


def test_a_put_is_refused_when_too_little_may_leave() -> None:
    limits = space()
    assert not limits.allows(usage(95 * MIB), MIB, evicted=0)
    assert limits.allows(usage(95 * MIB), MIB, evicted=MIB)


def test_a_record_over_a_quarter_of_the_capacity_does_not_fit() -> None:
    assert space().fits(25 * MIB)
    assert not space().fits(25 * MIB + 1)


def test_at_the_floor_blocks_go_into_recycled_space_only() -> None:
    limits = space(floor=10 * MIB)
    low = usage(50 * MIB, free=9 * MIB)
    limits.observe(low)
    assert limits.at_floor
    assert limits.to_evict(low, MIB) == MIB
    assert limits.allows(low, MIB, evicted=MIB)
    assert not limits.allows(low, MIB, evicted=MIB - 1)


def test_a_put_that_would_break_the_floor_reaches_it() -> None:
    limits = space(floor=10 * MIB)
    assert limits.to_evict(usage(50 * MIB, free=10 * MIB + 10), 4096) == 4096


def test_the_floor_takes_at_most_half_of_what_was_held() -> None:
    limits = space(floor=100 * MIB)
    limits.observe(usage(50 * MIB, free=0))
    assert limits.floor_surplus(usage(50 * MIB, free=0)) == 25 * MIB
    assert limits.floor_surplus(usage(26 * MIB, free=0)) == MIB
    assert limits.floor_surplus(usage(25 * MIB, free=0)) == 0
    assert limits.to_evict(usage(25 * MIB, free=0), MIB) == MIB, "recycling shrinks nothing"
    assert not limits.allows(usage(25 * MIB, free=0), MIB, evicted=0)


def test_the_floor_never_takes_a_tenth_of_the_capacity() -> None:
    limits = space(floor=100 * MIB)
    limits.observe(usage(12 * MIB, free=0))
    assert limits.floor_surplus(usage(12 * MIB, free=0)) == 2 * MIB


def test_eviction_for_the_floor_stops_when_it_frees_nothing() -> None:
    limits = space(floor=100 * MIB)
    limits.observe(usage(50 * MIB, free=0))
    limits.gave_nothing()
    assert limits.floor_surplus(usage(50 * MIB, free=0)) == 0
    limits.observe(usage(50 * MIB, free=GIB))
    limits.observe(usage(50 * MIB, free=0))
    assert limits.floor_surplus(usage(50 * MIB, free=0)) > 0


def test_an_engine_that_frees_nothing_is_not_evicted_for_the_floor() -> None:
    limits = space(floor=100 * MIB, frees=False)
    limits.observe(usage(50 * MIB, free=0))
    assert limits.floor_surplus(usage(50 * MIB, free=0)) == 0


def test_somebody_who_goes_on_filling_the_disk_does_not_halve_the_store_again() -> None:
    limits = space(floor=20 * MIB)
    limits.observe(usage(50 * MIB, free=0))
    limits.gave(20 * MIB)
    limits.observe(usage(30 * MIB, free=20 * MIB))
    assert not limits.at_floor
    limits.observe(usage(30 * MIB, free=0))
    assert limits.floor_surplus(usage(30 * MIB, free=0)) == 5 * MIB


def test_room_made_by_others_ends_the_account() -> None:
    limits = space(floor=20 * MIB)
    limits.observe(usage(50 * MIB, free=0))
    limits.gave(20 * MIB)
    limits.observe(usage(30 * MIB, free=40 * MIB))
    limits.observe(usage(30 * MIB, free=0))
    assert limits.floor_surplus(usage(30 * MIB, free=0)) == 15 * MIB


def test_leaving_the_floor_lets_the_store_grow_again() -> None:
    limits = space(floor=10 * MIB)
    limits.observe(usage(50 * MIB, free=0))
    limits.observe(usage(50 * MIB, free=GIB))
    assert not limits.at_floor
    assert limits.to_evict(usage(50 * MIB, free=GIB), MIB) == 0


def test_bytes_on_their_way_out_are_not_evicted_for_twice() -> None:
    limits = space(floor=10 * MIB)
    limits.observe(usage(50 * MIB, free=4 * MIB))
    assert limits.floor_surplus(usage(44 * MIB, going=6 * MIB, free=4 * MIB)) == 0


def test_what_cannot_be_deleted_counts_and_nothing_is_evicted_for_it() -> None:
    stuck = Usage(60 * MIB, 0, 0, 0, 100 * GIB, stuck=36 * MIB)
    assert not space().allows(stuck, MIB, evicted=MIB)
    assert space().above_low(stuck) == 0
    assert space().allows(Usage(50 * MIB, 0, 0, 0, 100 * GIB, stuck=36 * MIB), MIB, evicted=0)


def test_a_disk_that_somebody_else_fills_to_the_last_byte_keeps_half() -> None:
    limits = space(floor=10 * MIB)
    limits.observe(usage(50 * MIB, free=0))
    assert limits.allows(usage(50 * MIB, free=0), MIB, evicted=MIB)
    assert not limits.allows(usage(25 * MIB, free=0), MIB, evicted=MIB)
    assert limits.allows(usage(25 * MIB, free=9 * MIB), MIB, evicted=MIB), "room to write first"


def slotted(capacity: int = 100 * MIB, floor: int = 0) -> Space:
    return Space(capacity, 1.0, floor, frees_space=False, fixed_slots=True)


def test_with_fixed_slots_some_of_them_stay_free() -> None:
    """What slots and their files lose counts as overhead; of the rest 5 % is kept."""
    found = slotted()
    assert found.high(20 * MIB) == int(80 * MIB * 0.95)
    assert found.low(20 * MIB) == int(found.high(20 * MIB) * 0.92 / 0.95)
    usage = Usage(live=75 * MIB, coming=0, going=0, overhead=20 * MIB, free=1 << 40)
    assert found.to_evict(usage, MIB) == 0
    assert found.to_evict(usage, 2 * MIB) == MIB


def test_with_fixed_slots_the_floor_stops_files_not_puts() -> None:
    found = slotted(floor=50 * MIB)
    usage = Usage(live=10 * MIB, coming=0, going=0, overhead=MIB, free=0)
    found.observe(usage)
    assert found.at_floor
    assert found.to_evict(usage, MIB) == 0
    assert found.allows(usage, MIB, 0)
    assert found.floor_surplus(usage) == 0


@pytest.mark.parametrize(
    ("other", "free", "files", "limit"),
    [
        (MIB, 1 << 40, 0, 98 * MIB),
        (10 * MIB, 1 << 40, 0, 90 * MIB),
        (MIB, 60 * MIB, 30 * MIB, 40 * MIB),
        (MIB, 10 * MIB, 30 * MIB, 30 * MIB),
        (MIB, 10 * MIB, 200 * MIB, 98 * MIB),
    ],
)
def test_how_many_bytes_files_made_ahead_may_take(
    other: int, free: int, files: int, limit: int
) -> None:
    assert slotted(floor=50 * MIB).for_files(other, free, files) == limit

"""The client's shared memory: how it is made, leased and given up."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import subprocess

import pytest

from kvstore.errors import Busy
from kvstore.regions import MAX_ABANDONED, PAGE, Extent, Region, Regions, Witness

MIB = 1 << 20


def leased(regions: Regions, nbytes: int = PAGE) -> Extent:
    extent = regions.lease(nbytes)
    assert extent is not None
    return extent


def lose(regions: Regions) -> Extent:
    """Give an extent back whose request was never answered."""
    extent = leased(regions)
    extent.begin()
    regions.release(extent)
    return extent


def test_a_region_can_be_neither_shrunk_nor_grown() -> None:
    region = Region(8 * PAGE)
    assert os.fstat(region.fd).st_size == 8 * PAGE
    assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for size in (PAGE, 9 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)


def test_a_region_has_its_pages_from_the_start() -> None:
    region = Region(4 * MIB)
    assert os.fstat(region.fd).st_blocks * 512 == 4 * MIB


def test_what_is_written_is_seen_through_the_descriptor() -> None:
    region = Region(2 * PAGE)
    region.view[PAGE : PAGE + 5] = b"block"
    assert os.pread(region.fd, 5, PAGE) == b"block"


@pytest.mark.parametrize("nbytes", [0, -PAGE, PAGE + 1, 257 * MIB])
def test_a_region_of_an_impossible_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="region"):
        Region(nbytes)


def test_a_region_gives_its_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Region(PAGE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_extents_are_pages_that_never_overlap() -> None:
    regions = Regions(64 * PAGE, 64 * PAGE)
    chance = random.Random(1)
    held: list[Extent] = []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            regions.release(held.pop(chance.randrange(len(held))))
            continue
        wanted = chance.randrange(1, 9 * PAGE)
        extent = regions.lease(wanted)
        if extent is not None:
            assert extent.offset % PAGE == 0
            assert len(extent.view) == extent.nbytes == -(-wanted // PAGE) * PAGE
            held.append(extent)
        runs = sorted((e.offset, e.offset + e.nbytes) for e in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs))
        assert not runs or runs[-1][1] <= 64 * PAGE
    for extent in held:
        regions.release(extent)
    assert leased(regions, 64 * PAGE).offset == 0, "what was given back did not become one again"


def test_no_more_than_the_limit_is_shared() -> None:
    regions = Regions(16 * PAGE, 32 * PAGE)
    first, second = leased(regions, 16 * PAGE), leased(regions, 9 * PAGE)
    assert first.region is not second.region
    assert regions.lease(8 * PAGE) is None
    assert leased(regions, 7 * PAGE).region is second.region


def test_idle_regions_make_room_for_a_larger_one() -> None:
    regions = Regions(16 * PAGE, 32 * PAGE)
    small = leased(regions)
    regions.release(small)
    assert leased(regions, 20 * PAGE).nbytes == 20 * PAGE
    assert regions.dropped() == [small.region]
    assert regions.dropped() == []


def test_giving_back_twice_frees_once() -> None:
    regions = Regions(4 * PAGE, 4 * PAGE)
    extent = leased(regions, 4 * PAGE)
    regions.release(extent)
    again = leased(regions, 4 * PAGE)
    regions.release(extent)
    assert regions.lease(PAGE) is None
    regions.release(again)


def test_memory_of_an_unanswered_request_is_never_leased_again() -> None:
    regions = Regions(16 * PAGE, 64 * PAGE)
    other = leased(regions)
    lost = lose(regions)
    assert lost.region is other.region
    assert regions.abandoned == 1
    later = [leased(regions) for _ in range(16)]
    assert all(extent.region is not lost.region for extent in later)
    regions.release(other)
    assert leased(regions, 16 * PAGE).region is not lost.region


def test_an_answer_that_comes_late_ends_the_loss_but_not_the_ban() -> None:
    regions = Regions(16 * PAGE, 64 * PAGE)
    lost = lose(regions)
    lost.end()
    assert not regions.exhausted()
    assert regions.abandoned == 0
    assert regions.dropped() == [lost.region]
    assert leased(regions).region is not lost.region


def test_a_loss_lasts_while_somebody_still_uses_the_region() -> None:
    regions = Regions(16 * PAGE, 64 * PAGE)
    other = leased(regions)
    lost = lose(regions)
    lost.end()
    regions.sweep()
    assert regions.abandoned == 1
    regions.release(other)
    regions.sweep()
    assert regions.abandoned == 0


def test_two_requests_on_one_extent_must_both_be_answered() -> None:
    regions = Regions(16 * PAGE, 64 * PAGE)
    extent = leased(regions)
    extent.begin()
    extent.begin()
    extent.end()
    regions.release(extent)
    assert regions.abandoned == 1


def test_after_four_losses_nothing_is_shared_until_the_daemon_has_ended() -> None:
    daemon = subprocess.Popen(["sleep", "600"])
    try:
        regions = Regions(16 * PAGE, 64 * PAGE)
        witness = Witness(os.pidfd_open(daemon.pid))
        for number in range(MAX_ABANDONED):
            assert not regions.exhausted(), number
            lose(regions).region.witness = witness
        assert MAX_ABANDONED == 4
        assert regions.exhausted()
        with pytest.raises(Busy):
            regions.lease(PAGE)
    finally:
        daemon.kill()
        daemon.wait()
    assert leased(regions)
    assert regions.abandoned == 0


def test_without_a_pidfd_the_end_of_the_daemon_is_never_certain() -> None:
    regions = Regions(16 * PAGE, 64 * PAGE)
    for _ in range(MAX_ABANDONED):
        lose(regions)
    assert regions.exhausted()

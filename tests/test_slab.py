"""The slab: alignment, huge pages, all or nothing, and that no two extents overlap."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import pages
from kvstore.errors import Busy, ConfigError, UsageError
from kvstore.pages import HUGE_PAGE, PAGE
from kvstore.slab import Extent, Slab


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def huge_pages_allowed() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def test_extents_are_aligned_and_rounded_up() -> None:
    slab = Slab(8 << 20)
    extents = slab.allocate([1, PAGE, PAGE + 1, 3 << 20])
    assert [extent.length for extent in extents] == [PAGE, PAGE, 2 * PAGE, 3 << 20]
    assert [len(extent.view) for extent in extents] == [extent.length for extent in extents]
    assert all(address(extent.view) % PAGE == 0 for extent in extents)
    assert address(extents[0].view) % HUGE_PAGE == 0
    assert not extents[0].view.readonly


def test_the_slab_lies_in_huge_pages() -> None:
    if not huge_pages_allowed():
        pytest.skip("this kernel has no transparent huge pages")
    slab = Slab(64 << 20)
    assert slab.huge_bytes < slab.capacity
    (extent,) = slab.allocate([slab.capacity])
    np.frombuffer(extent.view, np.uint8)[:] = 1
    # The kernel may be short of huge pages, but hardly for all of it.
    assert slab.huge_bytes >= slab.capacity // 2


def test_the_slab_works_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("mmap.mmap", Refusing)
    (extent,) = Slab(1 << 20).allocate([1 << 20])
    extent.view[-1] = 7
    assert address(extent.view) % PAGE == 0


def test_a_mapping_that_does_not_begin_at_a_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pages._map

    def crooked(capacity: int) -> memoryview:
        return memoryview(real(capacity + HUGE_PAGE))[3 * PAGE :]

    monkeypatch.setattr("kvstore.pages._map", crooked)
    slab = Slab(4 << 20)
    (extent,) = slab.allocate([4 << 20])
    assert address(extent.view) % HUGE_PAGE == 0
    extent.view[-1] = 1


def test_all_or_nothing() -> None:
    slab = Slab(10 * PAGE)
    kept = slab.allocate([6 * PAGE])
    with pytest.raises(Busy):
        slab.allocate([PAGE, 2 * PAGE, 2 * PAGE])
    assert slab.free_bytes == 4 * PAGE
    slab.release(slab.allocate([4 * PAGE]))
    slab.release(kept)
    assert [extent.offset for extent in slab.allocate([10 * PAGE])] == [0]


def test_the_lowest_memory_is_used_again() -> None:
    slab = Slab(10 * PAGE)
    first, _second = slab.allocate([PAGE, PAGE])
    slab.release([first])
    assert slab.allocate([PAGE])[0].offset == first.offset


@pytest.mark.parametrize("sizes", [[0], [PAGE, -1], [11 * PAGE], [6 * PAGE, 5 * PAGE]])
def test_sizes_that_can_never_be_had_are_mistakes(sizes: list[int]) -> None:
    slab = Slab(10 * PAGE)
    with pytest.raises(UsageError):
        slab.allocate(sizes)
    assert slab.free_bytes == slab.capacity


def test_no_sizes_no_extents() -> None:
    assert Slab(PAGE).allocate([]) == []


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_slab_has_memory(capacity: int) -> None:
    with pytest.raises(UsageError):
        Slab(capacity)


def test_more_than_the_machine_can_map_is_refused_with_a_message() -> None:
    with pytest.raises(ConfigError, match="cannot be mapped"):
        Slab(1 << 62)


def test_releasing_twice_is_noticed() -> None:
    slab = Slab(10 * PAGE)
    one, two, three = slab.allocate([PAGE, 2 * PAGE, PAGE])
    slab.release([two])
    for extent in (two, one._replace(length=2 * PAGE), three._replace(offset=two.offset + PAGE)):
        with pytest.raises(ValueError, match="free already"):
            slab.release([extent])
    slab.release([one, three])
    assert slab.allocate([10 * PAGE])[0].offset == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE)), max_size=60))
def test_extents_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    slab = Slab(64 * PAGE)
    held: list[Extent] = []
    for give, size in steps:
        if give and held:
            slab.release([held.pop(size % len(held))])
        else:
            try:
                held += slab.allocate([size])
            except Busy:
                needed = -(-size // PAGE) * PAGE
                assert slab.free_bytes < needed or len(slab._lengths) > 1
        used = np.zeros(64, int)
        for extent in held:
            used[extent.offset // PAGE : (extent.offset + extent.length) // PAGE] += 1
        assert used.max(initial=0) <= 1
        assert slab.free_bytes == int((used == 0).sum()) * PAGE
    slab.release(held)
    assert slab.allocate([slab.capacity])[0].offset == 0

"""A namespace with a quota takes no more, and pushes out nobody but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore import quota
from kvstore.answers import BlockStatus
from kvstore.errors import UnknownNamespace
from kvstore.index import GHOST, HIDDEN
from kvstore.keys import key_array, named
from kvstore.namespaces import Namespace, Namespaces
from kvstore.record import image_bytes, image_bytes_of
from tests.command import Daemon
from tests.stores import MIB, Local, block, key

SIZE = 60_000
IMAGE = image_bytes(SIZE)
OK, FULL, THERE = (
    int(one) for one in (BlockStatus.OK, BlockStatus.FULL, BlockStatus.ALREADY_PRESENT)
)


class Tenants(Local):
    """A store with the namespaces ``mine``, which has a quota of ten blocks, and ``other``."""

    def __init__(self, path: Path, **changes: object) -> None:
        super().__init__(path, **changes)
        self.mine = self.core.namespaces.open(named("mine"), create=True)
        self.other = self.core.namespaces.open(named("other"), create=True)

    def limit(self, blocks: int) -> None:
        self.core.namespaces.set_quota(self.mine, blocks * IMAGE)

    def fill(self, namespace: Namespace, numbers: Sequence[int]) -> list[int]:
        """Put block by block: the first becomes the oldest."""
        return [self.put_all(namespace, [number])[0] for number in numbers]

    def put_all(self, namespace: Namespace, numbers: Sequence[int], **how: object) -> list[int]:
        """Put all at once: the first becomes the newest."""
        self.namespace = namespace
        blocks = [block(number, SIZE) for number in numbers]
        return self.put([key(number) for number in numbers], blocks, **how)  # type: ignore[arg-type]

    def held(self, namespace: Namespace, numbers: Sequence[int]) -> list[int]:
        mask = self.store.contains(namespace, 0, key_array([key(number) for number in numbers]))
        return [number for number, there in zip(numbers, mask, strict=True) if there]

    def check(self) -> None:
        """Compare the running sums with the rows."""
        index = self.core.index
        rows = index.rows_of(None)
        rows = rows[(index.flags[rows] & (GHOST | HIDDEN)) == 0]
        for namespace in self.core.namespaces.all():
            own = rows[index.spaces[rows] >> 16 == namespace.number]
            taken = int(image_bytes_of(index.sizes[own]).sum())
            assert index.shares.of(namespace.number) == taken
        assert index.shares.of(self.mine.number) <= (self.mine.quota or 1 << 62)


@pytest.fixture(autouse=True)
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no more leave than needed, so that tests can say who stays."""
    monkeypatch.setattr(quota, "MOST_SLACK", 0)


@pytest.fixture(params=["filesystem", "superblock", "sqlite"])
def tenants(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tenants]:
    found = Tenants(tmp_path / "store", engine=request.param)
    found.limit(10)
    yield found
    found.check()
    found.store.close()


def test_a_put_beyond_it_pushes_out_the_oldest_of_its_own(tenants: Tenants) -> None:
    assert tenants.fill(tenants.other, range(100, 130)) == [OK] * 30
    for number in range(25):
        assert tenants.fill(tenants.mine, [number]) == [OK]
        tenants.check()
    assert tenants.held(tenants.mine, range(25)) == list(range(15, 25))
    assert tenants.held(tenants.other, range(100, 130)) == list(range(100, 130))
    assert tenants.core.counters.evictions == 15
    assert tenants.get([key(24), key(0)]) == [block(24, SIZE), None]


def test_what_was_used_stays(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(10))
    tenants.store.touch(tenants.mine, 0, key_array([key(0), key(1)]))
    assert tenants.fill(tenants.mine, [10, 11]) == [OK, OK]
    assert tenants.held(tenants.mine, range(12)) == [0, 1, *range(4, 12)]


def test_chains_lose_their_ends_first(tenants: Tenants) -> None:
    tenants.put_all(tenants.mine, range(10), chain=True)
    assert tenants.fill(tenants.mine, range(10, 13)) == [OK] * 3
    assert tenants.held(tenants.mine, range(13)) == [*range(7), 10, 11, 12]


def test_the_first_blocks_of_a_put_that_is_too_large_come_in(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(5))
    found = tenants.put_all(tenants.mine, range(20, 34), chain=True)
    assert found == [OK] * 10 + [FULL] * 4
    assert tenants.held(tenants.mine, range(40)) == list(range(20, 30))


def test_what_is_held_makes_it_full_for_this_namespace_only(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(10))
    tenants.store.pin(tenants.mine, 0, key_array([key(number) for number in range(10)]), 600)
    assert tenants.fill(tenants.mine, [10]) == [FULL]
    assert tenants.fill(tenants.mine, [3]) == [THERE]
    assert tenants.fill(tenants.other, [10]) == [OK]
    tenants.store.unpin(tenants.mine, 0, key_array([key(4)]))
    assert tenants.fill(tenants.mine, [10]) == [OK]
    assert tenants.held(tenants.mine, range(11)) == [0, 1, 2, 3, *range(5, 11)]


def test_a_put_does_not_push_out_what_it_names(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(10))
    found = tenants.put_all(tenants.mine, [0, 10, 1, 11, 10])
    assert found == [THERE, OK, THERE, OK, THERE]
    assert tenants.held(tenants.mine, range(12)) == [0, 1, *range(4, 12)]
    assert tenants.put_all(tenants.mine, [12], parent=key(4)) == [OK]
    assert tenants.held(tenants.mine, range(13)) == [0, 1, 4, *range(6, 13)]


def test_a_ghost_that_leaves_with_its_child_is_put_all_the_same(tenants: Tenants) -> None:
    """Two copies of its key in one put: its row is gone before the second is looked at."""
    assert tenants.put_all(tenants.mine, [1], parent=key(0)) == [OK]
    tenants.fill(tenants.mine, range(2, 11))
    assert tenants.put_all(tenants.mine, [0, 0]) == [OK, THERE]
    assert tenants.held(tenants.mine, range(11)) == [0, *range(2, 11)]
    tenants.tick()


def test_overwriting_counts_once(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(9))
    job = tenants.begin_put([key(3)], [block(99, 2 * SIZE)], overwrite=True)
    tenants.store.run(job)
    assert tenants.core.index.shares.of(tenants.mine.number) <= 10 * IMAGE
    assert tenants.get([key(3)]) == [block(99, 2 * SIZE)]


def test_with_nothing_evicted_it_is_full(tenants: Tenants) -> None:
    tenants.core.may_evict = False
    tenants.fill(tenants.mine, range(10))
    assert tenants.fill(tenants.mine, [10]) == [FULL]
    assert tenants.held(tenants.mine, range(11)) == list(range(10))


def test_a_lower_one_is_reached_by_itself(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(10))
    tenants.limit(4)
    tenants.tick()
    assert tenants.held(tenants.mine, range(10)) == [6, 7, 8, 9]
    tenants.core.namespaces.set_quota(tenants.mine, None)
    assert tenants.fill(tenants.mine, range(20, 60)) == [OK] * 40


def test_a_part_leaves_ahead(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that not every put looks at all rows."""
    monkeypatch.setattr(quota, "MOST_SLACK", 64 * MIB)
    monkeypatch.setattr(quota, "SLACK_SHARE", 4)
    tenants.fill(tenants.mine, range(11))
    assert tenants.held(tenants.mine, range(11)) == list(range(4, 11))


def test_deleting_makes_room(tenants: Tenants) -> None:
    tenants.fill(tenants.mine, range(10))
    tenants.delete([key(number) for number in range(5, 10)])
    assert tenants.fill(tenants.mine, range(20, 25)) == [OK] * 5
    assert tenants.held(tenants.mine, range(25)) == [0, 1, 2, 3, 4, *range(20, 25)]


def test_one_for_all_who_have_none(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path / "store", namespace_quota=5 * IMAGE)
    tenants.limit(10)
    for number in range(12):
        tenants.fill(tenants.mine, [number])
        tenants.fill(tenants.other, [number])
    assert tenants.held(tenants.mine, range(12)) == list(range(2, 12))
    assert tenants.held(tenants.other, range(12)) == list(range(7, 12))
    tenants.stop()


@pytest.mark.parametrize("kill", [False, True])
def test_it_holds_after_the_next_opening(tmp_path: Path, kill: bool) -> None:
    tenants = Tenants(tmp_path / "store")
    tenants.limit(10)
    tenants.fill(tenants.mine, range(8))
    (tenants.kill if kill else tenants.stop)()
    again = Tenants(tmp_path / "store", capacity=None)
    again.check()
    assert again.mine.quota == 10 * IMAGE
    assert again.fill(again.mine, range(20, 25)) == [OK] * 5
    assert again.held(again.mine, range(25)) == [*range(3, 8), *range(20, 25)]
    again.stop()


def test_it_survives_a_change_of_key_length_and_not_a_damaged_file(tmp_path: Path) -> None:
    found = Namespaces(tmp_path)
    found.load()
    mine = found.open(named("mine"), create=True)
    found.set_quota(mine, 7)
    found.set_key_length(mine, 32)
    again = Namespaces(tmp_path)
    again.load()
    assert [one.quota for one in again if one.record == named("mine")] == [7]
    lost = again.known(bytes(16))
    with pytest.raises(UnknownNamespace, match="damaged or gone"):
        again.set_quota(lost, 7)


def test_a_small_namespace_in_a_large_store_is_in_the_right_order(tmp_path: Path) -> None:
    """The policy of the whole store must not forget about others while it serves one."""
    tenants = Tenants(tmp_path / "store")
    tenants.limit(10)
    order = np.random.default_rng(3).permutation(200)
    for number in order.tolist():
        tenants.fill(tenants.mine if number % 4 == 0 else tenants.other, [number])
    mine = [number for number in order.tolist() if number % 4 == 0]
    assert sorted(tenants.held(tenants.mine, mine)) == sorted(mine[-10:])
    others = [number for number in order.tolist() if number % 4]
    assert tenants.held(tenants.other, others) == others
    removal = tenants.store.evict(3 * IMAGE)
    tenants.store.run(removal)
    oldest = [number for number in order.tolist() if number % 4 or number in mine[-10:]][:3]
    gone = {n for n in others if n not in tenants.held(tenants.other, others)}
    gone |= {n for n in mine[-10:] if n not in tenants.held(tenants.mine, mine)}
    assert gone == set(oldest)
    tenants.stop()


def test_the_command(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        daemon.start("--namespace-quota", "1GiB")
        assert (
            daemon.run(
                "put", "00", "-i", "-", "--namespace", "x", "--create-namespace", stdin=b"x"
            ).code
            == 0
        )
        assert "1 GiB at most, by namespace_quota" in daemon.run("quota", "x").text
        assert "64 MiB at most, its own quota" in daemon.run("quota", "x", "64MiB").text
        told = daemon.run("inspect", "--namespaces", "--json").json()["namespaces"]
        assert isinstance(told, list)
        assert [one["quota_bytes"] for one in told if one["record"] == named("x")] == [64 * MIB]
        assert daemon.run("quota", "none-such").code == 4
        assert daemon.run("quota", "x", "64MB").code == 2
        assert daemon.stop() == 0
        daemon.start()
        assert daemon.run("quota", "x", "--json").json()["quota_bytes"] == 64 * MIB
        assert daemon.run("quota", "x", "0").code == 0
        assert daemon.run("put", "01", "-i", "-", "--namespace", "x", stdin=b"x").code == 14
        assert "no quota" in daemon.run("quota", "x", "none").text
        assert daemon.run("put", "01", "-i", "-", "--namespace", "x", stdin=b"x").code == 0
    finally:
        daemon.stop()

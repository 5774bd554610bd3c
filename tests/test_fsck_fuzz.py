"""Random damage anywhere in a store: fsck never fails, repairs end clean, no wrong byte comes back.

The seed is in the name of the test; ``PROMISES=long`` tries many more.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import fsck, mend, rebuild, salvage
from kvstore.fsck import PAYLOADS, Check, Options
from tests.damage_matrix import lost_blocks, make_store, repair
from tests.here import Here
from tests.store_damages import ENGINES

SEEDS = range(200 if os.environ.get("PROMISES") == "long" else 6)
PAGE = 4096


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    made = {engine: folder / engine for engine in ENGINES}
    for engine, path in made.items():
        make_store(path, engine)
    return made


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _fill(path: Path, rng: random.Random) -> None:
    """Overwrite a page, or less, with zeros or noise."""
    data = bytearray(path.read_bytes())
    size = rng.choice((16, 512, PAGE))
    start = rng.randrange(0, max(1, len(data) - size), rng.choice((1, 8, 512)))
    size = min(size, len(data) - start)
    data[start : start + size] = rng.choice((bytes(size), rng.randbytes(size)))
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _grow(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 100, PAGE))))


def _lose(path: Path, _: random.Random) -> None:
    path.unlink()


def _rename(path: Path, rng: random.Random) -> None:
    path.rename(path.with_name(f"{path.name}{rng.choice(('.bak', '~', '.new'))}"))


def _swap(path: Path, rng: random.Random) -> None:
    other = rng.choice([one for one in path.parent.iterdir() if one.is_file()])
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def _replace(path: Path, rng: random.Random) -> None:
    path.unlink()
    rng.choice((os.mkdir, os.mkfifo, lambda p: os.symlink("/etc/hostname", p)))(path)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    _flip, _flip, _flip, _fill, _fill, _cut, _grow, _lose, _rename, _swap, _replace,
)  # fmt: skip


def spoil(path: Path, rng: random.Random) -> list[str]:
    """Do one to three damages to files of a store; return what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)
        chosen, damage = rng.choice(files), rng.choice(DAMAGES)
        damage(chosen, rng)
        done.append(f"{damage.__name__} {chosen.relative_to(path)}")
    return done


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_random_damage(
    engine: str,
    seed: int,
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if engine != "lmdb":
        monkeypatch.setattr(fsck, "Child", Here)
        monkeypatch.setattr(mend, "Child", Here)
    path = Path(shutil.copytree(stores[engine], tmp_path / "store"))
    print(spoil(path, random.Random(f"{engine} {seed}")))
    report = Check(path, Options(depth=PAYLOADS)).run()
    if report.to_do:
        report, _ = repair(path, report)
    if any(one.id == "store-file" for one in report.found):
        with salvage.survey(path) as found:
            rebuild.in_place(found)
        report = Check(path, Options(depth=PAYLOADS)).run()
        if report.to_do:
            report, _ = repair(path, report)
    assert report.faults == []
    print("lost", lost_blocks(path))

"""The damage matrix: what fsck and its repair make of each kind of damage, for each engine.

``python -m tests.damage_matrix [--here] [ENGINE]...`` makes the table anew (``--here``: without
children, ten times as fast); ``tests/damage_matrix.md`` is what it was
when somebody last looked at it, and ``tests/test_damage_matrix.py`` compares. ``make matrix``
prints it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore import fsck, mend, rebuild, salvage
from kvstore.errors import KVStoreError
from kvstore.findings import Severity
from kvstore.fsck import PAYLOADS, Check, Options, Report
from tests.here import Here
from tests.store_damages import BLOCKS, DAMAGES, ENGINES, SIZE, NotApplicable, Scene
from tests.stores import Local, block, key

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# The damage matrix

Each damage is done to a store of 20 blocks, which `kvstore fsck --verify-data=100% --repair -y` is
run on. *found*: ids of findings, those that are no fault in brackets. *exit*: of a check before and
after the repair. *lost*: blocks of the 20 that are misses afterwards; all others come back byte for
byte. *kept*: files in quarantine. Made by `python -m tests.damage_matrix`.
"""


@dataclass(frozen=True)
class Outcome:
    """One cell of the matrix."""

    found: str
    exit: str = ""
    lost: str = ""
    kept: str = ""

    @property
    def columns(self) -> tuple[str, str, str, str]:
        return self.found, self.exit, self.lost, self.kept


def make_store(path: Path, engine: str) -> None:
    """Make the store that all damages begin with."""
    local = Local(path, engine=engine)
    names = [key(number) for number in range(BLOCKS)]
    local.put(names, [block(number, SIZE) for number in range(BLOCKS)], chain=True)
    local.stop()


def cell(path: Path, damage: str) -> Outcome:
    """Do a damage to the store at ``path``, check, repair, check, and look at every block."""
    scene = Scene(path)
    try:
        DAMAGES[damage](scene)
    except NotApplicable as reason:
        return Outcome(f"n/a: {reason}")
    try:
        first = Check(path, Options(depth=PAYLOADS)).run()
    except KVStoreError as error:
        return Outcome(type(error).__name__, str(error.exit_code))
    last, kept = first, 0
    if first.to_do:
        last, kept = repair(path, first)
    codes = f"{code(first)} -> {code(last)}"
    if any(one.id == "store-file" for one in last.faults):
        codes = f"{code(first)}, recover -> {recover(path)}"
    return Outcome(names_of(first), codes, str(lost_blocks(path)), str(kept))


def recover(path: Path) -> int:
    """Do what the check said that helps; return the exit code of the next one."""
    with salvage.survey(path) as found:
        rebuild.in_place(found)
    return code(Check(path, Options(depth=PAYLOADS)).run())


def repair(path: Path, first: Report) -> tuple[Report, int]:
    """Return the last check, and how many files went to quarantine."""
    folder, options = mend.new_folder(path, None), Options(depth=PAYLOADS)

    def again() -> Report:
        return Check(path, options.after(first)).run()

    last = mend.until_done(first, again, folder, 60.0, mend.Done())
    assert Check(path, options).run().faults == last.faults
    kept = [item for item in folder.glob("*") if item.name != "manifest.jsonl"]
    return last, len(kept)


def lost_blocks(path: Path) -> int:
    """Return how many blocks are misses; none may have other bytes than were put."""
    local = Local(path)
    try:
        found = local.get([key(number) for number in range(BLOCKS)])
    finally:
        local.kill()
    for number, value in enumerate(found):
        assert value in (None, block(number, SIZE)), f"WRONG BYTES in block {number}"
    return found.count(None)


def code(report: Report) -> int:
    return 5 if report.faults else 0


def names_of(report: Report) -> str:
    names = sorted({(one.severity == Severity.NOTE, one.id) for one in report.found})
    return ", ".join(f"({name})" if note else name for note, name in names) or "nothing"


# -- the page -------------------------------------------------------------------------------------


def lines(outcomes: dict[tuple[str, str], Outcome]) -> Iterator[str]:
    yield HEAD
    yield "| damage | engine | found | exit | lost | kept |"
    yield "|---|---|---|---|---|---|"
    for (damage, engine), outcome in outcomes.items():
        yield f"| {damage} | {engine} | " + " | ".join(outcome.columns) + " |"


def read_page() -> dict[tuple[str, str], Outcome]:
    """Return the committed table."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [word.strip() for word in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 6 and cells[1] in ENGINES:
            found[cells[0], cells[1]] = Outcome(*cells[2:])
    return found


def main(engines: list[str]) -> None:
    """Make the table anew, with real children."""
    outcomes = read_page() if PAGE.exists() else {}
    if "--here" in engines:
        engines.remove("--here")
        fsck.Child = mend.Child = Here  # type: ignore[assignment,attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines or ENGINES:
            original = Path(folder) / engine
            make_store(original, engine)
            for damage in DAMAGES:
                path = Path(folder) / "store"
                shutil.copytree(original, path)
                try:
                    outcomes[damage, engine] = cell(path, damage)
                except Exception as error:
                    traceback.print_exc()
                    outcomes[damage, engine] = Outcome(f"FAILED: {error}"[:200])
                print(damage, engine, *outcomes[damage, engine].columns, sep=" | ", flush=True)
                (path / "namespaces").chmod(0o700)
                shutil.rmtree(path)
    order = {(damage, engine): n for n, (damage, engine) in enumerate(
        (damage, engine) for damage in DAMAGES for engine in ENGINES)}  # fmt: skip
    PAGE.write_text(
        "\n".join(lines(dict(sorted(outcomes.items(), key=lambda x: order[x[0]])))) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

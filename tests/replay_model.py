"""Replay as docs/formats.md describes it, event by event: what the array version must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.events import NONE, TOUCH_ROWS, Kind, Records, touched_rows

Identity = tuple[bytes, int, bytes]


@dataclass
class Row:
    """What is known of a row: its identity and link, and its live version if it has one."""

    identity: Identity
    parent: int
    generation: int | None = None
    length: int = 0
    place: int = 0
    begun: tuple[Identity, int] | None = None


@dataclass
class Outcome:
    rows: dict[int, Row] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    synced: int = 0
    max_generation: int = 0
    max_stamp: int = 0

    @property
    def live(self) -> dict[int, Row]:
        return {number: row for number, row in self.rows.items() if row.generation is not None}

    @property
    def leftovers(self) -> set[int]:
        return self.versions - {row.generation for row in self.live.values() if row.generation}


def replay(events: Records) -> Outcome:
    """Apply all events, then drop what no live row needs."""
    outcome = Outcome()
    for position in range(len(events)):
        _apply(outcome, events[position : position + 1])
    _unite(outcome)
    _drop(outcome)
    _cut(outcome)
    return outcome


def _apply(outcome: Outcome, event: Records) -> None:
    kind, number = Kind(int(event["kind"][0])), int(event["row"][0])
    generation, stamp = int(event["generation"][0]), int(event["last_use"][0])
    length = int(event["key_length"][0])
    row = outcome.rows.get(number)
    if kind in (Kind.BEGIN, Kind.PUT, Kind.GHOST, Kind.LEFTOVER) and (number == NONE or not length):
        return
    if kind is Kind.TOUCH:
        for place, used in enumerate(touched_rows(event)[0][: min(event["length"][0], TOUCH_ROWS)]):
            outcome.uses[int(used)] = max(outcome.uses.get(int(used), 0), stamp + place)
            outcome.max_stamp = max(outcome.max_stamp, stamp + place)
        return
    if kind in (Kind.BEGIN, Kind.PUT, Kind.FREE, Kind.LEFTOVER):
        outcome.max_generation = max(outcome.max_generation, generation)
        if length:
            outcome.versions.add(generation)
    if kind in (Kind.BEGIN, Kind.PUT, Kind.FREE, Kind.LEFTOVER, Kind.GHOST):
        outcome.max_stamp = max(outcome.max_stamp, stamp)
    if kind in (Kind.SYNC, Kind.OPEN):
        outcome.max_generation = max(outcome.max_generation, generation)
        outcome.synced = max(outcome.synced, generation if kind is Kind.SYNC else 0)
    elif kind is Kind.PIN:
        if row and row.generation is not None and stamp:
            outcome.pins[number] = stamp
        else:
            outcome.pins.pop(number, None)
    elif kind is Kind.FREE and row and row.generation == generation:
        row.generation = None
        row.identity, row.parent = row.begun or (row.identity, row.parent)
        outcome.pins.pop(number, None)
    elif kind is Kind.BEGIN and (row is None or row.generation is None):
        outcome.rows[number] = Row(*_named(event))
    elif kind is Kind.BEGIN and row:
        row.begun = _named(event)
    elif kind is Kind.PUT:
        outcome.rows[number] = Row(
            *_named(event), generation, int(event["length"][0]), int(event["place"][0])
        )
        outcome.uses[number] = max(outcome.uses.get(number, 0), stamp)
    elif kind is Kind.GHOST:
        outcome.rows[number] = Row(*_named(event))
        outcome.pins.pop(number, None)
        outcome.uses[number] = max(outcome.uses.get(number, 0), stamp)


def _named(event: Records) -> tuple[Identity, int]:
    key = event["key"][0][: event["key_length"][0]].tobytes()
    identity = event["namespace"][0].tobytes(), int(event["shard"][0]), key
    return identity, int(event["parent"][0])


def _needed(outcome: Outcome) -> set[int]:
    """Return live rows and all their ancestors."""
    needed = set()
    for start in outcome.live:
        number: int = start
        while number in outcome.rows and number not in needed:
            needed.add(number)
            number = outcome.rows[number].parent
    return needed


def _unite(outcome: Outcome) -> None:
    """Keep one row of each identity: live before ghost, then the higher generation."""
    best: dict[Identity, int] = {}
    needed = _needed(outcome)
    ranked = sorted((outcome.rows[number].generation or 0, number) for number in needed)
    for _, number in ranked:
        best[outcome.rows[number].identity] = number
    heirs = {number: best[outcome.rows[number].identity] for number in needed}
    for number, heir in heirs.items():
        if number != heir:
            del outcome.rows[number]
            outcome.pins.pop(number, None)
    for row in outcome.rows.values():
        row.parent = heirs.get(row.parent, row.parent)


def _drop(outcome: Outcome) -> None:
    needed = _needed(outcome)
    outcome.rows = {number: outcome.rows[number] for number in sorted(needed)}
    for row in outcome.rows.values():
        parent = outcome.rows.get(row.parent)
        if parent is None or parent.identity[:2] != row.identity[:2]:
            row.parent = NONE


def _cut(outcome: Outcome) -> None:
    """Give every row that is its own ancestor no parent."""
    cyclic = set()
    for start in outcome.rows:
        number = outcome.rows[start].parent
        seen = set()
        while number != NONE and number not in seen and number != start:
            seen.add(number)
            number = outcome.rows[number].parent
        if number == start:
            cyclic.add(start)
    for number in cyclic:
        outcome.rows[number].parent = NONE

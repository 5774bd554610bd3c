"""Traces made up: sessions that begin at random times and grow turn by turn.

``chat``: many short sessions, most of one or two turns, behind one of a few system prompts, with
minutes of thought between the turns. ``agents``: few long sessions that send all they have again
every few seconds, each behind a long prompt of its own, and now and then a branch from an earlier
turn. ``mixed``: both. The same seed gives the same trace.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 512
_SYSTEM_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class Habit:
    """How one kind of session goes. Medians of tokens and seconds; ``spread`` is the sigma of
    their logarithm. ``turns``: the mean; ``every``: seconds between two sessions on average."""

    prompt: int
    growth: int
    answer: int
    pause: float
    spread: float
    turns: float
    every: float
    shared: bool
    branches: float


HABITS = {
    "chat": Habit(2500, 900, 400, 75.0, 0.9, 2.6, 1.2, True, 0.03),
    "agents": Habit(24_000, 1800, 250, 14.0, 0.8, 55.0, 90.0, False, 0.04),
}
KINDS = ("chat", "agents", "mixed")


@dataclass(order=True)
class _Session:
    """A session and when its next request comes; ``tokens`` grow, and so do its blocks' ids."""

    next: float
    number: int
    habit: Habit = field(compare=False)
    tokens: int = field(compare=False)
    ids: list[int] = field(compare=False)
    turns: int = field(compare=False)


class Generator:
    """Makes requests in time order, without end: ``lines`` cuts them off."""

    def __init__(self, kind: str, seed: int) -> None:
        if kind not in KINDS:
            raise UsageError(f"there is no kind of trace {kind!r}", f"use {', '.join(KINDS)}")
        self._random = random.Random(seed)
        self._habits = [HABITS[name] for name in HABITS if kind in (name, "mixed")]
        self._last_id = 0
        self._prompts = [self._new_ids(self._random.randint(1, 6)) for _ in range(_SYSTEM_PROMPTS)]
        self._sessions: list[_Session] = []
        self._number = 0

    def lines(self, requests: int) -> Iterator[str]:
        """Yield so many requests as JSON lines in the form of Mooncake."""
        for habit in self._habits:
            self._begin(habit, self._random.expovariate(1 / habit.every))
        for _ in range(requests):
            session = self._sessions[0]
            answer = max(1, int(self._about(session.habit.answer, session.habit.spread)))
            yield json.dumps(
                {
                    "timestamp": int(session.next * 1000),
                    "input_length": session.tokens,
                    "output_length": answer,
                    "hash_ids": self._path(session),
                    "block_tokens": TOKENS,
                }
            )
            self._go_on(session, answer)

    def _about(self, median: float, spread: float) -> float:
        return median * self._random.lognormvariate(0.0, spread)

    def _new_ids(self, count: int) -> list[int]:
        self._last_id += count
        return list(range(self._last_id - count, self._last_id))

    def _path(self, session: _Session) -> list[int]:
        """Return the blocks of a prompt: full ones are the session's, the rest is new each time."""
        full, rest = divmod(session.tokens, TOKENS)
        session.ids += self._new_ids(full - len(session.ids))
        return session.ids[:full] + self._new_ids(1 if rest else 0)

    def _begin(self, habit: Habit, start: float) -> None:
        """Add a session; when its first request has been made, the next one is added."""
        chosen = self._prompts[int(self._random.paretovariate(0.8)) % _SYSTEM_PROMPTS]
        ids = list(chosen) if habit.shared else []
        tokens = len(ids) * TOKENS + max(1, int(self._about(habit.prompt, habit.spread)))
        turns = 1 + int(self._random.expovariate(1 / habit.turns))
        self._number += 1
        heapq.heappush(self._sessions, _Session(start, self._number, habit, tokens, ids, -turns))

    def _go_on(self, session: _Session, answer: int) -> None:
        habit, now = session.habit, session.next
        heapq.heappop(self._sessions)
        if session.turns < 0:
            session.turns = -session.turns
            self._begin(habit, now + self._random.expovariate(1 / habit.every))
        session.turns -= 1
        if not session.turns:
            return
        session.next = now + self._about(habit.pause, habit.spread)
        session.tokens += answer + int(self._about(habit.growth, habit.spread))
        if self._random.random() < habit.branches:
            kept = self._random.randint(len(session.ids) // 2, len(session.ids))
            session.ids = session.ids[:kept]
        heapq.heappush(self._sessions, session)

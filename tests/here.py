"""Children that are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore import isolate, mend


class Here:
    """Does in this process what :class:`kvstore.isolate.Child` has done by a process of its own: in
    a tenth of the time, and where a test can see it."""

    def __init__(self, _: str, *, module: str = isolate.MODULE, limit: float = 0.0) -> None:
        self._tasks = mend.TASKS if module == mend.MODULE else isolate.TASKS

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        isolate._OPENED.close()

    def ask(
        self, task: str, document: Mapping[str, Any], arrays: Sequence[isolate.Array] = ()
    ) -> Iterator[isolate.Answer]:
        for answer, columns in self._tasks[task](dict(document), list(arrays)):
            yield isolate.Answer(answer, list(columns))

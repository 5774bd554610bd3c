"""What tests let other processes do with an engine.

They start from a server process that has this module loaded already: new ones, each without a trace
of what another did, in a tenth of the time.
"""

from __future__ import annotations

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kvstore.testing.records import (
    Identity,
    delete,
    key_of,
    make_blocks,
    put,
    reopen,
    scanned,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from kvstore.backends.base import Blocks, Engine, EngineContext

_RECORD_BYTES = 200_000
_KEYS = 50
_ENOUGH = 60
_FRESH = multiprocessing.get_context("forkserver")
_FRESH.set_forkserver_preload([__name__])


class Visit(NamedTuple):
    """What another process has put, and everything that it found after that."""

    put: Blocks
    found: dict[Identity, int]


def visit_elsewhere(engine: Engine, held: Sequence[Blocks], fresh: Blocks) -> Visit:
    """Let a new process open the engine, which is closed here, find ``held`` and put ``fresh``."""
    with ProcessPoolExecutor(1, _FRESH) as pool:
        return pool.submit(_visit, type(engine), engine.context, held, fresh).result()


def _visit(
    engine_class: type[Engine], context: EngineContext, held: Sequence[Blocks], fresh: Blocks
) -> Visit:
    engine = engine_class(context)
    try:
        reopen(engine, *held)
        return Visit(put(engine, fresh), scanned(engine))
    finally:
        engine.close()


def writes() -> Iterator[int]:
    """Yield what :func:`killed_writer` does: a generation is put, minus a generation deleted; of
    three, one stays."""
    for generation in itertools.count(1):
        yield generation
        if generation % 3 != 1:
            yield 1 - generation


def killed_writer(engine: Engine) -> int:
    """Let a process write as :func:`writes` says and kill it in the middle; return how many steps
    it acknowledged. The next one may have been under way."""
    here, there = _FRESH.Pipe(duplex=False)
    process = _FRESH.Process(target=_write_for_ever, args=(type(engine), engine.context, there))
    process.start()
    there.close()
    for _ in range(_ENOUGH):
        here.recv()
    process.kill()
    process.join()
    acknowledged = _ENOUGH
    try:
        while True:
            here.recv()
            acknowledged += 1
    except EOFError:
        here.close()
        return acknowledged


def written(generation: int) -> Blocks:
    """Return the block that the writer puts as a generation, without its place."""
    return make_blocks([key_of(generation % _KEYS)], _RECORD_BYTES, generation)


def _write_for_ever(
    engine_class: type[Engine], context: EngineContext, acknowledged: Connection
) -> None:
    engine = engine_class(context)
    engine.open()
    blocks: dict[int, Blocks] = {}
    for step in writes():
        if step > 0:
            blocks[step] = put(engine, written(step))
        else:
            assert delete(engine, blocks.pop(-step)) == 1
        acknowledged.send(None)

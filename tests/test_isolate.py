"""Engines in a child: answers as in this process; its death and its silence are errors here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore import isolate, verify
from kvstore.backends import engine_class
from kvstore.backends.base import Engine, EngineContext
from kvstore.errors import EngineDied, EngineError, EngineHung, StoreNotFound, UsageError
from kvstore.isolate import Array, Child, Document, Inspection
from kvstore.testing.records import make_blocks, put
from tests.mounts import read_only

STORE = bytes(range(16))


def run_tasks() -> None:
    """What the children of these tests do: ``python -m tests.test_isolate`` is one."""

    def answer(document: Document, arrays: list[Array]) -> Iterator[tuple[Document, list[Array]]]:
        doing = document["doing"]
        if doing == "die":
            os.kill(os.getpid(), signal.SIGBUS)
        if doing == "hang":
            time.sleep(60)
        if doing == "refuse":
            raise UsageError("not so", "otherwise")
        if doing == "break":
            raise ZeroDivisionError("oh")
        if doing == "end":
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            os._exit(7)
        yield {"pid": os.getpid(), "open": os.listdir("/proc/self/fd")}, [a * 2 for a in arrays]

    isolate.serve({"task": answer})


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    root = Path(__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", str(root))
    return Child("the subject", module="tests.test_isolate", limit=20)


def test_arrays_go_there_and_come_back(child: Child) -> None:
    arrays: list[Array] = [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 64), np.uint8)]
    with child:
        for _ in range(2):
            (found,) = child.ask("task", {"doing": "double"}, arrays)
            assert found.document["pid"] != os.getpid()
            assert found.arrays[0].tolist() == [[0, 2, 4], [6, 8, 10]]
            assert found.arrays[1].shape == (0, 64)


def test_a_child_gets_no_descriptor_of_ours(child: Child, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        with child:
            (found,) = child.ask("task", {"doing": "tell"})
    # Three standard ones, the socket, and the folder that is being listed.
    assert len(found.document["open"]) == 5


def test_its_death_is_an_error_that_names_the_signal(child: Child) -> None:
    with child, pytest.raises(EngineDied, match="the subject ended by SIGBUS"):
        list(child.ask("task", {"doing": "die"}))


def test_its_end_is_told_with_its_last_words(child: Child) -> None:
    with child, pytest.raises(EngineDied, match=r"code 7 \(last words\)"):
        list(child.ask("task", {"doing": "end"}))


def test_its_silence_is_an_error_and_it_is_killed(child: Child) -> None:
    with child:
        (found,) = child.ask("task", {"doing": "tell"})
        child._limit = 0.5
        with pytest.raises(EngineHung, match=r"within 0\.5 seconds"):
            list(child.ask("task", {"doing": "hang"}))
    assert not Path(f"/proc/{found.document['pid']}").exists()


def test_errors_of_a_task_are_raised_here_and_it_goes_on(child: Child) -> None:
    with child:
        with pytest.raises(UsageError, match="not so"):
            list(child.ask("task", {"doing": "refuse"}))
        with pytest.raises(EngineError, match="internal error: ZeroDivisionError: oh"):
            list(child.ask("task", {"doing": "break"}))
        assert len(list(child.ask("task", {"doing": "tell"}))) == 1


def test_it_dies_with_its_parent(child: Child) -> None:
    """A parent that is killed in the middle leaves nobody behind who holds the engine."""
    program = (
        "import os, sys, threading; from kvstore.isolate import Child\n"
        "child = Child('x', module='tests.test_isolate'); child.__enter__()\n"
        "(found,) = child.ask('task', {'doing': 'tell'})\n"
        "print(found.document['pid'], flush=True)\n"
        "list(child.ask('task', {'doing': 'hang'}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("name", ["filesystem", "superblock", "lmdb", "leveldb", "sqlite"])
def test_an_engine_looks_the_same_from_a_child(name: str, tmp_path: Path) -> None:
    options = {"superblock_bytes": 4 << 20} if name == "superblock" else {}
    context = EngineContext(tmp_path, STORE, options, capacity=64 << 20)
    engine = engine_class(name)(context)
    engine.create()
    engine.open()
    blocks = put(engine, make_blocks([b"%032d" % n for n in range(5)], 5000, 7))
    engine.flush()
    engine.close()
    read_only = EngineContext(tmp_path, STORE, options, read_only=True, capacity=64 << 20)
    with Child(name) as child:
        inspection = Inspection(child, name, read_only)
        assert inspection.check() == []
        (found,) = inspection.scan()
        assert sorted(found.generations.tolist()) == sorted(blocks.generations.tolist())
        assert found.strange == ()
        (verdicts,) = inspection.verify(blocks)
        assert verdicts.kinds.tolist() == [verify.Kind.OK] * 5
        other = make_blocks([b"%032d" % 9], 5000, 99).at(blocks.places[:1])
        (verdicts,) = inspection.verify(other)
        assert verdicts.kinds[0] in (verify.Kind.MISSING, verify.Kind.STALE)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("name", ["filesystem", "superblock", "lmdb", "leveldb", "sqlite"])
def test_looking_leaves_no_trace(name: str, closed: bool, tmp_path: Path) -> None:
    """On a mount where nothing can be written, too; after a kill there is a log to read."""
    folder = tmp_path / "engine"
    folder.mkdir()
    options = {"superblock_bytes": 4 << 20} if name == "superblock" else {}
    context = EngineContext(folder, STORE, options, capacity=64 << 20)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        pool.submit(_write, name, context).result()
        if not closed:
            for process in pool._processes.values():
                process.kill()
        else:
            pool.submit(_stop).result()
    before = _state_of(folder)
    with read_only(folder) if os.geteuid() == 0 else nullcontext(folder) as seen:
        engine = engine_class(name)(replace(context, directory=seen, read_only=True))
        engine.open()
        assert sum(len(batch) for batch in engine.scan()) == 5
        assert engine.check() == []
        engine.close()
    assert _state_of(folder) == before


_WRITTEN: list[Engine] = []


def _write(name: str, context: EngineContext) -> None:
    engine = engine_class(name)(context)
    engine.create()
    engine.open()
    put(engine, make_blocks([b"%032d" % n for n in range(5)], 5000, 7))
    _WRITTEN.append(engine)


def _stop() -> None:
    _WRITTEN.pop().close()


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_an_engine_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with Child("it") as child, pytest.raises(StoreNotFound):
        Inspection(child, "filesystem", EngineContext(tmp_path, STORE)).check()


if __name__ == "__main__":
    run_tasks()

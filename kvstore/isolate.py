"""Engines looked at in a process of their own, because damage on disk may end whoever looks.

::

    parent                          child: python -P -m <module> <descriptor> <pid of the parent>
    Child.ask(task, ...)   ---->    TASKS[task](document, arrays)
    answers, one by one    <----    each (document, arrays) that it yields, then an end

Both sides talk through a socket. A frame is the length of its head (u32, little endian), the head
as JSON, and the bytes of the arrays that the head describes; nothing is ever unpickled. A child is
spawned, never forked, gets no descriptor but its end of the socket (so it holds no lock), and dies
with its parent. What it dies of, and an answer that does not come in time, are errors of the
parent: :class:`EngineDied` and :class:`EngineHung`.

Another module may be run in a child, too: it calls :func:`serve` with tasks of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import errors, verify
from kvstore.backends import BUILT_IN, engine_class
from kvstore.backends.base import Blocks, Engine, EngineContext, Finding, Scanned
from kvstore.errors import EngineDied, EngineError, EngineHung, KVStoreError

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.verify import Verdicts

Array = npt.NDArray[Any]
Document = dict[str, Any]
T = TypeVar("T")

LIMIT_SECONDS = 300.0
"""How long one answer may take: a scan answers every 4,096 records, a check once."""
MODULE = "kvstore.isolate"
_HEAD = struct.Struct("<I")
_MOST_BYTES = 1 << 30
_KINDS = "biufS"
_GOODBYE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_COLUMNS = [field.name for field in fields(Scanned)][:-1]


class Answer(NamedTuple):
    """Part of what a task answers."""

    document: Document
    arrays: list[Array]


Task = Callable[[Document, list[Array]], Iterator[tuple[Document, Sequence[Array]]]]
"""What a child does when it is asked."""


# -- the parent's side ----------------------------------------------------------------------------


class Child:
    """A process that performs tasks, as a context manager; ``subject`` names in errors what it
    looks at. ``limit``: seconds for one answer."""

    def __init__(self, subject: str, *, module: str = MODULE, limit: float = LIMIT_SECONDS) -> None:
        self._subject = subject
        self._module = module
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()
        numbers = [str(theirs.fileno()), str(os.getpid())]
        try:
            # -P: a folder called kvstore where the caller happens to stand is not ours.
            with _root_again():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, *numbers],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            ours.close()
            self._said.close()
            raise EngineError(f"no process can be started: {error.strerror}") from error
        finally:
            theirs.close()
        self._socket = ours
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._socket.close()
        if kind is not None:
            self._process.kill()
        try:
            # It ends by itself when nobody is left to ask; a library may have to close its files.
            self._process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def ask(
        self, task: str, document: Mapping[str, Any], arrays: Sequence[Array] = ()
    ) -> Iterator[Answer]:
        """Have a task performed and yield its answers, in order.

        Raises EngineDied, EngineHung, and the KVStoreError that the task raised.
        """
        self._within(lambda: send(self._socket, {"task": task, **document}, arrays))
        while True:
            found = self._within(lambda: receive(self._socket))
            if found is None:
                raise self._ended()
            if "error" in found.document:
                raise _error_of(found.document)
            if found.document.get("end"):
                return
            yield found

    def _within(self, act: Callable[[], T]) -> T:
        self._socket.settimeout(self._limit)
        try:
            return act()
        except TimeoutError:
            assert self._process is not None
            self._process.kill()
            raise EngineHung(
                f"{self._subject} did not answer within {self._limit:g} seconds",
                "look at the kernel log for errors of the device, or give it more time",
            ) from None
        except (OSError, ValueError):
            raise self._ended() from None

    def _ended(self) -> EngineDied:
        assert self._process is not None
        try:
            code = self._process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return EngineDied(
            f"the process that looked at {self._subject} ended by {_end_of(code)}"
            + _last_line(self._said),
            "run kvstore recover",
        )


def _end_of(code: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"itself with code {code}"
    return f"signal {-code}"


def _last_line(said: Any) -> str:  # noqa: ANN401
    """Return the last thing that a library or Python said before the end."""
    said.seek(0)
    lines = [line for line in said.read(1 << 16).decode(errors="replace").splitlines() if line]
    shown = "".join(c for c in lines[-1] if c.isprintable())[:200] if lines else ""
    return f" ({shown})" if shown else ""


def _error_of(document: Document) -> KVStoreError:
    found = getattr(errors, str(document["error"]), None)
    known = isinstance(found, type) and issubclass(found, KVStoreError)
    kind: type[KVStoreError] = found if known and found is not None else EngineError
    return kind(str(document["message"]), str(document["hint"]))


class Inspection:
    """An engine, looked at in a child that is there already."""

    def __init__(self, child: Child, name: str, context: EngineContext) -> None:
        self._child = child
        self._engine = {"engine": describe(name, context)}

    def check(self) -> list[Finding]:
        """Open the engine and look at its structure; return what is wrong."""
        (found,) = self._child.ask("check", self._engine)
        return _findings(found.document)

    def scan(self) -> Iterator[Scanned]:
        """Yield what :meth:`kvstore.backends.base.Engine.scan` yields."""
        for found in self._child.ask("scan", self._engine):
            columns: dict[str, Any] = dict(zip(_COLUMNS, found.arrays, strict=True))
            yield Scanned(**columns, strange=tuple(_findings(found.document)))

    def verify(self, blocks: Blocks) -> Iterator[Verdicts]:
        """Read records, all of them, and yield what they are, some at a time, in order."""
        document = {**self._engine, "namespace": blocks.namespace.hex(), "shard": blocks.shard}
        columns: list[Array] = [blocks.keys, blocks.lengths, blocks.generations, blocks.places]
        for found in self._child.ask("verify", document, columns):
            yield verify.Verdicts(found.arrays[0], found.document["reasons"])


def describe(name: str, context: EngineContext) -> Document:
    """Return an engine and its context as JSON."""
    told = asdict(context)
    return {**told, "name": name, "directory": str(context.directory.absolute()),
            "store_uuid": context.store_uuid.hex()}  # fmt: skip


def _findings(document: Document) -> list[Finding]:
    return [Finding(*one) for one in document["findings"]]


# -- a Python that the owner of the store cannot reach -----------------------------------------


def reachable(user: int, group: int) -> bool:
    """Tell whether a user can run our Python: whether each directory above it lets him pass."""
    for place in (sys.executable, sys.base_prefix, __file__):
        for folder in Path(place).resolve().parents:
            found = folder.stat()
            mine = 0o100 if found.st_uid == user else 0o010 if found.st_gid == group else 0o001
            if not found.st_mode & mine:
                return False
    return True


def load(*names: str) -> None:
    """Import modules and all engines, for when our files cannot be read any more."""
    for name in (*names, *BUILT_IN.values()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name.partition(":")[0])


@contextlib.contextmanager
def _root_again() -> Iterator[None]:
    """Be root for a moment, if that was put aside, to start a child from files of root."""
    real, effective, saved = os.getresuid()
    aside = saved == 0 and effective != 0
    if aside:
        os.seteuid(0)
    try:
        yield
    finally:
        if aside:
            os.seteuid(real)


def _leave_root() -> None:
    """In a child that was started so: be the owner of the store for good."""
    real, effective, _ = os.getresuid()
    if real and not effective:
        load()
        os.setresuid(real, real, real)


# -- the child's side -----------------------------------------------------------------------------


def serve(tasks: Mapping[str, Task]) -> None:
    """Perform tasks until nobody is left to ask: all that a child does."""
    number, parent = (int(word) for word in sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_root()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.getLogger().addHandler(logging.NullHandler())
    with socket.socket(fileno=number) as connection:
        # One that died before the line above was reached sends no signal any more.
        while os.getppid() == parent and (asked := receive(connection)) is not None:
            try:
                for document, arrays in tasks[asked.document["task"]](*asked):
                    send(connection, document, arrays)
            except KVStoreError as error:
                send(connection, _told(type(error).__name__, error.message, error.hint))
            except (BrokenPipeError, ConnectionError):
                return
            except Exception as error:
                text = f"internal error: {type(error).__name__}: {error}"
                send(connection, _told("EngineError", text, "this is a bug in kvstore: report it"))
            else:
                send(connection, {"end": True})


def _told(kind: str, message: str, hint: str) -> Document:
    return {"error": kind, "message": message, "hint": hint}


class Opened:
    """The engine that a child has open: it is opened once for all tasks."""

    def __init__(self) -> None:
        self._described: Document = {}
        self._engine: Engine | None = None

    def get(self, described: Document) -> Engine:
        if self._engine is None or described != self._described:
            self.close()
            engine = make(described)
            engine.open()
            self._engine, self._described = engine, described
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def make(described: Document) -> Engine:
    """Return the engine of a :func:`describe`, not open."""
    told = {**described, "directory": Path(described["directory"]),
            "store_uuid": bytes.fromhex(described["store_uuid"])}  # fmt: skip
    return engine_class(told.pop("name"))(EngineContext(**told))


_OPENED = Opened()


def _check(document: Document, _: list[Array]) -> Iterator[tuple[Document, Sequence[Array]]]:
    found = _OPENED.get(document["engine"]).check()
    yield {"findings": [[one.kind, one.path, one.detail] for one in found]}, []


def _scan(document: Document, _: list[Array]) -> Iterator[tuple[Document, Sequence[Array]]]:
    for batch in _OPENED.get(document["engine"]).scan():
        strange = [[one.kind, one.path, one.detail] for one in batch.strange]
        yield {"findings": strange}, [getattr(batch, name) for name in _COLUMNS]


def _verify(document: Document, arrays: list[Array]) -> Iterator[tuple[Document, Sequence[Array]]]:
    engine = _OPENED.get(document["engine"])
    keys, lengths, generations, places = arrays
    namespace = bytes.fromhex(document["namespace"])
    blocks = Blocks(namespace, document["shard"], keys, lengths, generations, places)
    for found in verify.run(engine, blocks):
        yield {"reasons": found.reasons}, [found.kinds]


TASKS: Mapping[str, Task] = {"check": _check, "scan": _scan, "verify": _verify}


# -- frames ---------------------------------------------------------------------------------------


def send(connection: socket.socket, document: Document, arrays: Sequence[Array] = ()) -> None:
    """Send one frame. Raises OSError."""
    shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
    head = json.dumps([document, shapes]).encode()
    connection.sendall(_HEAD.pack(len(head)) + head)
    for array in arrays:
        if array.nbytes:
            connection.sendall(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def receive(connection: socket.socket) -> Answer | None:
    """Receive one frame, None at the end. Raises OSError, ValueError for what is no frame."""
    start = _fill(connection, _HEAD.size)
    if start is None:
        return None
    document, shapes = json.loads(_whole(_fill(connection, *_HEAD.unpack(start))))
    arrays: list[Array] = []
    for kind, shape in shapes:
        array = np.empty(shape, _kind(kind))
        if array.nbytes:
            raw = _whole(_fill(connection, array.nbytes))
            array.view(np.uint8).reshape(-1)[:] = np.frombuffer(raw, np.uint8)
        arrays.append(array)
    return Answer(document, arrays)


def _kind(text: str) -> np.dtype[Any]:
    kind = np.dtype(text)
    if kind.kind not in _KINDS:
        raise ValueError(f"arrays of {text} are not sent")
    return kind


def _fill(connection: socket.socket, size: int) -> bytearray | None:
    """Receive so many bytes; None where the connection ended before the first."""
    if size > _MOST_BYTES:
        raise ValueError(f"{size} bytes are no frame")
    buffer, filled = bytearray(size), 0
    deadline = time.monotonic() + (connection.gettimeout() or 1e9)
    while filled < size:
        got = connection.recv_into(memoryview(buffer)[filled:])
        if not got and not filled:
            return None
        if not got or time.monotonic() > deadline:
            raise ValueError("a frame was cut short")
        filled += got
    return buffer


def _whole(data: bytearray | None) -> bytearray:
    if data is None:
        raise ValueError("a frame was cut short")
    return data


if __name__ == "__main__":
    serve(TASKS)
    _OPENED.close()

"""Nobody learns from the daemon whether another's private namespace, or a block in it, exists.

Two daemons: in the one the maker has the namespace that the spy guesses, in the other one another
of the same size. Whatever the spy asks, both must answer with the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import protocol
from kvstore.administration import ACTIONS
from kvstore.keys import namespace_id
from kvstore.protocol import Op
from kvstore.service import OPERATIONS
from tests.stores import key
from tests.talk import Bare, Reply, Talker, bare, eventually, free_port, head, put_parts
from tests.test_roles import groups, talker_as

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become others"),
]
MAKER, SPY = 1001, 1002
GUESSED: dict[str, object] = {"name": "secret", "private": 1}
ANOTHER: dict[str, object] = {"name": "s3cret", "private": 1}
KEYS = [key(number) for number in range(5)]
VOLATILE = {
    *("pid", "uptime_seconds", "uuid", "created", "store", "socket", "get_us_buckets", "scrub"),
    *("put_us_buckets", "free_bytes", "used_bytes", "journal_bytes"),
}
"""What differs between any two daemons."""


class World(NamedTuple):
    daemon: Bare
    port: int

    def spy(self) -> Talker:
        return talker_as(self.daemon, SPY, groups()[0])


@contextlib.contextmanager
def world(secret: dict[str, object]) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-private-"))
    folder.chmod(0o755)
    port = free_port()
    try:
        with bare(folder, socket_group=groups()[0], admin=f"tcp://127.0.0.1:{port}") as daemon:
            with talker_as(daemon, MAKER, groups()[0]) as maker:
                handle = maker.namespace(secret).json["handle"]
                assert maker.put(KEYS, [b"hidden"] * 5, handle=handle, ack=1).meta == bytes(5)
                (folder / "broken").touch()  # and one that is accepted and cannot be written
                maker.put([key(9)], [b"lost"], handle=handle)
                with Talker(daemon.socket) as administrator:
                    assert eventually(lambda: not administrator.status()["queued_blocks"])
                (folder / "broken").unlink()
            yield World(daemon, port)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def worlds() -> Iterator[tuple[World, World]]:
    with world(GUESSED) as one, world(ANOTHER) as other:
        yield one, other


def plain(reply: Reply) -> object:
    if reply.meta.startswith(b"{"):
        document = reply.json
        return sorted(
            (name, str(value)) for name, value in document.items() if name not in VOLATILE
        )
    return reply.meta, reply.payload


def questions() -> Iterator[tuple[int, bytes, bytes, dict[str, Any]]]:
    """Every operation, about the guessed namespace and about all handles that may be open."""
    number = struct.pack("<I", 1)
    for create in (False, True, False):
        yield Op.NAMESPACE, protocol.dump({"record": GUESSED, "create": create}), b"", {}
        yield Op.FLUSH, b"", b"", {}
    owned = {**GUESSED, "owner": MAKER}
    for create in (False, True):
        yield Op.NAMESPACE, protocol.dump({"record": owned, "create": create}), b"", {}
    for handle in (0, 1, 2, 3):
        names = {**head(KEYS), "handle": handle}
        keys = b"".join(KEYS)
        yield Op.CONTAINS, keys + number, b"", names
        for op in (Op.GET, Op.STREAM_GET, Op.TOUCH, Op.UNPIN, Op.DELETE):
            yield op, keys, b"", names
        yield Op.PIN, keys + number, b"", names
        yield Op.PUT, *put_parts([b"short"], [b"x"]), {**head([b"short"]), "handle": handle}
        yield Op.PUT, *put_parts(KEYS[:1], [b"of another length"]), {**names, "count": 1}
        yield Op.SUBSCRIBE, b"", b"", {"handle": handle}
    yield Op.HELLO, b"{}", b"", {}
    yield Op.UNREGISTER, b"", b"", {"region": 1}
    yield Op.CANCEL, bytes(8), b"", {}
    yield Op.REGISTER, protocol.dump({"bytes": 4096}), b"", {}
    for identity in (namespace_id(GUESSED), namespace_id(owned)):
        for action in ACTIONS:
            asked = {"op": action, "namespace": identity.hex(), "key": KEYS[0].hex()}
            yield Op.ADMIN, protocol.dump(asked), b"", {}


def test_the_spy_asks_everything() -> None:
    assert {op for op, *_ in questions()} == set(OPERATIONS)


def test_both_worlds_answer_the_same(worlds: tuple[World, World]) -> None:
    with worlds[0].spy() as one, worlds[1].spy() as other:
        for op, meta, payload, fields in questions():
            answers = [plain(talker.ask(op, meta, payload, **fields)) for talker in (one, other)]
            assert answers[0] == answers[1], (Op(op).name, meta, fields)


def test_monitoring_names_no_namespace(worlds: tuple[World, World]) -> None:
    owned = namespace_id({**GUESSED, "owner": MAKER}).hex()
    for path in ("metrics", "status", "healthz", "readyz", ""):
        with urllib.request.urlopen(f"http://127.0.0.1:{worlds[0].port}/{path}") as answer:
            text = answer.read().decode()
        assert text
        assert not [one for one in ("secret", owned, KEYS[0].hex()) if one in text], path


def test_the_maker_and_administrators_find_it(worlds: tuple[World, World]) -> None:
    daemon = worlds[0].daemon
    with talker_as(daemon, MAKER, groups()[0]) as maker:
        found = maker.namespace(GUESSED, create=False).json
        assert maker.get(KEYS, handle=found["handle"]) == [b"hidden"] * 5
        assert found["id"] == namespace_id({**GUESSED, "owner": MAKER}).hex()
    with Talker(daemon.socket) as administrator:
        assert administrator.namespace(GUESSED, create=False).error == "UnknownNamespace", "its own"
        handle = administrator.namespace({**GUESSED, "owner": MAKER}, create=False).json["handle"]
        assert administrator.get(KEYS, handle=handle) == [b"hidden"] * 5


def test_the_owner_survives_a_damaged_file(worlds: tuple[World, World]) -> None:
    """The id is that of a record which names the owner: he is known by what he knows."""
    daemon = worlds[1].daemon
    path = daemon.store / "namespaces" / f"{namespace_id({**ANOTHER, 'owner': MAKER}).hex()}.json"
    assert daemon.stop() in (0, 1)  # one block could not be written
    path.write_text("rubbish")
    daemon.start()
    with talker_as(daemon, SPY, groups()[0]) as spy:
        assert not spy.namespace(ANOTHER).error
        assert spy.namespace({**ANOTHER, "owner": MAKER}).error == "UnknownNamespace"
    with talker_as(daemon, MAKER, groups()[0]) as maker:
        handle = maker.namespace(ANOTHER).json["handle"]
        assert maker.get(KEYS, handle=handle) == [b"hidden"] * 5
    assert json.loads(path.read_text())["owner"] == MAKER

"""One test for each operation and each kind of peer; docs/security.md shows the same table.

The daemon runs as a user of its own, so that root and the daemon's user are two.
"""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import protocol
from kvstore.administration import ACTIONS
from kvstore.protocol import Op
from kvstore.service import OPERATIONS
from tests.stores import key
from tests.talk import ROOT, Bare, Shared, Talker, free_port, head, put_parts
from tests.test_roles import acting_as, groups

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become others"),
]
DAEMON, SOMEBODY = 4242, 4321
TOKEN = "0123456789abcdef0123456789abcdef"

ADMINISTRATORS = ("root", "daemon's user", "admin_group")
LOCAL = (*ADMINISTRATORS, "socket_group")
ALL = (*LOCAL, "TCP with token")
PEERS = (*ALL, "TCP without token", "stranger")


class Row(NamedTuple):
    """Who may ask for an operation, and how it is asked for."""

    may: tuple[str, ...]
    meta: bytes = b""
    fields: dict[str, Any] = {}  # noqa: RUF012


ONE: dict[str, Any] = dict(head([key(1)]))
NUMBER = struct.pack("<I", 1)


def action(**fields: object) -> bytes:
    return protocol.dump(fields)


TABLE: dict[str, Row] = {
    "HELLO": Row(ALL, b'{"token": "%s"}' % TOKEN.encode()),
    "NAMESPACE": Row(ALL, action(record={"name": "n"}, create=True)),
    "REGISTER": Row(LOCAL, action(bytes=4096)),
    "UNREGISTER": Row(ALL, b"", {"region": 1}),
    "PUT": Row(ALL, put_parts([key(1)], [b"x"])[0], ONE),
    "GET": Row(ALL, key(1), ONE),
    "STREAM_GET": Row(ALL, key(1), ONE),
    "CONTAINS": Row(ALL, key(1) + NUMBER, ONE),
    "TOUCH": Row(ALL, key(1), ONE),
    "DELETE": Row(ADMINISTRATORS, key(1), ONE),
    "PIN": Row(ALL, key(1) + NUMBER, ONE),
    "UNPIN": Row(ALL, key(1), ONE),
    "FLUSH": Row(ALL),
    "CANCEL": Row(ALL, bytes(8)),
    "SUBSCRIBE": Row(ALL),
    "status": Row(ALL, action(op="status")),
    "list": Row(ADMINISTRATORS, action(op="list")),
    "namespaces": Row(ADMINISTRATORS, action(op="namespaces")),
    "inspect": Row(ADMINISTRATORS, action(op="inspect", key=key(1).hex())),
    "tree": Row(ADMINISTRATORS, action(op="tree", key=key(1).hex())),
    "recent": Row(ADMINISTRATORS, action(op="recent")),
    "pins": Row(ADMINISTRATORS, action(op="pins")),
    "quota": Row(ADMINISTRATORS, action(op="quota", namespace="00")),
    "record": Row(ADMINISTRATORS, action(op="record")),
    "scrub": Row(ADMINISTRATORS, action(op="scrub")),
    "evict": Row(ADMINISTRATORS, action(op="evict", older_than=10**9)),
    "warm": Row(ADMINISTRATORS, action(op="warm", keys=[])),
}


def test_every_operation_has_a_row() -> None:
    operations = {Op(op).name for op in OPERATIONS} - {"ADMIN"}
    assert set(TABLE) == operations | set(ACTIONS), "say who may ask for it, here and in the docs"


class Place(NamedTuple):
    daemon: Bare
    port: int


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-roles-"))
    os.chown(folder, DAEMON, DAEMON)
    folder.chmod(0o755)
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    os.chown(token, DAEMON, -1)
    (may_connect, may_do_all), port = groups(), free_port()
    daemon = Bare(folder)
    daemon.settings = {
        "user": DAEMON,
        "socket_group": may_connect,
        "admin_group": may_do_all,
        "listen": f"tcp://127.0.0.1:{port}",
        "guard": {"token_file": str(token)},
    }
    try:
        daemon.start()
        yield Place(daemon, port)
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()
        shutil.rmtree(folder)


@contextlib.contextmanager
def peer(place: Place, who: str) -> Iterator[Talker]:
    may_connect, may_do_all = (grp.getgrnam(name).gr_gid for name in groups())
    local = {
        "root": (0, []),
        "daemon's user": (DAEMON, []),
        "admin_group": (SOMEBODY, [may_connect, may_do_all]),
        "socket_group": (SOMEBODY, [may_connect]),
        "stranger": (SOMEBODY, []),
    }
    if who in local:
        uid, further = local[who]
        with acting_as(uid, uid, further):
            talker = Talker(place.daemon.socket)
    else:
        talker = Talker(("127.0.0.1", place.port))
    with talker:
        if who == "TCP with token":
            assert not talker.json(Op.HELLO, token=TOKEN).error
        yield talker


@pytest.mark.parametrize("who", PEERS)
@pytest.mark.parametrize("name", TABLE)
def test_who_may_ask_for_what(place: Place, name: str, who: str) -> None:
    row = TABLE[name]
    op = Op[name] if name in Op.__members__ else Op.ADMIN
    meta = b"{}" if (name, who) == ("HELLO", "TCP without token") else row.meta
    if who == "stranger":
        with pytest.raises(PermissionError), peer(place, who):
            raise AssertionError("got in")
        return
    with peer(place, who) as talker, Shared(4096) as shared:
        descriptors = [shared.descriptor] if op == Op.REGISTER and who in LOCAL else []
        payload = b"x" if op == Op.PUT else b""
        talker.send(op, meta, payload, descriptors=descriptors, **row.fields)
        error = talker.receive().error
        assert (error == "PermissionDenied") == (who not in row.may)
        if error == "PermissionDenied" and who in ALL:
            assert talker.status()["state"] == "ready", "only the request failed"


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    shown = {
        name: tuple(kind == "yes" for kind in kinds.split(" | "))
        for names, kinds in re.findall(
            r"^\| (`[^|]+) \| ((?:yes|no)(?: \| yes| \| no)*) \|$", page, re.M
        )
        for name in re.findall(r"`(?:ADMIN )?(\w+)`", names)
    }
    columns = ("root", "socket_group", "TCP with token", "TCP without token")
    assert shown == {name: tuple(who in row.may for who in columns) for name, row in TABLE.items()}

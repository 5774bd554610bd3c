"""Who may do what: users and groups on the Unix socket, TCP, sockets from systemd."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import shutil
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.administration import ACTIONS
from kvstore.answers import Ack, BlockStatus
from kvstore.errors import ConfigError
from kvstore.keys import named
from kvstore.opening import Options, open_store
from kvstore.protocol import Op
from kvstore.service import MAX_PIN_SECONDS
from kvstore.sockets import inherited_listeners, tcp_listener, unix_listener
from tests.stores import block, key
from tests.talk import (
    Bare,
    Shared,
    Talker,
    activated,
    bare,
    eventually,
    free_port,
    head,
    wait_ready,
)

ONE = head([key(0)])
SECRET: dict[str, object] = {"name": "secret", "private": 1}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become others")


def groups() -> tuple[str, str]:
    """Return two groups of this machine that are not root's."""
    first, second, *_ = (found.gr_name for found in grp.getgrall() if found.gr_gid)
    return first, second


@contextlib.contextmanager
def acting_as(uid: int, gid: int, further: Sequence[int] = ()) -> Iterator[None]:
    """Be somebody else for the kernel's question who connects."""
    before = os.getgroups()
    os.setgroups(list(further))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Bare]:
    """A daemon whose socket a group may use, in a folder that everybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-roles-"))
    folder.chmod(0o755)
    may_connect, may_do_all = groups()
    try:
        with bare(folder, socket_group=may_connect, admin_group=may_do_all) as daemon:
            yield daemon
    finally:
        shutil.rmtree(folder)


def talker_as(daemon: Bare, uid: int, *further: str) -> Talker:
    numbers = [grp.getgrnam(name).gr_gid for name in further]
    with acting_as(uid, uid, numbers):
        return Talker(daemon.socket)


@needs_root
@pytest.mark.root
def test_the_socket_is_for_its_group(shared_daemon: Bare) -> None:
    found = shared_daemon.socket.stat()
    may_connect, _ = groups()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == grp.getgrnam(may_connect).gr_gid
    with pytest.raises(PermissionError):
        talker_as(shared_daemon, 4321)
    with talker_as(shared_daemon, 4321, may_connect) as talker:
        assert talker.status()["state"] == "ready"


@needs_root
@pytest.mark.root
def test_ordinary_peers_use_blocks_and_remove_none(shared_daemon: Bare) -> None:
    may_connect, _ = groups()
    with talker_as(shared_daemon, 4321, may_connect) as talker, Shared(4096) as shared:
        assert talker.put([key(1)], [b"mine"]).meta == b"\0"
        assert talker.get([key(1)]) == [b"mine"]
        assert talker.contains([key(1)]) == [1]
        assert talker.register([shared.descriptor], 4096).json == {"region": 1}
        seconds = struct.pack("<I", 60)
        for op, meta in (
            (Op.HELLO, b"{}"),
            (Op.STREAM_GET, key(1)),
            (Op.TOUCH, key(1)),
            (Op.PIN, key(1) + seconds),
            (Op.UNPIN, key(1)),
            (Op.FLUSH, b""),
            (Op.SUBSCRIBE, b""),
            (Op.CANCEL, bytes(8)),
        ):
            reply = talker.ask(op, meta, **ONE)
            assert not reply.frame.flags & 2, (op, reply)
        assert talker.ask(Op.DELETE, key(1), **ONE).error == "PermissionDenied"
        for action in {*ACTIONS, "anything"} - {"status"}:
            assert talker.json(Op.ADMIN, op=action).error == "PermissionDenied"
        assert talker.json(Op.ADMIN).error == "PermissionDenied"
        assert "notes" not in talker.status()
        assert talker.get([key(1)]) == [b"mine"]


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("who", ["root", "member", "primary"])
def test_administrators_do_everything(shared_daemon: Bare, who: str) -> None:
    may_connect, may_do_all = groups()
    number = grp.getgrnam(may_do_all).gr_gid
    if who == "root":
        talker = Talker(shared_daemon.socket)
    elif who == "member":
        talker = talker_as(shared_daemon, 4321, may_connect, may_do_all)
    else:
        with acting_as(4321, number, [grp.getgrnam(may_connect).gr_gid]):
            talker = Talker(shared_daemon.socket)
    with talker:
        talker.put([key(2)], [b"x"])
        assert talker.ask(Op.DELETE, key(2), **ONE).meta == b"\0"
        assert "blocks" in talker.json(Op.ADMIN, op="list").json
        assert "notes" in talker.status()


@needs_root
@pytest.mark.root
def test_a_private_namespace_is_its_makers_alone(shared_daemon: Bare) -> None:
    may_connect, may_do_all = groups()
    with talker_as(shared_daemon, 1001, may_connect) as maker:
        handle = maker.namespace(SECRET).json["handle"]
        assert maker.put([key(3)], [b"hidden"], handle=handle).meta == b"\0"
    mine: dict[str, object] = {**SECRET, "owner": 1001}
    with talker_as(shared_daemon, 1002, may_connect) as other:
        for create in (True, False):
            assert other.namespace(mine, create=create).error == "UnknownNamespace"
        assert other.namespace(SECRET, create=False).error == "UnknownNamespace"
        assert other.ask(Op.GET, key(3), handle=handle, **ONE).error == "UnknownNamespace"
        own = other.namespace(SECRET).json["handle"]
        assert other.get([key(3)], handle=own) == [None], "one of his own"
    for uid, further in ((1001, (may_connect,)), (0, ()), (1002, (may_connect, may_do_all))):
        with talker_as(shared_daemon, uid, *further) as again:
            handle = again.namespace(mine, create=False).json["handle"]
            assert again.get([key(3)], handle=handle) == [b"hidden"]


@needs_root
@pytest.mark.root
def test_the_owner_is_remembered(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-roles-"))
    folder.chmod(0o755)
    may_connect, _ = groups()
    try:
        with bare(folder, socket_group=may_connect) as daemon:
            with talker_as(daemon, 1001, may_connect) as maker:
                handle = maker.namespace(SECRET).json["handle"]
                maker.put([key(1)], [b"x"], handle=handle)
                assert not maker.namespace({"name": "open"}).error
            daemon.stop()
            owners = [
                json.loads(path.read_text()).get("owner")
                for path in (daemon.store / "namespaces").iterdir()
            ]
            assert sorted(owner for owner in owners if owner is not None) == [1001]
            daemon.start()
            with talker_as(daemon, 1002, may_connect) as other:
                assert other.namespace(SECRET, create=False).error == "UnknownNamespace"
                assert not other.namespace({"name": "open"}, create=False).error
            with talker_as(daemon, 1001, may_connect) as maker:
                assert not maker.namespace(SECRET, create=False).error
    finally:
        shutil.rmtree(folder)


def test_without_a_group_the_socket_is_ours_alone(tmp_path: Path) -> None:
    with unix_listener(tmp_path / "kv.sock"):
        assert stat.S_IMODE((tmp_path / "kv.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize("setting", ["socket_group", "admin_group"])
def test_an_unknown_group_is_a_wrong_setting(tmp_path: Path, setting: str) -> None:
    daemon = Bare(tmp_path)
    daemon.settings = {setting: "no-such-group"}
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(20) == ConfigError.exit_code
    assert setting in daemon.log
    assert "no-such-group" in daemon.log


# -- TCP ------------------------------------------------------------------------------------------


def test_tcp_carries_blocks_in_the_payload_and_nothing_else(tmp_path: Path) -> None:
    port = free_port()
    with bare(tmp_path, listen=f"tcp://127.0.0.1:{port}") as daemon:
        with Talker(("127.0.0.1", port)) as talker, Shared(4096) as shared:
            told = talker.json(Op.HELLO, version=1).json
            assert told["limits"]["region_bytes"] == 0
            assert not talker.descriptors
            large = block(1, 3_000_000)
            assert talker.put([key(1)], [large]).meta == b"\0"
            assert talker.get([key(1), key(2)]) == [large, None]
            assert talker.json(Op.REGISTER, bytes=4096).error == "PermissionDenied"
            assert talker.ask(Op.DELETE, key(1), **ONE).error == "PermissionDenied"
            assert talker.json(Op.ADMIN, op="list").error == "PermissionDenied"
            assert not talker.namespace(named("open")).error
            assert talker.namespace(SECRET).error == "PermissionDenied"
            assert shared.size
        with Talker(daemon.socket) as local:
            local.namespace(SECRET)
        with Talker(("127.0.0.1", port)) as talker:
            assert talker.namespace(SECRET, create=False).error == "UnknownNamespace"
            assert talker.namespace(SECRET).error == "PermissionDenied", (
                "whether it is there or not"
            )


def test_late_errors_are_told_to_those_who_may_hear_of_them(tmp_path: Path) -> None:
    port = free_port()
    with bare(tmp_path, listen=f"tcp://127.0.0.1:{port}") as daemon:
        place = ("127.0.0.1", port)
        with Talker(place) as owner, Talker(place) as other, Talker(daemon.socket) as administrator:
            record = named("owner's")
            handle = owner.namespace(record).json["handle"]
            (tmp_path / "broken").touch()
            for number in (1, 2):
                assert owner.put([key(number)], [b"lost"], handle=handle).meta == b"\0"
                assert eventually(lambda: not administrator.status()["queued_blocks"])
                if number == 1:
                    (tmp_path / "broken").unlink()
                    assert other.ask(Op.FLUSH).json == {"errors": []}
                    (lost,) = owner.ask(Op.FLUSH).json["errors"]
                    assert lost["key"] == key(1).hex()
                    assert owner.ask(Op.FLUSH).json == {"errors": []}, "told once"
                    (tmp_path / "broken").touch()
            (tmp_path / "broken").unlink()
            assert len(administrator.ask(Op.FLUSH).json["errors"]) == 1, "administrators hear all"
            assert owner.ask(Op.FLUSH).json == {"errors": []}
        assert daemon.stop() == 0


def test_ordinary_peers_pin_for_an_hour_at_most(tmp_path: Path) -> None:
    port = free_port()
    seconds = struct.pack("<I", 0xFFFFFFFF)
    with bare(tmp_path, listen=f"tcp://127.0.0.1:{port}") as daemon:
        with Talker(("127.0.0.1", port)) as ordinary, Talker(daemon.socket) as administrator:
            ordinary.put([key(1), key(2)], [b"x", b"y"], ack=Ack.WRITTEN)
            assert ordinary.json(Op.HELLO).json["limits"]["pin_seconds"] == MAX_PIN_SECONDS
            assert administrator.json(Op.HELLO).json["limits"]["pin_seconds"] == 0xFFFFFFFF
            assert ordinary.ask(Op.PIN, key(1) + seconds, **ONE).meta == b"\0"
            assert administrator.ask(Op.PIN, key(2) + seconds, **ONE).meta == b"\0"
        assert daemon.stop() == 0
    store = open_store(daemon.store, Options(min_free=0))
    first, second = sorted(until - time.time() for until in store.core.index.pins.values())
    store.close()
    assert MAX_PIN_SECONDS - 120 < first <= MAX_PIN_SECONDS
    assert second > 100 * MAX_PIN_SECONDS


def test_an_administrators_pin_is_not_lifted_or_shortened_by_others(tmp_path: Path) -> None:
    port = free_port()
    one, other = key(1), key(2)

    def seconds(number: int) -> bytes:
        return struct.pack("<I", number)

    with bare(tmp_path, listen=f"tcp://127.0.0.1:{port}") as daemon:
        with Talker(("127.0.0.1", port)) as ordinary, Talker(daemon.socket) as administrator:
            ordinary.put([one, other], [b"x", b"y"], ack=Ack.WRITTEN)
            assert administrator.ask(Op.PIN, one + seconds(1800), **ONE).meta == b"\0"
            assert ordinary.ask(Op.PIN, one + seconds(1), **ONE).meta == b"\0"
            assert ordinary.ask(Op.UNPIN, one, **ONE).meta == bytes([BlockStatus.MISS])
            assert ordinary.ask(Op.PIN, other + seconds(60), **ONE).meta == b"\0"
            assert ordinary.ask(Op.PIN, other + seconds(30), **ONE).meta == b"\0"
            assert ordinary.ask(Op.FLUSH).json == {"errors": []}
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        store = open_store(daemon.store, Options(min_free=0))
        index, now = store.core.index, time.time()
        left = {row in index.firm_pins: until - now for row, until in index.pins.items()}
        store.checkpoint()
        store.run_chores()
        store.close()
        assert 1700 < left[True] <= 1800
        assert left[False] <= 30
        daemon.start()
        with Talker(("127.0.0.1", port)) as ordinary, Talker(daemon.socket) as administrator:
            assert ordinary.ask(Op.UNPIN, one, **ONE).meta == bytes([BlockStatus.MISS])
            assert ordinary.ask(Op.PIN, one + seconds(3600), **ONE).meta == b"\0", "longer is fine"
            assert ordinary.ask(Op.UNPIN, other, **ONE).meta == b"\0"
            assert administrator.ask(Op.UNPIN, one, **ONE).meta == b"\0"
            assert administrator.ask(Op.UNPIN, one, **ONE).meta == bytes([BlockStatus.MISS])
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:7700",
        "tcp://192.0.2.1:7700",
        "tcp://[::]:7700",
        "tcp://example.org:7700",
        "tcp://:7700",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:1/x",
        "127.0.0.1:7700",
        "http://127.0.0.1:7700",
        "",
    ],
)
def test_only_this_machine_may_be_listened_on(address: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        tcp_listener(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_addresses_are_fine(host: str) -> None:
    with tcp_listener(f"tcp://{host}:{free_port()}") as sock:
        assert sock.getsockname()[0].startswith("127.")


def test_other_machines_may_come_where_tcp_is_guarded() -> None:
    # An address for examples, so that nothing really listens.
    with pytest.raises(ConfigError, match="cannot listen on"):
        tcp_listener("tcp://192.0.2.1:7700", guarded=True)


# -- systemd --------------------------------------------------------------------------------------


def test_sockets_of_systemd_are_served_and_stay(tmp_path: Path) -> None:
    place = tmp_path / "from-systemd.sock"
    daemon = Bare(tmp_path)
    with unix_listener(place) as first, tcp_listener(f"tcp://127.0.0.1:{free_port()}") as second:
        for turn in range(2):
            # Dialled before anybody serves: the connection waits and is not lost.
            with Talker(place) as early:
                activated(daemon, first, second)
                try:
                    assert early.status()["state"] in ("recovering", "ready")
                    wait_ready(daemon, place)
                    assert early.put([key(turn)], [b"x"]).meta == b"\0"
                    assert not daemon.socket.exists()
                    with Talker(second.getsockname()) as network:
                        assert network.get([key(0)]) == [b"x"]
                finally:
                    assert daemon.stop(signal.SIGTERM) == 0, daemon.log
        assert place.exists()


def test_only_our_own_listen_fds_count() -> None:
    for pid in ("", "1", str(os.getppid())):
        environ = {"LISTEN_PID": pid, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
        assert inherited_listeners(environ) == []
        assert environ == {"HOME": "/"}


@pytest.mark.parametrize("kind", ["file", "datagram", "connected", "anywhere", "closed"])
def test_descriptors_that_are_no_listeners_are_refused(tmp_path: Path, kind: str) -> None:
    daemon = Bare(tmp_path)
    with contextlib.ExitStack() as stack:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram" else 1)
        stack.enter_context(one)
        if kind == "anywhere":
            one.close()
            one = stack.enter_context(socket.create_server(("0.0.0.0", free_port())))
        if kind == "file":
            os.dup2(os.open(tmp_path, os.O_RDONLY), one.fileno())
        activated(daemon, *([one] * (2 if kind == "closed" else 1)))
        assert daemon.process is not None
        assert daemon.process.wait(20) == ConfigError.exit_code, daemon.log
        assert "LISTEN_FDS" in daemon.log

"""TCP between machines: certificates, tokens, and strangers who have neither.

The certificates are made by the commands of docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.aclient import AsyncClient
from kvstore.client import Client
from kvstore.credentials import Credentials, read_token
from kvstore.errors import (
    ConfigError,
    DaemonUnavailable,
    KVStoreError,
    PermissionDenied,
    UnknownNamespace,
)
from kvstore.guard import STRANGER_BYTES, GuardFiles
from kvstore.protocol import Frame, Op
from kvstore.wire import Wire
from tests.command import run_command
from tests.stores import block, key
from tests.talk import ROOT, Bare, Talker, bare, eventually, free_port, head, put_parts

NAME, ADDRESS = "kv1.example.org", "127.0.0.1"
TOKEN = "0123456789abcdef0123456789abcdef"


def commands() -> str:
    text = (ROOT / "docs" / "security.md").read_text()
    (found,) = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    return re.sub("NAME=.*", f"NAME={NAME} ADDRESS={ADDRESS}", found, count=1)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documentation makes, and a second CA that nobody trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes certificates")
    folder = tmp_path_factory.mktemp("keys")
    for place in (folder, folder / "other"):
        place.mkdir(exist_ok=True)
        subprocess.run(
            ["bash", "-e"], input=commands(), cwd=place, text=True, check=True, capture_output=True
        )
    return folder


def guarded(keys: Path, **changes: str | None) -> dict[str, str]:
    files = {
        "tls_certificate": str(keys / "daemon.pem"),
        "tls_key": str(keys / "daemon.key"),
        "token_file": str(keys / "token"),
        **changes,
    }
    return {name: value for name, value in files.items() if value is not None}


@pytest.fixture(scope="module")
def daemon(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("daemon"), guarded(keys)) as found:
        yield found


class Served:
    """A daemon on a port of this machine."""

    def __init__(self, bare: Bare, port: int) -> None:
        self.bare, self.port = bare, port
        self.address = f"tls://{ADDRESS}:{port}"
        self.place = (ADDRESS, port)


@contextlib.contextmanager
def served(folder: Path, guard: dict[str, str], **settings: Any) -> Iterator[Served]:
    port = free_port()
    with bare(folder, listen=f"tcp://{ADDRESS}:{port}", guard=guard, **settings) as found:
        yield Served(found, port)


def trusted(keys: Path, **changes: str | None) -> Credentials:
    found = Credentials(str(keys / "token"), str(keys / "ca.pem"))
    return found._replace(**changes)


# -- who gets in ----------------------------------------------------------------------------------


def test_blocks_travel_encrypted(daemon: Served, keys: Path) -> None:
    large = [block(number, 9_000_001) for number in range(4)]
    names = [key(number) for number in range(4)]
    with Client(daemon.address, credentials=trusted(keys)) as client:
        assert client.put_many(names, large).tolist() == [0] * 4
        found = client.get_many([*names, key(99)])
        assert [None if one is None else bytes(one) for one in found] == [*large, None]
        assert client.contains(names).tolist() == [True] * 4


def test_the_asyncio_client_gets_in_too(daemon: Served, keys: Path) -> None:
    async def talk() -> None:
        async with AsyncClient(daemon.address, credentials=trusted(keys)) as client:
            large = block(7, 20_000_000)
            assert await client.put(key(7), large) == "stored"
            waiting = [client.get(key(7)) for _ in range(3)]
            assert [bytes(one or b"") for one in await asyncio.gather(*waiting)] == [large] * 3

    asyncio.run(talk())


def test_whoever_knows_the_token_is_an_ordinary_peer(daemon: Served, keys: Path) -> None:
    secret: dict[str, object] = {"name": "secret", "private": 1}
    with Client(daemon.address, credentials=trusted(keys)) as client:
        client.put(key(50), b"x")
        for refused in (lambda: client.delete([key(1)]), lambda: list(client.list())):
            with pytest.raises(PermissionDenied, match="administrators"):
                refused()
        with pytest.raises(PermissionDenied, match="private"):
            client.namespace(secret, create=True)
        with Client(str(daemon.bare.socket)) as local:
            local.namespace(secret, create=True)
        with pytest.raises(UnknownNamespace):
            client.namespace(secret)
        assert "notes" not in client.status()


def test_a_wrong_token_or_none_opens_nothing(daemon: Served, keys: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text(TOKEN)
    wrong.chmod(0o600)
    for file, reason in ((str(wrong), "wrong"), (None, "without a token")):
        with (
            Client(daemon.address, credentials=trusted(keys, token_file=file)) as client,
            pytest.raises(PermissionDenied, match=reason),
        ):
            client.contains([key(1)])


def test_a_daemon_that_others_vouch_for_gets_no_token(daemon: Served, keys: Path) -> None:
    strange = trusted(keys, ca_file=str(keys / "other" / "ca.pem"))
    misnamed = daemon.address.replace(ADDRESS, "localhost")
    for address, credentials in ((daemon.address, strange), (misnamed, trusted(keys))):
        with (
            Client(address, credentials=credentials) as client,
            pytest.raises(PermissionDenied, match="not trusted"),
        ):
            client.status()


def test_old_tls_is_refused(daemon: Served, keys: Path) -> None:
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(daemon.place) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname=ADDRESS)


def test_plain_and_encrypted_do_not_mix(daemon: Served, keys: Path, tmp_path: Path) -> None:
    client = Client(f"tcp://{ADDRESS}:{daemon.port}", credentials=trusted(keys))
    with client, pytest.raises(KVStoreError):
        client.status()
    with served(tmp_path, {}) as plain:
        client = Client(plain.address, credentials=trusted(keys))
        with client, pytest.raises(DaemonUnavailable):
            client.status()


def test_a_certificate_may_be_asked_for(keys: Path, tmp_path: Path) -> None:
    guard = guarded(keys, tls_client_ca=str(keys / "ca.pem"))
    own = {"certificate": str(keys / "daemon.pem"), "key": str(keys / "daemon.key")}
    other = {name: file.replace("daemon.", "other/daemon.") for name, file in own.items()}
    with served(tmp_path, guard) as daemon:
        with Client(daemon.address, credentials=trusted(keys, **own)) as client:
            assert client.put(key(1), b"x") == "stored"
        for missing in ({}, other):
            client = Client(daemon.address, credentials=trusted(keys, **missing))
            with client, pytest.raises(DaemonUnavailable):
                client.put(key(2), b"x")


def test_a_token_is_asked_for_on_this_machine_too(keys: Path, tmp_path: Path) -> None:
    with served(tmp_path, {"token_file": str(keys / "token")}) as daemon:
        address = f"tcp://{ADDRESS}:{daemon.port}"
        with Client(address, credentials=trusted(keys)) as client:
            assert client.put(key(1), b"x") == "stored"
        with Client(address, credentials=Credentials()) as client, pytest.raises(PermissionDenied):
            client.put(key(1), b"x")


def test_a_token_is_never_sent_in_the_clear(keys: Path) -> None:
    # An address for examples, so that nothing is really called.
    client = Client("tcp://192.0.2.1:7700", credentials=trusted(keys))
    with client, pytest.raises(ConfigError, match="unencrypted"):
        client.status()


def test_commands_find_their_files_in_the_environment(
    daemon: Served, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(keys / "token"))
    monkeypatch.setenv("KVSTORE_CA_FILE", str(keys / "ca.pem"))
    for way in (["--socket", daemon.address], []):
        if not way:
            monkeypatch.setenv("KVSTORE_SOCKET", daemon.address)
        assert run_command(*way, "status", "--json").code == 0
    monkeypatch.delenv("KVSTORE_TOKEN_FILE")
    refused = run_command("status")
    assert refused.code == PermissionDenied.exit_code
    assert "KVSTORE_TOKEN_FILE" in refused.stderr


def test_the_token_is_shown_nowhere(daemon: Served, keys: Path) -> None:
    token = read_token(keys / "token")
    with Client(daemon.address, credentials=trusted(keys)) as client:
        assert token not in str(client.status())
    with Talker(daemon.bare.socket) as administrator:
        assert token not in str(administrator.status())
    assert token not in daemon.bare.log
    assert token not in repr(GuardFiles(token_file=keys / "token").read())
    assert token.encode() not in Path(f"/proc/{daemon.bare.pid}/cmdline").read_bytes()
    assert token.encode() not in Path(f"/proc/{daemon.bare.pid}/environ").read_bytes()


# -- strangers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def door(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon with a token and without encryption: what strangers say is easier to spell."""
    guard = {"token_file": str(keys / "token")}
    with served(tmp_path_factory.mktemp("door"), guard, max_clients=12) as found:
        yield found


def hello(keys: Path) -> dict[str, object]:
    return {"version": 1, "token": read_token(keys / "token")}


@pytest.mark.parametrize("op", [op for op in Op if op != Op.HELLO])
def test_nothing_is_done_for_strangers(door: Served, op: Op) -> None:
    with Talker(door.place) as talker:
        fields: dict[str, Any] = dict(head([key(1)])) if op == Op.PUT else {}
        parts = put_parts([key(1)], [b"x"]) if op == Op.PUT else (b"{}", b"")
        assert talker.ask(op, *parts, **fields).error == "PermissionDenied"
        assert talker.ended()
    with Talker(door.bare.socket) as local:
        assert local.contains([key(1)]) == [0]


@pytest.mark.parametrize("announced", [STRANGER_BYTES + 1, 100_000])
def test_strangers_have_a_small_frame(door: Served, announced: int) -> None:
    with Talker(door.place) as talker:
        talker.sock.sendall(Frame(Op.HELLO, request=1, meta_bytes=announced).pack())
        assert talker.receive().error == "PermissionDenied", "before any of it has come"
        assert talker.ended()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n", b"\x16\x03\x01" + bytes(64)]
)
def test_what_is_no_frame_ends_it(door: Served, said: bytes) -> None:
    with Talker(door.place) as talker:
        talker.sock.sendall(said)
        assert talker.ended()


def test_hello_works_and_only_with_the_token(door: Served, keys: Path) -> None:
    for told in ({"token": TOKEN}, {"token": None}, {"token": 7}, {"token": "\ud800"}, {}):
        with Talker(door.place) as talker:
            assert talker.json(Op.HELLO, **told).error == "PermissionDenied"
            assert talker.ended()
    with Talker(door.place) as talker:
        assert talker.json(Op.HELLO, **hello(keys)).json["limits"]["region_bytes"] == 0
        assert talker.put([key(5)], [b"five"]).meta == b"\0"
        assert talker.json(Op.HELLO, **hello(keys)).json, "again, which is no use and no harm"
        assert talker.get([key(5)]) == [b"five"]


def test_strangers_have_few_places_and_little_time(door: Served, keys: Path) -> None:
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        known = stack.enter_context(Talker(door.place))
        known.json(Op.HELLO, **hello(keys))
        half = Frame(Op.HELLO, request=1, meta_bytes=2).pack()[:20]
        slow = [stack.enter_context(Talker(door.place)) for _ in range(3)]
        for talker, said in zip(slow, (b"", half, half + b""), strict=True):
            talker.sock.sendall(said)
        with Talker(door.place) as one_too_many:
            assert one_too_many.ended()
        assert time.monotonic() - began < 4, "at once"
        with Talker(door.bare.socket) as local:
            assert local.status()["clients"] == 5
        assert known.put([key(6)], [b"x"]).meta == b"\0"
        assert all(talker.ended() for talker in slow)
        with Talker(door.place) as next_one:
            assert next_one.json(Op.HELLO, **hello(keys)).json


def test_a_handshake_that_stalls_keeps_nobody_waiting(daemon: Served, keys: Path) -> None:
    with (
        socket.create_connection(daemon.place, 20) as silent,
        Client(daemon.address, credentials=trusted(keys)) as client,
    ):
        silent.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        began = time.monotonic()
        client.contains([key(1)])
        assert time.monotonic() - began < 3
        assert silent.recv(100) == b""
        assert 3 < time.monotonic() - began < 15


def test_all_clients_together_have_a_limit(tmp_path: Path) -> None:
    with bare(tmp_path, max_clients=2) as daemon:
        with Talker(daemon.socket) as one:
            # Whoever waited for the daemon has left.
            assert eventually(lambda: one.status()["clients"] == 1)
            with Talker(daemon.socket) as two:
                assert eventually(lambda: one.status()["clients"] == 2)
                with Talker(daemon.socket) as three:
                    assert three.ended()
                assert two.status()["clients"] == 2
        assert eventually(lambda: _is_answered(daemon))


def _is_answered(daemon: Bare) -> bool:
    with contextlib.suppress(ConnectionError), Talker(daemon.socket) as talker:
        return bool(talker.status())
    return False


class Endless(socket.socket):
    """Takes and gives at once, as a fast client does while we decrypt."""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return min(len(buffer), 16 << 10)

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        return min(len(buffers[0]), 16 << 10)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_fast_client_leaves_the_event_loop_to_others(way: str) -> None:
    async def talk() -> int:
        turns, wire, memory = 0, Wire(sock, 5), memoryview(bytearray(8 << 20))

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        await (wire.receive(memory) if way == "in" else wire.send([memory]))
        task.cancel()
        return turns

    with Endless() as sock:
        assert 8 <= asyncio.run(talk()) <= 10, "once a MiB"


def test_a_drain_does_not_wait_for_strangers(keys: Path, tmp_path: Path) -> None:
    with served(tmp_path, guarded(keys)) as daemon, socket.create_connection(daemon.place):
        with Talker(daemon.bare.socket) as local:
            while local.status()["clients"] < 2:
                time.sleep(0.01)
        began = time.monotonic()
        assert daemon.bare.stop() == 0
        assert time.monotonic() - began < 4


# -- settings -------------------------------------------------------------------------------------


@pytest.fixture
def settings(keys: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "--store": str(tmp_path / "store"),
        "--listen": "tcp://0.0.0.0:7700",
        "--tls-certificate": str(keys / "daemon.pem"),
        "--tls-key": str(keys / "daemon.key"),
        "--token-file": str(keys / "token"),
    }


def check(settings: dict[str, str]) -> Any:
    arguments = [part for pair in settings.items() for part in pair]
    return run_command("serve", "--check-only", *arguments)


def test_other_machines_need_encryption_and_a_token(settings: dict[str, str]) -> None:
    assert check(settings).code == 0
    for missing in (["--token-file"], ["--tls-certificate", "--tls-key"]):
        found = check({name: value for name, value in settings.items() if name not in missing})
        assert found.code == ConfigError.exit_code
        assert "et tls_certificate and token_file too" in found.stderr
    found = check({n: v for n, v in settings.items() if n != "--tls-certificate"})
    assert "tls_key is of no use" in found.stderr


def test_secrets_that_others_may_read_are_refused(
    settings: dict[str, str], keys: Path, tmp_path: Path
) -> None:
    for name, source in (("--token-file", "token"), ("--tls-key", "daemon.key")):
        copy = tmp_path / source
        copy.write_bytes((keys / source).read_bytes())
        for mode, code in ((0o600, 0), (0o640, 0), (0o604, 13), (0o660, 13), (0o644, 13)):
            copy.chmod(mode)
            found = check({**settings, name: str(copy)})
            assert found.code == code, (name, oct(mode))
            assert (f"chmod 600 {copy}" in found.stderr) == bool(code)


@pytest.mark.parametrize("spoiled", ["absent", "short", "two", "long", "pipe", "folder", "bytes"])
def test_a_token_is_one_line_of_a_file(tmp_path: Path, spoiled: str) -> None:
    path = tmp_path / "token"
    contents = {"short": b"x" * 15, "two": b"x " * 20, "long": b"x" * 1030, "bytes": b"\xff" * 32}
    if spoiled == "pipe":
        os.mkfifo(path, 0o600)
    elif spoiled == "folder":
        path.mkdir(mode=0o700)
    elif spoiled in contents:
        path.touch(0o600)
        path.write_bytes(contents[spoiled])
    with pytest.raises(ConfigError, match="token"):
        read_token(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_a_secret_is_ours_or_roots(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    os.chown(path, 4321, -1)
    with pytest.raises(ConfigError, match="belongs to user 4321"):
        read_token(path)


@pytest.mark.parametrize("name", ["--tls-certificate", "--tls-key", "--tls-client-ca"])
def test_files_that_are_no_certificates_are_named(
    settings: dict[str, str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "rubbish"
    path.touch(0o600)
    path.write_text("-----BEGIN CERTIFICATE-----\nrubbish\n")
    for place in (path, tmp_path / "absent"):
        found = check({**settings, name: str(place)})
        assert found.code == ConfigError.exit_code
        assert str(place) in found.stderr

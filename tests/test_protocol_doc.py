"""docs/protocol.md says what the code does: its tables are compared, its example is sent."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import errors, peers, protocol
from kvstore.answers import Ack, BlockStatus
from kvstore.protocol import MOST_PUT_BYTES, PUT_BYTES, Event, Flag, Frame, Op
from kvstore.server import ServerOptions
from kvstore.service import MAX_PIN_SECONDS
from tests.talk import Bare, Talker, bare

TEXT = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
TEXT_IN_ONE_LINE = " ".join(TEXT.split())

Rows = list[list[str]]


def table(heading: str, number: int = 0) -> Rows:
    """Return a table below a heading as rows of cells without backticks."""
    section = re.split(rf"^#+ {re.escape(heading)}$", TEXT, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    rows = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)[number].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def numbered(heading: str) -> dict[str, int]:
    return {name: int(number) for number, name, *_ in table(heading)}


def test_the_header() -> None:
    codes = re.findall(r"\d*[a-zA-Z]", protocol.HEADER.format[1:])
    offset, expected = 0, []
    for code in codes:
        expected.append((offset, struct.calcsize("<" + code)))
        offset += struct.calcsize("<" + code)
    rows = table("Frame")
    assert [(int(offset), int(size)) for offset, size, *_ in rows] == expected
    names = [name for _, _, name, _ in rows]
    assert names[0] == "magic"
    assert set(names[1:]) == set(Frame.__dataclass_fields__)
    for offset_text, size_text, name, _ in rows[1:]:
        low, high = int(offset_text), int(offset_text) + int(size_text)
        value = 40 if name == "header_bytes" else 0x51
        packed = Frame(**{"op": 0, **({} if name == "header_bytes" else {name: value})}).pack()
        assert int.from_bytes(packed[low:high], "little") == value, name


def test_the_bounds_of_a_frame() -> None:
    bounds = {name: meaning for _, _, name, meaning in table("Frame")}
    assert protocol.MAGIC.decode() in bounds["magic"]
    assert bounds["header_bytes"].startswith(f"{protocol.HEADER_BYTES};")
    assert str(protocol.MAX_HEADER_BYTES) in bounds["header_bytes"]
    assert str(protocol.MAX_KEYS) in bounds["count"]
    assert str(protocol.MAX_META_BYTES) in bounds["meta_bytes"]
    assert str(protocol.MAX_ADMIN_BYTES) in bounds["meta_bytes"]
    assert str(protocol.MAX_PAYLOAD_BYTES) in bounds["payload_bytes"]


def test_numbers() -> None:
    assert numbered("Operations") == {op.name: op.value for op in Op}
    assert {name: int(value) for value, name, *_ in table("Flags")} == {
        flag.name: flag.value for flag in Flag
    }
    assert numbered("Status") == {status.name: status.value for status in BlockStatus}
    assert numbered("Levels") == {level.name: level.value for level in Ack}
    assert numbered("Subscriptions") == {event.name: event.value for event in Event}
    assert "(1), `daemon`" in TEXT_IN_ONE_LINE
    assert protocol.VERSION == 1


def test_errors() -> None:
    for name, code, _ in table("Errors"):
        kind = getattr(errors, name)
        assert issubclass(kind, errors.KVStoreError)
        assert kind.exit_code == int(code), name


def test_roles() -> None:
    named = {row[0] for row in table("Roles")}
    assert named == {op.name for op in peers.ADMINISTRATIVE} | {"ADMIN"}
    for action in peers.PUBLIC_ACTIONS:
        assert f'everything but `{{"op": "{action}"}}`' in TEXT


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    with bare(tmp_path_factory.mktemp("doc")) as started:
        yield started


def test_limits(daemon: Bare) -> None:
    with Talker(daemon.socket) as talker:
        told = talker.json(Op.HELLO, version=1).json
    assert told["limits"]["pin_seconds"] == 0xFFFFFFFF, "we are an administrator"
    told["limits"]["pin_seconds"] = MAX_PIN_SECONDS
    assert told["limits"]["put_bytes"] == PUT_BYTES, "we have little memory"
    told["limits"]["put_bytes"] = MOST_PUT_BYTES
    assert {name: int(value) for name, value, _ in table("Limits")} == told["limits"]
    for field in told:
        assert f"`{field}`" in TEXT
    assert told["checksum"] in TEXT
    defaults = ServerOptions.__dataclass_fields__
    assert defaults["max_requests"].default == told["limits"]["requests"]


def test_the_example(daemon: Bare) -> None:
    frames = [bytes.fromhex(text) for text in re.findall(r"```hex\n(.*?)```", TEXT, re.DOTALL)]
    assert len(frames) == 4
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(daemon.socket))
        for sent, received in (frames[:2], frames[2:]):
            sock.sendall(sent)
            assert sock.recv(len(received), socket.MSG_WAITALL) == received


def test_links_lead_to_headings() -> None:
    headings = {
        re.sub(r"[^a-z0-9-]", "", title.lower().replace(" ", "-"))
        for title in re.findall(r"^#+ (.*)$", TEXT, flags=re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings

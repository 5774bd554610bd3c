"""Text from outside that is no text: halves of characters, other encodings, endless nesting."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import config, keys
from kvstore.errors import ConfigError, InvalidKey
from kvstore.namespaces import Namespaces
from kvstore.protocol import Op
from tests.command import COMMAND
from tests.talk import Bare, Talker, bare, head, put_parts

HALF = "\udfff"
BYTES = b"\xff"
ONE = head([b"k"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    with bare(tmp_path_factory.mktemp("text")) as started:
        yield started


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return {"a": value}


@pytest.mark.parametrize(
    ("op", "value"),
    [
        (Op.NAMESPACE, {"record": {"name": HALF}, "create": True}),
        (Op.NAMESPACE, {"record": {"name": HALF}}),
        (Op.NAMESPACE, {"record": {HALF: "x"}, "create": True}),
        (Op.NAMESPACE, {"record": {"a": [{"b": HALF}]}, "create": True}),
        (Op.NAMESPACE, {"record": {HALF: 1.5}, "create": True}),
        (Op.NAMESPACE, {"record": nested(33), "create": True}),
        (Op.NAMESPACE, {"record": nested(900), "create": True}),
        (Op.NAMESPACE, {"record": HALF}),
        (Op.REGISTER, {"bytes": HALF}),
        (Op.ADMIN, {"op": HALF}),
        (Op.ADMIN, {"op": "list", "handle": HALF}),
        (Op.ADMIN, {"op": "list", "start": HALF}),
    ],
)
def test_what_cannot_be_written_again_is_wrong_usage(
    daemon: Bare, op: Op, value: dict[str, Any]
) -> None:
    with Talker(daemon.socket) as talker:
        reply = talker.ask(op, json.dumps(value).encode())
        assert reply.error in ("UsageError", "InvalidKey")
        assert reply.json["code"] == 2
        assert talker.status()["failed_requests"] == 0


@pytest.mark.parametrize("depth", range(965, 985))
def test_no_depth_of_json_is_a_failure_of_the_daemon(daemon: Bare, depth: int) -> None:
    with Talker(daemon.socket) as talker:
        for raw in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
            reply = talker.ask(Op.NAMESPACE, b'{"record":{"a":' + raw + b"}}")
            assert reply.error in ("InvalidKey", "ProtocolError")
        assert talker.status()["failed_requests"] == 0


@pytest.mark.parametrize(
    "raw", ['{"op":"status"}'.encode("utf-16"), b'{"op":"\xed\xbf\xbf"}', b'{"op":"\xff"}']
)
def test_json_is_utf_8(daemon: Bare, raw: bytes) -> None:
    with Talker(daemon.socket) as talker:
        assert talker.ask(Op.ADMIN, raw).error == "ProtocolError"
        assert talker.status()["state"] == "ready"


def test_label_and_hints_of_a_put_are_text(daemon: Bare) -> None:
    meta, payload = put_parts([b"k"], [b"x"])
    fields = meta[:-2]
    hints = json.dumps({"session": HALF}).encode()
    with Talker(daemon.socket) as talker:
        for tail in (b"\1\xff\0", b"\3\xed\xbf\xbf\0", b"\0" + bytes([len(hints)]) + hints):
            assert talker.ask(Op.PUT, fields + tail, payload, **ONE).error == "UsageError"
        good = json.dumps({"session": "é"}).encode()
        meta = fields + b"\2\xc3\xa9" + bytes([len(good)]) + good
        assert talker.ask(Op.PUT, meta, payload, **ONE).meta == b"\0"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["put", "00ff", "-i", "-", "--label", BYTES], 2),
        (["get", BYTES], 2),
        (["serve", "--check-only", "--log-level", BYTES], 13),
        (["serve", "--check-only", "--workers", BYTES], 13),
        (["serve", "--check-only", "--memory", BYTES], 13),
        (["serve", "--check-only", "--admin-group", BYTES], 13),
        (["serve", "--check-only", "--listen", b"tcp://\xff:1"], 13),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_the_command(
    tmp_path: Path, arguments: list[str | bytes], code: int
) -> None:
    command = [COMMAND, "--socket", tmp_path / "none.sock", *arguments]
    ran = subprocess.run(command, input=b"x", capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (code, b"")
    assert b"internal error" not in ran.stderr


def test_settings_from_the_environment_are_text() -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load({}, {"KVSTORE_LOG_LEVEL": "\udcff"})


def test_a_record_may_be_nested_as_deep_as_anyone_needs() -> None:
    assert keys.canonical(nested(31))
    with pytest.raises(InvalidKey, match="nested too deep"):
        keys.canonical(nested(32))


def test_the_file_of_the_largest_record_can_be_read_again(tmp_path: Path) -> None:
    made = Namespaces(tmp_path)
    records: list[dict[str, object]] = [
        {"a": [1] * 32_700},
        {"a": [{}] * 21_000},
        {"a": nested(29), **{f"b{n}": nested(29) for n in range(330)}},
    ]
    for record in records:
        assert 50_000 < len(keys.canonical(record)) < keys.MAX_NAMESPACE_RECORD_BYTES
        made.open(record, create=True)
    again = Namespaces(tmp_path)
    again.load()
    assert again.problems == []
    assert all(again.by_id(keys.namespace_id(record)) for record in records)

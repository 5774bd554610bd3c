"""What people and scripts read: numbers, tables, JSON, error lines, colour, files."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore import logs, render
from kvstore.errors import UsageError
from kvstore.render import Output


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (2 << 20, "2 MiB"),
        (10 << 30, "10 GiB"),
        (1 << 62, "4096 PiB"),
    ],
)
def test_size(number: int, text: str) -> None:
    assert render.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.00085, "850 us"),
        (0.0125, "12.5 ms"),
        (0.9996, "1 s"),
        (3.21, "3.21 s"),
        (60, "60 s"),
        (600, "10 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


def test_count() -> None:
    assert render.count(1, "block") == "1 block"
    assert render.count(12000, "block") == "12,000 blocks"
    assert [render.count(n, "miss", "misses") for n in (1, 2)] == ["1 miss", "2 misses"]


def test_table_aligns_numbers_right_and_words_left() -> None:
    assert render.table(["name", "bytes"], [("a", 1000), ("long name", 7)]) == [
        "name       bytes",
        "a          1,000",
        "long name      7",
    ]
    assert render.table(["a", "b"], []) == ["a  b"]


def test_fields() -> None:
    assert render.fields([("a", 1), ("long", "x"), ("none", "")]) == ["a     1", "long  x", "none"]


def test_result_is_one_json_document_or_lines(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"n": np.int64(3), "list": np.arange(2), "key": b"\xff", "path": Path("/x")}
    Output(json=True).result(document, ["line"])
    assert json.loads(capsys.readouterr().out) == {
        "n": 3,
        "list": [0, 1],
        "key": "ff",
        "path": "/x",
    }
    Output().result(document, ["line", "next"])
    assert capsys.readouterr().out == "line\nnext\n"
    with pytest.raises(TypeError, match="object"):
        Output(json=True).result({"x": object()}, [])


@pytest.mark.parametrize("number", [0, 1, 3])
def test_stream_is_one_json_document_or_lines(
    capsys: pytest.CaptureFixture[str], number: int
) -> None:
    items = [({"key": str(n)}, f"line {n}") for n in range(number)]
    assert Output(json=True).stream("blocks", items) == number
    parsed = json.loads(capsys.readouterr().out)
    assert parsed == {"blocks": [{"key": str(n)} for n in range(number)], "count": number}
    Output().stream("blocks", items)
    assert capsys.readouterr().out == "".join(f"line {n}\n" for n in range(number))


def test_error_line_and_json_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output().error("StoreLocked", 11, "store /s is locked by pid 1", "stop it or use --socket")
    assert capsys.readouterr().err == (
        "kvstore: store /s is locked by pid 1. Stop it or use --socket.\n"
    )
    Output().error("X", 1, "no such option '-x'. Did you mean '-y'?", "see 'kvstore --help'")
    assert capsys.readouterr().err.endswith("Did you mean '-y'? See 'kvstore --help'.\n")
    Output().error("X", 1, "without advice")
    assert capsys.readouterr().err == "kvstore: without advice\n"
    Output(json=True).error("StoreLocked", 11, "locked", "stop it")
    captured = capsys.readouterr()
    assert json.loads(captured.err) == {
        "type": "error",
        "code": 11,
        "error": "StoreLocked",
        "message": "locked",
        "hint": "stop it",
    }
    assert captured.out == ""


def test_quiet_keeps_json_and_text_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Output(quiet=True).result({"a": 1}, ["line"])
    assert capsys.readouterr().out == ""
    Output(quiet=True, json=True).result({"a": 1}, ["line"])
    Output(quiet=True).text("help")
    assert capsys.readouterr().out == '{"a": 1}\nhelp\n'


def test_closed_stdout_is_told_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    Output(quiet=True).check_stdout()
    Output(quiet=True).result({}, ["line"])
    for act in (Output().check_stdout, Output(quiet=True, json=True).check_stdout):
        with pytest.raises(UsageError, match="stdout is closed"):
            act()
    with pytest.raises(UsageError, match="stdout is closed"):
        render.write_bytes(b"x", "-")
    assert not render.stdout_is_terminal()
    Output().flush()
    Output().abandon()


def test_notes_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).note("a")
    Output(quiet=True).note("b")
    Output().note("c")
    assert capsys.readouterr() == ("", "c\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("color", "terminal", "no_color", "wanted"),
    [
        ("auto", True, None, True),
        ("auto", True, "", True),
        ("auto", True, "1", False),
        ("auto", False, None, False),
        ("always", False, "1", True),
        ("never", True, None, False),
    ],
)
def test_color(
    monkeypatch: pytest.MonkeyPatch, color: str, terminal: bool, no_color: str | None, wanted: bool
) -> None:
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal() if terminal else io.StringIO()
    assert Output(color=color).wants_color(stream) is wanted
    assert Output(color=color).style("x", "red", stream) == ("\033[31mx\033[0m" if wanted else "x")


def test_trace_needs_vv(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("deep")
    except ValueError:
        Output(verbose=1).trace()
        assert capsys.readouterr().err == ""
        Output(verbose=2).trace()
    assert "ValueError: deep" in capsys.readouterr().err


def test_written_file_is_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "block"
    render.write_bytes(b"first", str(target))
    target.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(target)
    render.write_bytes(memoryview(b"second"), str(link))
    assert target.read_bytes() == b"second"
    assert target.stat().st_mode & 0o777 == 0o600
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block", "link"]


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent" / "block")
    with pytest.raises(FileNotFoundError) as caught:
        render.write_bytes(b"x", absent)
    assert caught.value.filename == absent
    with pytest.raises(IsADirectoryError):
        render.write_bytes(b"x", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_devices_are_written_in_place() -> None:
    render.write_bytes(b"x", os.devnull)
    assert not Path(os.devnull).is_file()


@pytest.fixture
def _root_logger() -> object:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def test_progress_tells_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0, 10.0, 25.0, 25.0])
    monkeypatch.setattr("kvstore.render.time.monotonic", lambda: next(now))
    with Output().progress(1000, "block") as progress:
        progress.add(100)
        progress.add(900)
    assert capsys.readouterr().err.splitlines() == [
        "100 blocks of 1,000 blocks, about 90 s left",
        "1,000 blocks of 1,000 blocks",
    ]


@pytest.mark.usefixtures("_root_logger")
def test_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.start_logging("info", "text")
    logging.getLogger("kvstore.x").info("ready in %d ms", 5)
    logging.getLogger("kvstore.x").debug("not shown")
    assert stream.getvalue().endswith("Z info: ready in 5 ms\n")
    assert stream.getvalue().count("\n") == 1

    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    logs.start_logging("info", "text")
    logging.getLogger("kvstore.x").warning("plain")
    assert stream.getvalue().endswith("\nwarning: plain\n")


@pytest.mark.usefixtures("_root_logger")
def test_json_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.start_logging("debug", "json")
    try:
        raise ValueError("deep")
    except ValueError:
        logging.getLogger("kvstore.x").exception("it failed:\nbadly")
    (line,) = stream.getvalue().splitlines()
    parsed = json.loads(line)
    assert parsed["time"].endswith("Z")
    assert (parsed["level"], parsed["logger"]) == ("error", "kvstore.x")
    assert parsed["message"] == "it failed:\nbadly"
    assert "ValueError: deep" in parsed["exception"]

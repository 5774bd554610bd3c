"""What commands print with --json against docs/json.md, their help against docs/cli.md."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import config
from kvstore.commands import reference, shapes
from kvstore.commands.documents import DOCUMENTS, ERROR, LINES, RECOVERING
from kvstore.commands.shapes import unlike
from kvstore.commands.tree import kvstore
from kvstore.commands.watch import percentile, rates
from kvstore.quantities import Duration
from tests.command import COMMAND, Daemon, Ran, run_command

DOCS = Path(__file__).parent.parent / "docs"
NAMES = [words[1:] for words, _ in reference.commands(("kvstore",), kvstore)]
GROUPS = {(), ("bench",), ("config",), ("scrub",), ("trace",)}
TRACE = str(Path(__file__).parent / "golden" / "traces" / "mixed.jsonl.gz")
ONLINE = [
    ["status"],
    ["status", "--watch", "--count", "1"],
    ["top", "--count", "1"],
    ["put", "00ff", "-i", "/etc/hostname"],
    ["get", "00ff", "-o", "/dev/null"],
    ["contains", "00ff"],
    ["list"],
    ["delete", "00ff"],
    ["evict", "--all", "-y"],
    ["warm", "--recent", "1MiB"],
    ["pin", "00ff"],
    ["unpin", "00ff"],
    ["pins"],
    ["quota", "default"],
    ["flush"],
    ["scrub", "start"],
    ["scrub", "pause"],
    ["scrub", "stop"],
    ["scrub", "status"],
    ["scrub", "ack"],
    ["trace", "record", "-o", "/dev/null", "--for", "1s"],
]
"""A call of every command that asks the daemon; ``inspect`` reads the store if there is none."""
OFFLINE = [
    ["engines"],
    ["doctor"],
    ["config", "check"],
    ["config", "show"],
    ["config", "example"],
    ["completion", "bash"],
    ["version"],
    ["replay", TRACE],
    ["replay", TRACE, "--sweep"],
    ["trace", "generate", "chat", "--requests", "5", "-o", "/dev/null"],
]


def ids(call: Sequence[str]) -> str:
    return " ".join(call)


# -- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_pages_are_what_the_commands_make(name: str) -> None:
    assert (DOCS / name).read_text() == reference.PAGES[name](), "run make docs"


def test_the_page_has_what_the_real_command_prints() -> None:
    page = (DOCS / "cli.md").read_text()
    for words in ((), ("evict",), ("config", "show")):
        assert run_command(*words, "--help").text in page


def test_every_command_says_what_its_json_holds() -> None:
    told = {
        " ".join(re.split(" -| KEY| IMPORTER", name)[0].split()) for name in (*DOCUMENTS, *LINES)
    }
    # bench prints measurements; serve runs until it is stopped.
    assert {
        " ".join(words) for words in NAMES if words not in GROUPS and words[0] != "bench"
    } == told


def test_every_command_is_tried_here() -> None:
    tried = {
        tuple(call[:2]) if (call[0],) in GROUPS else (call[0],) for call in (*ONLINE, *OFFLINE)
    }
    apart = {("serve",), ("create",), ("inspect",), ("migrate",), ("recover",), ("fsck",)}
    assert tried | apart == {
        words for words in NAMES if words not in GROUPS and words[0] != "bench"
    }


# -- documents ------------------------------------------------------------------------------------


def check(ran: Ran, name: str, code: int = 0) -> None:
    assert ran.code == code, ran.stderr
    assert unlike(ran.json(), DOCUMENTS[name]) == []
    assert ran.stderr == "" or code


def test_documents_are_as_documented(daemon: Daemon, tmp_path: Path) -> None:
    source, keys = tmp_path / "in", ["00ff12ab", "00ff12ac"]
    source.write_bytes(b"x" * 5000)
    check(daemon.run("put", keys[0], "-i", source, "--label", "a", "--json", "--wait"), "put")
    chained = ["--parent", keys[0], "--wait"]
    check(daemon.run("put", keys[1], "-i", source, "--json", *chained), "put")
    check(daemon.run("get", keys[0], "-o", tmp_path / "out", "--json"), "get")
    check(daemon.run("contains", *keys, "--json"), "contains")
    check(daemon.run("contains", "--prefix", *keys, "--json"), "contains --prefix")
    check(daemon.run("list", "--json"), "list")
    check(daemon.run("status", "--json"), "status")
    check(daemon.run("pin", keys[0], "--json"), "pin")
    check(daemon.run("pins", "--json"), "pins")
    check(daemon.run("quota", "default", "1GiB", "--json"), "quota")
    check(daemon.run("evict", "--all", "-n", "--json"), "evict", 3)
    check(daemon.run("unpin", keys[0], "--json"), "unpin")
    check(daemon.run("flush", "--json"), "flush")
    check(daemon.run("scrub", "start", "--wait", "--json"), "scrub start --wait")
    check(daemon.run("scrub", "start", "--rate", "1", "--json"), "scrub start")
    for action in ("pause", "status", "stop", "ack"):
        check(daemon.run("scrub", action, "--json"), f"scrub {action}")
    for chosen in ([], [str(daemon.store)]):
        if chosen:
            assert daemon.stop() == 0
        check(daemon.run("inspect", *chosen, "--json"), "inspect")
        check(daemon.run("inspect", *chosen, "--namespaces", "--json"), "inspect --namespaces")
        check(daemon.run("inspect", *chosen, keys[0], "--json"), "inspect KEY")
        check(daemon.run("inspect", *chosen, keys[1], "--tree", "--json"), "inspect KEY --tree")
    daemon.start()
    check(daemon.run("warm", "--recent", "1MiB", "-n", "--json"), "warm -n")
    check(daemon.run("warm", "--recent", "1MiB", "--json"), "warm")
    check(daemon.run("delete", *keys, "--json"), "delete")
    check(daemon.run("evict", "--all", "-y", "--json"), "evict")


@pytest.mark.parametrize("call", OFFLINE, ids=ids)
def test_documents_that_need_no_daemon(call: list[str]) -> None:
    words = 2 if (call[0],) in GROUPS or call[-1] == "--sweep" else 1
    name = " ".join([word for word in call if word != TRACE][:words])
    check(run_command(*call, "--json"), name)
    assert run_command(*call).code == 0


def test_documents_of_creating_and_checking(tmp_path: Path) -> None:
    check(run_command("create", tmp_path / "new", "--capacity", "64MiB", "--json"), "create")
    check(run_command("serve", "--check-only", "--json"), "serve --check-only")
    bad = run_command("config", "check", "--json", env={"KVSTORE_CAPACITY": "1GB"})
    check(bad, "config check", 13)


def test_lines_are_as_documented(daemon: Daemon) -> None:
    for call in (["status", "--watch", "100ms"], ["top", "--interval", "100ms"]):
        ran = daemon.run(*call, "--count", "3", "--json")
        assert ran.code == 0, ran.stderr
        lines = [json.loads(line) for line in ran.text.splitlines()]
        sample, summary = LINES[call[0] + " --watch" * (call[0] == "status")]
        assert [unlike(line, sample) for line in lines[:-1]] == [[], [], []]
        assert unlike(lines[-1], summary) == []
        assert (lines[-1]["type"], lines[-1]["samples"]) == ("summary", 3)


def test_status_while_the_store_is_opened_is_documented(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    document = {**daemon.status(), "phase": "x", "scanned": 1}
    assert unlike({name: document.get(name) for name in RECOVERING}, RECOVERING) == []
    assert daemon.stop() == 0


def test_differences_are_found() -> None:
    """The negative control of the tests above."""
    right = {"deleted": 1, "absent": 0}
    assert unlike(right, DOCUMENTS["delete"]) == []
    assert unlike({**right, "more": 1}, DOCUMENTS["delete"]) == ["more is not documented"]
    assert unlike({"deleted": 1}, DOCUMENTS["delete"]) == ["absent is missing"]
    for wrong in ("1", None, True, 1.5):
        assert unlike({**right, "absent": wrong}, DOCUMENTS["delete"])
    assert unlike({"blocks": [{"shard": 0}], "count": 1}, DOCUMENTS["list"])
    assert unlike({"contains": {"00": 1}, "present": 1}, DOCUMENTS["contains"])
    assert shapes.faults("xyz", "hex")


# -- rules that commands share --------------------------------------------------------------------


@pytest.mark.parametrize("call", ONLINE, ids=ids)
def test_without_a_daemon_it_is_12(tmp_path: Path, call: list[str]) -> None:
    ran = run_command("--socket", tmp_path / "none", *call, "--json")
    assert (ran.code, ran.stdout) == (12, b"")
    assert unlike(json.loads(ran.stderr), ERROR) == []


@pytest.mark.parametrize("call", [*ONLINE, *OFFLINE], ids=ids)
def test_an_unknown_option_is_2(call: list[str]) -> None:
    ran = run_command(*call, "--bogus", "--json")
    assert (ran.code, ran.stdout) == (2, b"")
    assert unlike(json.loads(ran.stderr), ERROR) == []


@pytest.mark.parametrize("call", [*ONLINE, *OFFLINE], ids=ids)
def test_a_closed_stdout_is_2(tmp_path: Path, call: list[str]) -> None:
    if call[0] == "get":
        pytest.skip("its result is in the file")
    line = " ".join(["exec", str(COMMAND), "--socket", str(tmp_path / "none"), *call, ">&-"])
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "stdout is closed" in done.stderr


@pytest.mark.parametrize("call", [["pins"], ["warm", "--recent", "1MiB", "-n"], ["top"], ["list"]])
def test_a_reader_that_leaves_is_141(daemon: Daemon, call: list[str]) -> None:
    daemon.run("put", "00ff", "-i", "-", "--wait", stdin=b"x")
    daemon.run("pin", "00ff")
    command = " ".join([str(COMMAND), "--socket", str(daemon.socket), *call])
    done = subprocess.run(
        ["bash", "-c", f"{command} | :; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (["evict"], "--to-size"),
        (["evict", "--to-size", "1GB"], "GiB"),
        (["evict", "--older-than", "soon"], "--older-than"),
        (["evict", "--chain", "00", "--subtree", "00"], "exclude"),
        (["evict", "--all", "--chain", "00"], "--all"),
        (["evict", "--all", "--shard", "1"], "--shard"),
        (["evict", "--all", "--namespace", "@/nowhere"], "/nowhere"),
        (["warm"], "--from"),
        (["warm", "--from", "x", "--recent", "1MiB"], "one source"),
        (["warm", "--from", "/nowhere/list"], "/nowhere/list"),
        (["warm", "--tokens", "x"], "--tokens"),
        (["warm", "--tokens", "x", "--from", "y"], "one source"),
        (["warm", "--tokens", "x", "--namespace", "n", "--recent", "1MiB"], "one source"),
        (["warm", "--recent", "1MiB", "--rate", "0"], "--rate"),
        (["warm", "--recent", "1MiB", "--rate", "fast"], "--rate"),
        (["pin"], "no block is named"),
        (["pin", "00", "--for", "0"], "--for"),
        (["pin", "00", "--for", "1000000h"], "--for"),
        (["pin", "0g"], "'0g'"),
        (["unpin", "00", "0000"], "one batch"),
        (["top", "--interval", "0"], "--interval"),
        (["top", "--count", "0"], "--count"),
        (["status", "--watch", "never"], "--watch"),
        (["status", "--count", "3"], "--watch"),
        (["inspect", "--tree"], "--tree"),
        (["inspect", "aabbccdd", "aabbccde"], "two keys"),
        (["inspect", "/a", "/b"], "two stores"),
        (["inspect", "aabbccdd", "--shard", "65536"], "--shard"),
        (["completion", "tcsh"], "tcsh"),
        (["completion"], "missing argument 'bash|zsh|fish'. Choose from: bash, zsh, fish"),
        (["config", "nothing"], "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_2_and_says_what(call: list[str], says: str) -> None:
    ran = run_command(*call, "--json")
    assert (ran.code, ran.stdout) == (2, b""), ran.stderr
    line = json.loads(ran.stderr)
    assert says in line["message"] + line["hint"]
    assert line["hint"]


@pytest.mark.parametrize(
    "line",
    ["00ff 1", "x", "zz 0 00", "00112233445566778899aabbccddeeff 65536 00", "a b c d", "0"],
)
def test_a_bad_line_of_a_list_is_named(line: str) -> None:
    ran = run_command("warm", "--from", "-", stdin=f"00ff\n\n{line}\n".encode())
    assert ran.code == 2
    assert "line 3" in ran.stderr


def test_ctrl_c_ends_what_goes_on_for_ever(daemon: Daemon) -> None:
    for call in (["top", "--json"], ["status", "--watch", "--json"]):
        command = [str(COMMAND), "--socket", str(daemon.socket), *call]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert json.loads(out.splitlines()[-1])["type"] == "summary"
        assert json.loads(err)["error"] == "Interrupted"


def test_watching_clears_a_terminal_only(daemon: Daemon) -> None:
    assert "\033" not in daemon.run("status", "--watch", "100ms", "--count", "2").text
    leader, follower = pty.openpty()
    command = [str(COMMAND), "--socket", str(daemon.socket), "status", "--watch", "--count", "1"]
    try:
        assert subprocess.run(command, stdout=follower, timeout=60).returncode == 0
        assert os.read(leader, 20).startswith(b"\033[H\033[J")
    finally:
        os.close(leader)
        os.close(follower)


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(daemon: Daemon) -> None:
    daemon.run("put", "00ff", "-i", "-", "--wait", stdin=b"x")
    call = ["warm", "--recent", "1MiB"]
    assert daemon.run(*call).stderr == ""
    for extra, shown in (([], True), (["-q"], False), (["--json"], False)):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        os.set_blocking(leader, False)
        command = [str(COMMAND), "--socket", str(daemon.socket), *call, *extra]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, timeout=60)
            assert done.returncode == 0
            time.sleep(0.1)
            try:
                bar = os.read(leader, 1000)
            except BlockingIOError:
                bar = b""
        finally:
            os.close(leader)
            os.close(follower)
        assert (b"1/1" in bar or b"0/1" in bar) is shown, bar


# -- top ------------------------------------------------------------------------------------------


def test_percentiles_lie_within_their_bucket() -> None:
    buckets = [0] * 32
    assert percentile(buckets, 0.5) is None
    buckets[10] = 99  # 512 to 1024 us
    buckets[20] = 1
    assert 0.000512 < (percentile(buckets, 0.5) or 0) < 0.001024
    assert (percentile(buckets, 0.99) or 0) == pytest.approx(0.001024)
    assert 0.5 < (percentile(buckets, 1.0) or 0) < 1.1


def test_rates_are_of_the_time_between_two_answers() -> None:
    first = {"pid": 1, "uptime_seconds": 10.0, "hits": 50, "misses": 50, "read_bytes": 1000}
    second = {"pid": 1, "uptime_seconds": 12.0, "hits": 70, "misses": 50, "read_bytes": 5000}
    since_start, since_then = rates(first, {}), rates(second, first)
    assert (since_start["gets_per_second"], since_start["hit_ratio"]) == (10.0, 0.5)
    assert (since_then["gets_per_second"], since_then["hit_ratio"]) == (10.0, 1.0)
    assert since_then["read_bytes_per_second"] == 2000.0
    anew = {**second, "pid": 2, "uptime_seconds": 1.0, "hits": 5, "misses": 0}
    assert rates(anew, second)["gets_per_second"] == 5.0


def test_top_shows_what_happens(daemon: Daemon) -> None:
    daemon.run("put", "00ff", "-i", "-", "--wait", stdin=b"x" * 5000)
    daemon.run("get", "00ff", "-o", "/dev/null")
    ran = daemon.run("top", "--interval", "100ms", "--count", "2")
    head, first, _ = ran.text.splitlines()
    assert head.split()[:3] == ["time", "get/s", "put/s"]
    assert "100.0" in first
    sample = json.loads(daemon.run("top", "--count", "1", "--json").text.splitlines()[0])
    assert 0 < sample["get_p50_seconds"] <= sample["get_p99_seconds"]


# -- config, completion ---------------------------------------------------------------------------


def test_the_example_holds_every_setting_with_its_default(tmp_path: Path) -> None:
    text = run_command("config", "example").text
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    environment = {"KVSTORE_CONFIG": str(file)}
    plain = run_command("config", "show", "--json").json()
    assert run_command("config", "show", "--json", env=environment).json() == plain
    assert "read and written: auto, direct, buffered or mmap.\n# io = " in text
    # All of it taken in: sizes, times and words are spelled as they are read.
    lines = [
        line[2:] if line.startswith("# ") and " = " in line else line for line in text.splitlines()
    ]
    file.write_text("\n".join(lines))
    loaded = config.load({"config": str(file)}, {})
    assert {str(place) for place in loaded.origins.values()} == {str(file)}
    assert loaded.settings.memory == config.GIB
    assert loaded.settings.drain_timeout == Duration(60)


def test_check_names_each_problem(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('capacity = "1GB"\nworkers = 0\nbogus = 1\n')
    ran = run_command("--config", file, "config", "check")
    assert ran.code == 13
    for name in ("capacity", "workers", "bogus"):
        assert f"setting {name}" in ran.text or f"setting '{name}'" in ran.text
    assert ran.text.count("problem: ") == 3
    file.write_text('capacty = "1GiB"\n')
    found = run_command("--config", file, "config", "check").text
    assert found.endswith(" is unknown. Did you mean 'capacity'?\n")
    assert run_command("--config", "/nowhere.toml", "config", "check").code == 13
    assert run_command("--config", "/nowhere.toml", "config", "show").code == 13
    file.write_text('memory = "100TiB"\n')
    assert "above 80 %" in run_command("--config", file, "config", "check").text


def test_show_tells_origins() -> None:
    ran = run_command("config", "show", "--origin", env={"KVSTORE_WORKERS": "7"})
    assert "workers" in ran.text
    assert "KVSTORE_WORKERS" in ran.text
    found = run_command("config", "show", "--json", env={"KVSTORE_WORKERS": "7"}).json()["settings"]
    assert isinstance(found, list)
    (workers,) = (one for one in found if one["name"] == "workers")
    expected = {
        "value": 7,
        "origin": "KVSTORE_WORKERS",
        "source": "environment",
        "change": "restart",
    }
    assert workers == {"name": "workers", **expected}


def test_completion_completes() -> None:
    script = run_command("completion", "bash").text
    assert "complete" in script
    done = subprocess.run(
        ["bash", "-c", f'{script}\nCOMP_WORDS=(kvstore ev) COMP_CWORD=1\n_kvstore_completion "$@"; '
         'echo "${COMPREPLY[@]}"', "kvstore", "kvstore"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"},
        timeout=60,
    )  # fmt: skip
    assert done.stdout == "evict\n", done.stderr

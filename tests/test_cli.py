"""The real command, as people and scripts meet it: help, flags, exit codes, output."""

from __future__ import annotations

import ast
import grp
import json
import os
import pty
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

import kvstore
from kvstore import config, errors, node, render
from kvstore.commands import daemon as daemon_commands
from kvstore.commands import tree as commands
from kvstore.commands import watch
from kvstore.commands.frame import EXIT_STATUS, Call, Help
from kvstore.config import Origin, Settings, Source
from kvstore.protocol import Op
from tests.command import COMMAND, Daemon, Ran, run_command
from tests.talk import Shared, Talker, free_port

HELP_SECONDS = 0.15
KEY = "00ff"
SILENT = Ran(0, b"", "")


def all_commands() -> Iterator[tuple[list[str], Help]]:
    """Yield every command with the words that call it."""

    def walk(words: list[str], command: click.Command) -> Iterator[tuple[list[str], Help]]:
        assert isinstance(command, Help)
        yield words, command
        if isinstance(command, click.Group):
            for name, below in command.commands.items():
                yield from walk([*words, name], below)

    yield from walk([], commands.kvstore)


COMMANDS = list(all_commands())
NAMES = [" ".join(["kvstore", *words]) for words, _ in COMMANDS]


# -- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=NAMES)
def test_help_has_an_example_and_the_exit_codes(words: list[str], command: Help) -> None:
    ran = run_command(*words, "--help")
    assert (ran.code, ran.stderr) == (0, "")
    assert "Example:" in ran.text
    block = ran.text.split("EXIT STATUS:")[1]
    codes = {int(line.split()[0]) for line in block.splitlines() if line.strip()[:1].isdigit()}
    assert codes == set(command.exits) <= set(EXIT_STATUS)
    assert {0, 2} <= codes
    assert 141 in codes or words == ["serve"], "whoever answers may lose the reader"
    listed = ran.text.partition("\nCommands:\n")[2].partition("\n\n")[0]
    assert "..." not in listed, "a summary was cut"


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=NAMES)
def test_examples_in_help_are_accepted(words: list[str], command: Help) -> None:
    calls = [part for line in command.example.splitlines() for part in line.split("|")]
    calls = [call.split(">")[0] for call in calls if call.strip().startswith("kvstore")]
    assert calls
    for call in calls:
        named, rest = called(shlex.split(call)[1:])
        named.make_context(named.name, rest, obj=Call())


def called(tokens: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that a line calls, and what follows it."""
    command: click.Command = commands.kvstore
    for number, token in enumerate(tokens):
        if isinstance(command, click.Group) and token in command.commands:
            command, rest = command.commands[token], tokens[number + 1 :]
    assert not isinstance(command, click.Group), tokens
    return command, rest


def test_exit_codes_of_errors_are_in_the_table() -> None:
    def tree(kind: type[errors.KVStoreError]) -> Iterator[type[errors.KVStoreError]]:
        yield kind
        for below in kind.__subclasses__():
            yield from tree(below)

    assert {kind.exit_code for kind in tree(errors.KVStoreError)} <= set(EXIT_STATUS)


def test_help_is_quick() -> None:
    # Processor time: what else runs on this machine is not our fault.
    assert min(processor_seconds([str(COMMAND), "--help"]) for _ in range(5)) < HELP_SECONDS


def test_the_tree_says_of_each_command_what_it_says_of_itself() -> None:
    for name, place in commands.PLACES.items():
        assert commands.kvstore.commands[name].get_short_help_str(200) == place.summary


def processor_seconds(command: list[str]) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, kvstore.commands.tree; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "asyncio", "msgspec", "tqdm", "lmdb", "kvstore.server", "tomllib"}


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=NAMES)
def test_h_is_help(words: list[str], command: Help) -> None:
    assert run_command(*words, "-h").stdout == run_command(*words, "--help").stdout


def test_hints_name_commands_that_exist() -> None:
    """A hint that names a command of a later version sends people nowhere."""
    known = {words[0] for words, _ in COMMANDS if words}
    advice = re.compile(r"(?:run|see|with|by) kvstore ([a-z]+)")
    for path in Path(kvstore.__file__).parent.rglob("*.py"):
        for text in hints(path):
            assert set(advice.findall(text)) <= known, (path.name, text)


def hints(path: Path) -> Iterator[str]:
    """Yield the strings of a source file, those that explain the source apart."""
    tree = ast.parse(path.read_text())
    explaining = {id(part.value) for part in ast.walk(tree) if isinstance(part, ast.Expr)}
    for part in ast.walk(tree):
        if isinstance(part, ast.JoinedStr):
            yield "".join(str(p.value) for p in part.values if isinstance(p, ast.Constant))
        elif isinstance(part, ast.Constant) and id(part) not in explaining:
            yield str(part.value)


def test_version_before_and_after_the_command() -> None:
    for arguments in (["--version"], ["status", "--version"]):
        ran = run_command(*arguments)
        assert (ran.code, ran.text) == (0, f"kvstore {kvstore.__version__}\n")


# -- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "--bogus"),
        (["frobnicate"], "frobnicate"),
        (["put"], "'KEY'"),
        (["put", KEY], "--input"),
        (["put", "xyz", "-i", "-"], "'xyz'"),
        (["put", "", "-i", "-"], "0 bytes"),
        (["put", "aa" * 65, "-i", "-"], "65 bytes"),
        (["put", KEY, "-i", "-"], f"block {KEY} has 0 bytes"),
        (["put", KEY, "-i", "/nowhere/file"], "/nowhere/file"),
        (["put", KEY, "-i", "/"], "input /"),
        (["put", KEY, "-i", "-", "--shard", "65536"], "65536"),
        (["put", KEY, "-i", "-", "--shard", "x"], "--shard"),
        (["put", KEY, "-i", "-", "--parent", "0"], "'0'"),
        (["put", KEY, "-i", "-", "--label", "ä" * 128], "label"),
        (["get", KEY, "-o", "/dev/null", "--namespace", ""], "namespace"),
        (["get", KEY, "-o", "/dev/null", "--namespace", "@/nowhere.json"], "/nowhere.json"),
        (["contains"], "KEY"),
        (["contains", "00", "0011"], "one batch"),
        (["delete", "0g"], "'0g'"),
        (["list", "--limit", "-1"], "--limit"),
        (["inspect", "/a", "--store", "/b"], "two stores"),
        (["create", "/a", "--store", "/b"], "two stores"),
        (["bench", "demo", "--block-size", "1GB"], "GiB"),
        (["bench", "demo", "--block-size", "65MiB"], "68157440"),
        (["bench", "demo", "--dir", "/nowhere/demo"], "/nowhere"),
        (["status", "--color", "sometimes"], "sometimes"),
        (["list", "--quite"], "--quiet"),
        (["list", "--quiet", "--limits", "3"], "--limit"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_wrong_usage_is_2_and_says_what(arguments: list[str], says: str) -> None:
    ran = run_command(*arguments)
    assert (ran.code, ran.stdout) == (2, b""), ran.stderr
    assert ran.stderr.startswith("kvstore: ")
    assert says in ran.stderr
    assert ran.stderr.count("\n") == 1
    ran = run_command(*arguments, "--json")
    assert (ran.code, ran.stdout) == (2, b"")
    line = json.loads(ran.stderr)
    assert (line["type"], line["code"]) == ("error", 2)
    assert says in line["message"] + line["hint"]
    assert line["hint"]


def test_block_over_64_mib_is_refused(tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate((64 << 20) + 1)
    ran = run_command("put", KEY, "-i", big)
    assert ran.code == 2
    assert "more than 67108864 bytes" in ran.stderr


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1.5}', '{"a": null}'])
def test_bad_namespace_record_is_2(tmp_path: Path, text: str) -> None:
    file = tmp_path / "namespace.json"
    file.write_text(text)
    ran = run_command("get", KEY, "-o", "-", "--namespace", f"@{file}")
    assert ran.code == 2
    assert "namespace" in ran.stderr


def test_no_command_shows_the_help_on_stderr() -> None:
    ran = run_command()
    assert (ran.code, ran.stdout) == (2, b"")
    assert "Commands:" in ran.stderr


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--capacity", "12XB"], {}, "setting capacity (--capacity)"),
        (["--capacity", "10MiB"], {}, "less than 64 MiB"),
        (["--memory", "1000TiB"], {}, "setting memory (--memory)"),
        (["--io", "fast"], {}, "setting io (--io)"),
        ([], {"KVSTORE_WORKERS": "0"}, "setting workers (KVSTORE_WORKERS)"),
        ([], {"KVSTORE_CAPACTY": "1GiB"}, "KVSTORE_CAPACTY"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
        (["--socket", "/" + "x" * 120], {}, "121 bytes"),
    ],
)
def test_bad_setting_is_13(
    tmp_path: Path, arguments: list[str], env: dict[str, str], says: str
) -> None:
    store = tmp_path / "store"
    ran = run_command("serve", "--store", store, *arguments, env=env)
    assert ran.code == 13, ran.stderr
    assert says in ran.stderr
    assert not store.exists()


def test_check_only_starts_nothing(tmp_path: Path) -> None:
    ran = run_command("serve", "--store", tmp_path / "store", "--check-only")
    assert (ran.code, ran.text) == (0, "settings are valid\n")
    assert list(tmp_path.iterdir()) == []


def test_unknown_setting_in_the_default_file_is_13(tmp_path: Path) -> None:
    folder = tmp_path / "kvstore"
    folder.mkdir()
    (folder / "kvstore.toml").write_text("capcity = 1")
    ran = run_command("serve", "--check-only", env={"CONFIGURATION_DIRECTORY": str(folder)})
    assert ran.code == 13
    assert "'capcity'" in ran.stderr
    assert "Did you mean 'capacity'?" in ran.stderr


# -- nobody there, interruption, terminals --------------------------------------------------------


@pytest.mark.parametrize("place", [[], ["after"]])
def test_no_daemon_is_12_with_the_socket_named(tmp_path: Path, place: list[str]) -> None:
    socket = tmp_path / "kv.sock"
    flags: list[str | Path] = ["--socket", socket, "--json"]
    ran = run_command("status", *flags) if place else run_command(*flags, "status")
    assert (ran.code, ran.stdout) == (12, b"")
    line = json.loads(ran.stderr)
    assert (line["type"], line["code"], line["error"]) == ("error", 12, "DaemonUnavailable")
    assert str(socket) in line["message"]
    assert line["hint"]


def test_socket_comes_from_environment_and_file(tmp_path: Path) -> None:
    ran = run_command("status", env={"KVSTORE_SOCKET": str(tmp_path / "env.sock")})
    assert ran.code == 12
    assert "env.sock" in ran.stderr
    file = tmp_path / "kv.toml"
    file.write_text(f'socket = "{tmp_path}/file.sock"\n')
    ran = run_command("status", "--config", file)
    assert "file.sock" in ran.stderr


def test_interrupt_is_130_with_one_line(tmp_path: Path) -> None:
    command = [str(COMMAND), "--socket", str(tmp_path / "s"), "put", KEY, "-i", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"x" * (1 << 20))  # more than a pipe holds, so it is being read
        process.stdin.flush()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        code = process.wait(10)
        lines = process.stderr.read().decode().strip().splitlines()
    assert code == 130
    assert lines == ["kvstore: interrupted"]


def test_interrupt_before_the_command_has_been_read_is_130_with_one_line(tmp_path: Path) -> None:
    """The first thing that is imported sends it, and never comes back."""
    (tmp_path / "click.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    ran = run_command("status", env=environment)
    assert (ran.code, ran.stdout, ran.stderr) == (130, b"", "kvstore: interrupted\n")
    ran = run_command("status", "--json", env=environment)
    assert (ran.code, json.loads(ran.stderr)["code"]) == (130, 130)


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As in a script's background, where Ctrl-C is meant for somebody else."""
    with subprocess.Popen(
        [COMMAND, "put", KEY, "-i", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 2


CLOSED = [
    ("--help >&-", "stdout is closed"),
    ("put -h >&-", "stdout is closed"),
    ("--version >&-", "stdout is closed"),
    ("status >&-", "stdout is closed"),
    ("list >&-", "stdout is closed"),
    ("contains 00 >&-", "stdout is closed"),
    ("put 00 -i /etc/hostname >&-", "stdout is closed"),
    ("delete 00 >&-", "stdout is closed"),
    ("inspect {folder} >&-", "stdout is closed"),
    ("create {folder}/new >&-", "stdout is closed"),
    ("put 00 -i - <&-", "stdin is closed"),
]


@pytest.mark.parametrize(("line", "says"), CLOSED, ids=[line for line, _ in CLOSED])
def test_a_closed_descriptor_is_2_before_anything_is_done(
    tmp_path: Path, line: str, says: str
) -> None:
    done = shell(f"kvstore {line.format(folder=tmp_path)}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvstore: {says}. ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_error_can_be_told_without_stderr(tmp_path: Path) -> None:
    assert shell(f"kvstore --socket {tmp_path}/s status 2>&-").returncode == 12
    assert shell("kvstore status -vv >&- 2>&-").returncode == 2


@pytest.mark.parametrize("command", ["create {folder}/new --capacity 64MiB", "--help", "--version"])
def test_a_full_stdout_is_14_and_named(tmp_path: Path, command: str) -> None:
    done = shell(f"kvstore {command.format(folder=tmp_path)} >/dev/full")
    assert done.returncode == 14
    assert done.stderr == (
        "kvstore: stdout: No space left on device. "
        "Free some space there, or choose another place.\n"
    )


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which ``kvstore`` is the real command."""
    search = f"{COMMAND.parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": search},
        timeout=60,
        check=False,
    )


def test_a_far_option_is_not_suggested() -> None:
    ran = run_command("status", "--foo")
    assert ran.code == 2
    assert "Did you mean" not in ran.stderr
    assert "Did you mean '--json'?" in run_command("status", "--jsn").stderr
    assert "'status'" in run_command("statis").stderr
    several = run_command("bench", "tableX").stderr
    assert several.count("\n") == 1
    assert "'tableX'. Did you mean one of: 'table1', 'table2', 'table3'? See " in several
    assert "Did you mean" not in run_command("fsck").stderr


def test_block_is_not_written_to_a_terminal_unasked(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    try:
        command = [str(COMMAND), "--socket", str(tmp_path / "s"), "get", KEY]
        done = subprocess.run(
            command, stdout=follower, stderr=subprocess.PIPE, check=False, timeout=30
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 2
    assert b"terminal" in done.stderr
    assert b"-o -" in done.stderr


def test_traceback_only_with_vv(tmp_path: Path) -> None:
    missing = ["status", "--socket", str(tmp_path / "s")]
    assert "Traceback" not in run_command(*missing, "-v").stderr
    assert "Traceback" in run_command(*missing, "-vv").stderr
    assert "Traceback" in run_command("-v", *missing, "-v").stderr


# -- with a daemon --------------------------------------------------------------------------------


def test_block_goes_in_and_comes_out(daemon: Daemon, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(data)
    ran = daemon.run("put", KEY, "-i", source, "--wait")
    assert (ran.code, ran.text) == (0, f"{KEY} 300000 stored\n")
    ran = daemon.run("put", KEY.upper(), "-i", "-", "--json", stdin=data)
    assert ran.json() == {
        "key": KEY,
        "bytes": 300_000,
        "result": "already_present",
        "ack": "accepted",
    }
    ran = daemon.run("get", KEY, "-o", target)
    assert (ran.code, ran.stdout) == (0, b"")
    assert target.read_bytes() == data
    ran = daemon.run("get", KEY, "-o", target, "--json")
    assert ran.json() == {"key": KEY, "bytes": 300_000, "output": str(target)}
    assert daemon.run("get", KEY, "-o", "-").stdout == data
    assert daemon.run("get", KEY).stdout == data


def test_miss_is_4_and_leaves_the_target_alone(daemon: Daemon, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"before")
    ran = daemon.run("get", "dead", "-o", target)
    assert (ran.code, ran.stdout) == (4, b"")
    assert "block dead" in ran.stderr
    assert target.read_bytes() == b"before"


def test_durable_label_and_parent_are_taken(daemon: Daemon) -> None:
    assert daemon.run("put", "01", "-i", "-", "--durable", stdin=b"root").code == 0
    ran = daemon.run("put", "02", "-i", "-", "--parent", "01", "--label", "höher", stdin=b"leaf")
    assert ran.code == 0, ran.stderr
    assert daemon.run("get", "02").stdout == b"leaf"


def test_conflict_is_1_and_keeps_the_old_block(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"first")
    ran = daemon.run("put", KEY, "-i", "-", stdin=b"longer than the first")
    assert ran.code == 1
    assert KEY in ran.stderr
    assert daemon.run("get", KEY).stdout == b"first"


def test_contains_says_yes_or_no_and_counts_prefixes(daemon: Daemon) -> None:
    for key in ("01", "02"):
        daemon.run("put", key, "-i", "-", stdin=b"x")
    ran = daemon.run("contains", "01", "02")
    assert (ran.code, ran.text) == (0, "01 yes\n02 yes\n")
    ran = daemon.run("contains", "01", "03", "02")
    assert (ran.code, ran.text) == (4, "01 yes\n03 no\n02 yes\n")
    ran = daemon.run("contains", "01", "03", "02", "--json")
    assert ran.json() == {"contains": {"01": True, "03": False, "02": True}, "present": 2}
    ran = daemon.run("contains", "--prefix", "01", "03", "02")
    assert (ran.code, ran.text) == (4, "1\n")
    assert daemon.run("contains", "--prefix", "01", "02", "--json").json()["prefix"] == 2
    assert daemon.run("contains", "--shard", "1", "01").code == 4


def test_another_key_length_is_2_and_names_both(daemon: Daemon) -> None:
    daemon.run("put", "0102", "-i", "-", stdin=b"x")
    ran = daemon.run("put", "010203", "-i", "-", stdin=b"x")
    assert ran.code == 2
    assert "3 bytes" in ran.stderr
    assert "2" in ran.stderr


def test_delete_removes_and_names_what_was_absent(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"x")
    ran = daemon.run("delete", KEY, "dead")
    assert (ran.code, ran.text) == (4, "deleted 1, absent 1\n")
    assert daemon.run("get", KEY).code == 4
    daemon.run("put", KEY, "-i", "-", stdin=b"another")
    assert daemon.run("delete", KEY, KEY, "--json").json() == {"deleted": 1, "absent": 0}


def test_list_prints_namespace_shard_and_key(daemon: Daemon) -> None:
    assert daemon.run("list").text == ""
    assert daemon.run("list", "--json").json() == {"blocks": [], "count": 0}
    for number in range(3):
        daemon.run("put", f"0{number}", "-i", "-", "--shard", str(number), stdin=b"x")
    lines = daemon.run("list").text.splitlines()
    assert sorted(line.split()[1:] for line in lines) == [["0", "00"], ["1", "01"], ["2", "02"]]
    assert len(daemon.run("list", "--limit", "2").text.splitlines()) == 2
    found = daemon.run("list", "--json").json()
    assert found["count"] == 3
    assert {"namespace": lines[0].split()[0], "shard": 0, "key": "00"} in found["blocks"]  # type: ignore[operator]


def test_namespaces_are_apart_and_made_on_request_only(daemon: Daemon, tmp_path: Path) -> None:
    ran = daemon.run("put", KEY, "-i", "-", "--namespace", "llama", stdin=b"x")
    assert ran.code == 4
    assert "--create-namespace" in ran.stderr
    assert daemon.run("get", KEY, "--namespace", "llama").code == 4
    assert daemon.run("list", "--namespace", "llama").code == 4
    put = ["put", KEY, "-i", "-", "--create-namespace", "--namespace"]
    assert daemon.run(*put, "llama", stdin=b"llama's").code == 0
    record = tmp_path / "record.json"
    record.write_text('{"model": "m", "tokens_per_block": 16}')
    assert daemon.run(*put, f"@{record}", stdin=b"record's").code == 0
    assert daemon.run("get", KEY).code == 4
    assert daemon.run("get", KEY, "--namespace", "llama").stdout == b"llama's"
    assert daemon.run("get", KEY, "--namespace", f"@{record}").stdout == b"record's"
    same = tmp_path / "same.json"
    same.write_text('{"name": "llama"}')
    assert daemon.run("get", KEY, "--namespace", f"@{same}").stdout == b"llama's"
    assert len(daemon.run("list", "--namespace", "llama").text.splitlines()) == 1


def test_status_has_what_is_promised(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"x" * 10_000)
    daemon.run("get", KEY)
    daemon.run("get", "dead")
    found = daemon.status()
    promised = {
        *("state", "engine", "io", "store", "uuid", "version", "capacity_bytes", "used_bytes"),
        *("live_bytes", "blocks", "memory_bytes", "dirty_blocks", "dirty_bytes", "hits", "misses"),
        *("evictions", "corrupt_blocks", "index_bytes_per_block", "problems"),
    }
    assert promised <= set(found)
    assert (found["state"], found["blocks"], found["problems"]) == ("ready", 1, [])
    assert (found["hits"], found["misses"]) == (1, 1)
    assert found["capacity_bytes"] == 256 << 20
    assert found["version"] == kvstore.__version__
    ran = daemon.run("status")
    assert ran.code == 0
    assert 10 <= len(ran.text.splitlines()) <= 20
    assert "1 hit, 1 miss (50.0 % hits)" in ran.text
    assert "0 B stay free (min_free)" in ran.text
    assert re.search("^memory ", ran.text, re.MULTILINE)
    # Of no interest while the index is nearly empty.
    assert not re.search("^index ", ran.text, re.MULTILINE)
    assert "\033[" not in ran.text
    assert "\033[32mready" in daemon.run("status", "--color", "always").text


def test_status_leaves_out_what_says_nothing() -> None:
    opening = {"store": "/s", "engine": "memory", "phase": "reading the journal", "scanned": 1}
    assert watch._rows(opening)[-1] == ("phase", "reading the journal, 1 record scanned")
    names = [name for name, _ in watch._rows({**opening, "version": "1"})]
    assert names == ["store", "engine", "version", "phase"]
    found = {"capacity_bytes": 1 << 30, "blocks": 9999, "free_bytes": 1 << 20, "hits": 2}
    few = dict(watch._rows(found))
    assert not {"memory", "dirty", "index"} & set(few)
    assert few["reads"] == "2 hits, 0 misses (100.0 % hits)"
    busy: dict[str, float] = {"memory_capacity_bytes": 1 << 30, "memory_bytes": 1 << 20}
    busy |= {"dirty_blocks": 1, "dirty_bytes": 1024}
    busy |= {"blocks": 10_000, "index_bytes_per_block": 99.5}
    many = dict(watch._rows({**found, **busy, "min_free_bytes": 10 << 30}))
    assert many["memory"] == "1 MiB of 1 GiB"
    assert (many["index"], many["dirty"]) == ("99.5 B per block", "1 block, 1 KiB")
    assert many["disk free"] == "1 MiB, at least 10 GiB stay free (min_free)"


def test_broken_pipe_is_quiet(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=os.urandom(4 << 20))
    command = [str(COMMAND), "--socket", str(daemon.socket), "get", KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


def test_a_reader_that_leaves_is_141_as_for_other_programs(daemon: Daemon) -> None:
    for number in range(3):
        daemon.run("put", f"0{number}", "-i", "-", stdin=b"x")
    done = shell(f"kvstore --socket {daemon.socket} list | :; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("141\n", "")
    assert shell(f"kvstore --socket {daemon.socket} list | cat").stdout.count("\n") == 3


def test_json_has_no_block_on_stdout(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"x")
    for arguments in ([], ["-o", "-"]):
        ran = daemon.run("--json", "get", KEY, *arguments)
        assert (ran.code, ran.stdout) == (2, b"")
        assert "-o FILE" in json.loads(ran.stderr)["hint"]


def test_quiet_leaves_the_exit_code(daemon: Daemon, tmp_path: Path) -> None:
    put = ["put", KEY, "-i", "-"]
    assert daemon.run("-q", *put, stdin=b"x") == daemon.run(*put, "-q", stdin=b"x") == SILENT
    assert daemon.run("status", "-q") == SILENT
    assert daemon.run("contains", KEY, "-q") == SILENT
    assert daemon.run("contains", "dead", "-q").code == 4
    assert daemon.run("get", KEY, "-q").stdout == b"x"
    assert daemon.run("delete", KEY, "-q") == SILENT
    assert run_command("create", tmp_path / "new", "--capacity", "64MiB", "-q") == SILENT
    assert run_command("inspect", tmp_path / "new", "-q") == SILENT
    assert daemon.run("status", "-q", "--json").json()["state"] == "ready"
    ran = daemon.run("list", "-q")
    assert ran.code == 2
    assert "leave out -q" in ran.stderr.lower()
    assert (
        shell(f"kvstore --socket {daemon.socket} put {KEY} -i /etc/passwd -q >&-").returncode == 0
    )


def test_a_namespace_of_list_can_be_given_again_if_it_is_the_default(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"x")
    identity, _, _ = daemon.run("list").text.split()
    assert daemon.run("get", KEY, "--namespace", identity).stdout == b"x"


def test_durable_wins_over_wait(daemon: Daemon) -> None:
    ran = daemon.run("put", KEY, "-i", "-", "--wait", "--durable", "--json", stdin=b"x")
    assert ran.json()["ack"] == "durable"


def test_sigterm_drains_and_is_0(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"kept")
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    daemon.start()
    assert daemon.run("get", KEY).stdout == b"kept"


def test_a_terminal_that_closes_keeps_the_daemon(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", stdin=b"kept")
    os.kill(daemon.pid, signal.SIGHUP)
    time.sleep(0.2)
    assert daemon.status()["state"] == "ready"
    assert daemon.run("get", KEY).stdout == b"kept"


def test_blocks_survive_a_kill(daemon: Daemon) -> None:
    daemon.run("put", KEY, "-i", "-", "--wait", stdin=b"kept")
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon.start()
    assert daemon.run("get", KEY).stdout == b"kept"


def test_serve_logs_what_holds_and_why(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--memory", "64MiB"))
    total = render.size(node.filesystem_bytes(tmp_path))
    assert run_command("create", daemon.store, "--capacity", "96MiB").code == 0
    try:
        daemon.start("--log-level", "info")
        assert f"engine = filesystem ({daemon.store}/STORE.json)" in daemon.log
        assert f"capacity = 96 MiB ({daemon.store}/STORE.json)" in daemon.log
        floor = render.size(int(str(daemon.status()["min_free_bytes"])))
        assert f"min_free = {floor} (default for this filesystem)" in daemon.log
        assert daemon.stop() == 0
        (tmp_path / "daemon.log").unlink()
        daemon.start("-q", "--capacity", "1024TiB")
        (line,) = daemon.log.splitlines()
        assert "warning: capacity (--capacity) is 1 PiB, but the filesystem of" in line
        assert f"has {total}: min_free will be the limit" in line
    finally:
        assert daemon.stop() == 0


def test_every_setting_is_a_flag_of_serve() -> None:
    (serve,) = [command for words, command in COMMANDS if words == ["serve"]]
    flags = {name for param in serve.params for name in param.opts}
    assert {config.flag(field.encode_name) for field in msgspec.structs.fields(Settings)} <= flags


def test_help_of_serve_has_sections() -> None:
    text = run_command("serve", "--help").text
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    own = ["Options:", "Who may connect:", "Limits:", "Log:"]
    assert titles == [*own, "Global options:", "Example:", "EXIT STATUS:"]


def test_limits_and_tcp_are_settings(tmp_path: Path) -> None:
    port = free_port()
    limits = ("--max-requests", "7", "--max-client-bytes", "1MiB", "--max-client-regions", "65MiB")
    daemon = Daemon(tmp_path, (*Daemon.options, *limits, "--max-regions", "66MiB"))
    try:
        daemon.start("--listen", f"tcp://127.0.0.1:{port}")
        assert f"listen = tcp://127.0.0.1:{port} (--listen)" in daemon.log
        assert "token_file = none (default)" in daemon.log
        assert "socket_group = none (default)" in daemon.log
        assert "max_regions = 66 MiB (--max-regions)" in daemon.log
        with Talker(("127.0.0.1", port)) as talker:
            assert talker.status()["state"] == "ready"
        with (
            Talker(daemon.socket) as talker,
            Talker(daemon.socket) as other,
            Shared(33 << 20) as one,
            Shared(64 << 20) as two,
        ):
            told = talker.json(Op.HELLO, version=1).json["limits"]
            found = (told["requests"], told["request_bytes"], told["regions_bytes"])
            assert found == (7, 1 << 20, 65 << 20)
            assert not talker.register([one.descriptor], one.size).error
            assert talker.register([one.descriptor], one.size).error == "Busy", "65 for a client"
            assert other.register([two.descriptor], two.size).error == "Busy", "66 in all"
    finally:
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (("--listen", "tcp://0.0.0.0:1"), {}, "setting listen (--listen) names 0.0.0.0"),
        ((), {"KVSTORE_LISTEN": "127.0.0.1"}, "setting listen (KVSTORE_LISTEN) is '127.0.0.1'"),
        (("--socket", "tls://kv1:7"), {}, "setting socket (--socket) is the address"),
        (("--socket-group", "nix"), {}, "setting socket_group (--socket-group): this machine"),
        (("--admin-group", "nix"), {}, "setting admin_group (--admin-group): this machine"),
    ],
)
def test_access_is_checked_with_the_settings(
    arguments: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    ran = run_command("serve", "--check-only", *arguments, env=env)
    assert (ran.code, ran.stdout) == (13, b"")
    assert says in ran.stderr


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to a group")
def test_the_default_folder_of_the_socket_lets_its_group_through(tmp_path: Path) -> None:
    group = next(found for found in grp.getgrall() if found.gr_gid)
    place, origin = tmp_path / "run" / "kv.sock", Origin(Source.DEFAULT, "default")
    for name, mode, owner in ((None, 0o700, 0), (group.gr_name, 0o710, group.gr_gid)):
        loaded = config.load({"socket": str(place), "socket_group": name}, {})
        loaded = loaded._replace(origins={**loaded.origins, "socket": origin})
        daemon_commands._make_socket_folder(loaded)
        found = place.parent.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (mode, owner)


def test_second_daemon_on_a_store_is_11(daemon: Daemon, tmp_path: Path) -> None:
    ran = run_command("--socket", tmp_path / "other.sock", "serve", "--store", daemon.store)
    assert ran.code == 11
    assert str(daemon.store) in ran.stderr
    assert str(daemon.pid) in ran.stderr


def test_spoiled_configuration_does_not_cut_off_the_daemon(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "spoiled.toml"
    file.write_text(f'socket = "{daemon.socket}"\ncapacity = "1GB"\nbogus = 1\n')
    assert run_command("--config", file, "status").code == 0


# -- offline --------------------------------------------------------------------------------------


def test_create_makes_a_store_that_serve_opens(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    ran = run_command("create", daemon.store, "--capacity", "128MiB", "--json")
    assert ran.code == 0, ran.stderr
    made = ran.json()
    assert (made["store"], made["capacity_bytes"]) == (str(daemon.store), 128 << 20)
    again = run_command("create", "--store", daemon.store, "--capacity", "128MiB")
    assert again.code == 1
    assert str(daemon.store) in again.stderr
    daemon.options = ("--create", "never", "--memory", "64MiB", "--min-free", "0")
    try:
        daemon.start()
        assert daemon.status()["uuid"] == made["uuid"]
        assert daemon.status()["capacity_bytes"] == 128 << 20
    finally:
        assert daemon.stop() == 0


def test_create_says_where_and_by_whose_word(tmp_path: Path) -> None:
    mount = node.mount_of(tmp_path)
    on = f"on {mount[0]} mounted at {mount[1]}\n"
    line = "engine filesystem, capacity 64 MiB, "
    ran = run_command("create", tmp_path / "a", "--capacity", "64MiB")
    assert (ran.text, ran.stderr) == (f"made a store at {tmp_path}/a: {line}{on}", "")
    environment = {"KVSTORE_STORE": str(tmp_path / "b")}
    ran = run_command("create", "--capacity", "64MiB", env=environment)
    assert ran.text == f"made a store at {tmp_path}/b (KVSTORE_STORE): {line}{on}"
    environment = {"STATE_DIRECTORY": str(tmp_path / "deep" / "c")}
    ran = run_command("create", "--capacity", "64MiB", env=environment)
    assert ran.text == f"made a store at {tmp_path}/deep/c ($STATE_DIRECTORY): {line}{on}"


def test_create_warns_of_more_than_there_can_be(tmp_path: Path) -> None:
    ran = run_command("create", tmp_path / "a", "--capacity", "1024TiB")
    assert ran.code == 0
    assert ran.stderr.startswith("warning: capacity (--capacity) is 1 PiB")
    assert ran.stderr.count("\n") == 1


def test_create_never_is_10_and_names_the_path(tmp_path: Path) -> None:
    ran = run_command(
        "serve", "--store", tmp_path / "none", "--create", "never", "--socket", tmp_path / "s"
    )
    assert ran.code == 10
    assert str(tmp_path / "none") in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_inspect_reads_a_store_without_touching_it(daemon: Daemon) -> None:
    for number in range(5):
        daemon.run("put", f"0{number}", "-i", "-", stdin=b"x" * 5000)
    ran = run_command("inspect", daemon.store)
    assert ran.code == 11
    assert str(daemon.pid) in ran.stderr
    uuid = daemon.status()["uuid"]
    daemon.stop(signal.SIGKILL)
    before = snapshot(daemon.store)
    found = run_command("inspect", daemon.store, "--json").json()
    assert (found["uuid"], found["blocks"], found["live_bytes"]) == (uuid, 5, 5 * 12288)
    assert found["clean"] is False
    assert str(daemon.store) in run_command("inspect", "--store", daemon.store).text
    assert snapshot(daemon.store) == before
    daemon.start()
    assert daemon.stop() == 0
    assert run_command("inspect", daemon.store, "--json").json()["clean"] is True


def test_inspect_of_nothing_is_10(tmp_path: Path) -> None:
    ran = run_command("inspect", tmp_path / "none")
    assert ran.code == 10
    assert str(tmp_path / "none") in ran.stderr


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, the lock's text apart."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


# -- the demonstration ----------------------------------------------------------------------------


def test_demo_keeps_its_promise_and_cleans_up(tmp_path: Path) -> None:
    ran = run_command("bench", "demo", "--blocks", "8", "--block-size", "256KiB", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "8 of 8 blocks are hits" in ran.text
    assert list(tmp_path.iterdir()) == []


def test_demo_does_not_remove_what_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / ".demo").mkdir()
    (tmp_path / ".demo" / "thesis.txt").write_text("precious")
    ran = run_command("bench", "demo", cwd=tmp_path)
    assert ran.code == 2
    assert (tmp_path / ".demo" / "thesis.txt").read_text() == "precious"

"""A daemon with default settings is on no network: seen from a network of its own, port by port."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import COMMAND
from tests.talk import ROOT, free_port

SCAN = """
import errno, fcntl, json, pathlib, signal, socket, struct, subprocess, sys, time
command, place, *serve = sys.argv[1:]
with socket.socket() as sock:  # the loopback device of a new network is down: netdevice(7)
    fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
daemon = subprocess.Popen(serve)
while subprocess.run([command, "--socket", place, "status"], capture_output=True).returncode:
    assert daemon.poll() is None
    time.sleep(0.05)
answering = []
for port in range(1, 65536):
    with socket.socket() as sock:
        sock.bind(("127.0.0.2", 0))  # or it would meet itself where its own port is asked for
        if sock.connect_ex(("127.0.0.1", port)) != errno.ECONNREFUSED:
            answering.append(port)
bound = []
for name in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "packet"):
    table = pathlib.Path("/proc/net", name)
    lines = table.read_text().splitlines()[1:] if table.exists() else []
    listening = [line for line in lines if name[:3] != "tcp" or line.split()[3] == "0A"]
    bound += [f"{name} {line.split()[1]}" for line in listening]
daemon.send_signal(signal.SIGTERM)
assert daemon.wait(60) == 0
print(json.dumps([answering, bound]))
"""


def scanned(folder: Path, *settings: str) -> tuple[list[int], list[str]]:
    """Return which ports answer beside a daemon in a network of its own, and what is bound."""
    unshare, socket = shutil.which("unshare"), str(folder / "kv.sock")
    if unshare is None or subprocess.run([unshare, "-n", "true"], check=False).returncode:
        pytest.skip("no network of its own can be had here")
    serve = [str(COMMAND), "--socket", socket, "serve", "--store", str(folder / "store"), *settings]
    done = subprocess.run(
        [unshare, "-n", sys.executable, "-c", SCAN, str(COMMAND), socket, *serve],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answering, bound = json.loads(done.stdout)
    return answering, bound


def test_a_port_scan_of_a_default_daemon_finds_nothing(tmp_path: Path) -> None:
    assert scanned(tmp_path) == ([], [])


def test_a_port_scan_finds_what_was_asked_for(tmp_path: Path) -> None:
    port = free_port()
    answering, bound = scanned(tmp_path, "--admin", f"tcp://127.0.0.1:{port}")
    assert answering == [port]
    assert bound == [f"tcp 0100007F:{port:04X}"]

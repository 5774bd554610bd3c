"""The unit under a real systemd, in a container over this machine's own files.

Installed as docs/operations.md says, except that the packages come from here and not from the net.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.talk import eventually

ROOT = Path(__file__).parent.parent
BOOT_SECONDS = 60.0
PACKAGES = (
    "click",
    "lmdb",
    "msgspec",
    "numpy",
    "plyvel",
    "prometheus_client",
    "tqdm",
    "watchdog",
    "xxhash",
)
COMMAND = "#!/opt/kvstore/bin/python\nfrom kvstore.cli import main\n\nmain()\n"
INSTEAD_OF_PIP = """set -e
cp -a /opt/site/. /opt/kvstore/lib/python3.*/site-packages/
install -m 755 /opt/command /opt/kvstore/bin/kvstore
"""
OPEN_PRIVATE = """
import sys
from kvstore.client import Client
with Client("/run/kvstore/kvstore.sock") as client:
    client.namespace({"name": "mine", "private": 1}, create=sys.argv[1] == "make")
"""
NEEDED = ("systemd-nspawn", "nsenter", "mount", "umount")

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]


class Machine:
    """A booted container; ``folder`` is where its overlay lies."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "over" / "root"
        self._over = folder / "over"
        self._log = (folder / "boot.log").open("wb")
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._init = ""

    def mount(self) -> bool:
        """Lay an overlay over this machine's root; False where that is not allowed."""
        self._over.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "none", self._over], check=False).returncode:
            return False
        for name in ("upper", "work", "root"):
            (self._over / name).mkdir()
        where = f"lowerdir=/,upperdir={self._over}/upper,workdir={self._over}/work"
        command = ["mount", "-t", "overlay", "overlay", "-o", where, str(self.root)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def boot(self) -> bool:
        """Start it and wait until it is up; False where that does not work."""
        flags = ["--register=no", "--keep-unit", "--private-network", "-q", "--console=pipe"]
        self._nspawn = subprocess.Popen(
            ["systemd-nspawn", *flags, "-D", self.root, "-b"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        limit = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < limit and self._nspawn.poll() is None:
            children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
            self._init = children.read_text().split(" ")[0]
            if self._init and self.run("systemctl is-system-running").stdout.strip() in (
                "running",
                "degraded",
            ):
                return True
            time.sleep(0.2)
        return False

    def run(self, script: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a script inside, as root."""
        done = subprocess.run(
            ["nsenter", "-t", self._init, "-a", "bash", "-e", "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def show(self, name: str) -> str:
        return self.run(f"systemctl show -P {name} kvstore").stdout.strip()

    def close(self) -> None:
        if self._nspawn is not None:
            if self._init:
                self.run("systemctl poweroff")
            try:
                self._nspawn.wait(20)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        self._log.close()
        for place in (self.root, self._over):
            subprocess.run(["umount", place], check=False, capture_output=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    try:
        if not made.mount():
            pytest.skip("overlays cannot be mounted here")
        version = subprocess.run(
            ["/usr/bin/python3", "-c", "import sys, venv; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if version.stdout.split() != [str(part) for part in sys.version_info[:2]]:
            pytest.skip("the packages of this Python do not suit /usr/bin/python3")
        if not made.boot():
            pytest.skip("no container can be booted here")
        _install(made)
        yield made
    finally:
        made.close()


def _install(machine: Machine) -> None:
    opt, site = machine.root / "opt", Path(sysconfig.get_path("purelib"))
    for path in site.iterdir():
        if path.name.split(".")[0] in PACKAGES:
            shutil.copytree(path, opt / "site" / path.name)
    shutil.copytree(ROOT / "kvstore", opt / "site" / "kvstore")
    shutil.copytree(ROOT / "systemd", opt / "checkout" / "systemd")
    (opt / "command").write_text(COMMAND)
    (opt / "instead-of-pip").write_text(INSTEAD_OF_PIP)
    (opt / "open_private.py").write_text(OPEN_PRIVATE)
    page = (ROOT / "docs" / "operations.md").read_text()
    (script,) = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    for line, instead in (
        ("-m venv /opt", "-m venv --without-pip /opt"),
        ("/opt/kvstore/bin/pip install .", "bash /opt/instead-of-pip"),
    ):
        assert script.count(line) == 1
        script = script.replace(line, instead)
    machine.run(f"cd /opt/checkout\n{script}", check=True)
    machine.run("useradd -G kvstore alice; useradd -G kvstore bob; useradd carol", check=True)


def test_the_service_is_ready_and_keeps_others_out(machine: Machine) -> None:
    assert machine.show("ActiveState") == "active"
    assert machine.show("StatusText").startswith("ready: ")
    status = "KVSTORE_SOCKET=/run/kvstore/kvstore.sock kvstore status"
    machine.run(f"runuser -u alice -- env {status}", check=True)
    assert "no permission" in machine.run(f"runuser -u carol -- env {status}").stderr


def test_clients_are_told_apart_by_their_user(machine: Machine) -> None:
    """PrivateUsers=yes would show all of them as one."""
    command = "/opt/kvstore/bin/python /opt/open_private.py"
    machine.run(f"runuser -u alice -- {command} make", check=True)
    machine.run(f"runuser -u alice -- {command} open", check=True)
    assert "UnknownNamespace" in machine.run(f"runuser -u bob -- {command} open").stderr


def test_a_kill_is_followed_by_a_warm_restart_without_a_scan(machine: Machine) -> None:
    machine.run("printf x | kvstore put 00ff -i - --wait", check=True)
    before = int(machine.show("NRestarts"))
    machine.run("systemctl kill -s KILL kvstore", check=True)
    assert eventually(lambda: machine.show("NRestarts") == str(before + 1), 20)
    assert eventually(lambda: machine.show("ActiveState") == "active", 20)
    assert machine.run("kvstore get 00ff").stdout == "x"
    assert "scanning the store" not in machine.run("journalctl -u kvstore -o cat").stdout


def test_a_reload_is_taken_over_by_the_same_process(machine: Machine) -> None:
    """Asked for or not; and files dropped by root are taken in by the daemon's user."""
    journal = "journalctl -u kvstore -o cat"
    pid = machine.show("MainPID")
    write = "echo '{} = 77' >>/etc/kvstore/kvstore.toml"
    machine.run(f"{write.format('max_clients')}; systemctl reload kvstore", check=True)
    assert eventually(lambda: "max_clients = 77 (/etc" in machine.run(journal).stdout, 20)
    machine.run(write.format("max_requests"), check=True)
    assert eventually(lambda: "max_requests = 77 (/etc" in machine.run(journal).stdout, 20)
    dropped = "/var/lib/kvstore/incoming/a.kvb"
    machine.run(f"kvstore get 00ff --record -o {dropped}", check=True)
    assert eventually(lambda: machine.run(f"test -e {dropped}").returncode == 1, 20)
    assert '"present": 1' in machine.run("kvstore status --json").stdout
    assert (machine.show("MainPID"), machine.show("ActiveState")) == (pid, "active")


def test_a_daemon_that_hangs_is_started_again(machine: Machine) -> None:
    machine.run(
        "mkdir -p /run/systemd/system/kvstore.service.d\n"
        "printf '[Service]\\nWatchdogSec=2\\n' >/run/systemd/system/kvstore.service.d/soon.conf\n"
        "systemctl daemon-reload; systemctl restart kvstore",
        check=True,
    )
    time.sleep(4)  # twice the time after which silence would be noticed
    before = machine.show("NRestarts")
    machine.run("kill -STOP $(systemctl show -P MainPID kvstore)", check=True)
    assert eventually(lambda: machine.show("NRestarts") == str(int(before) + 1), 20)
    assert eventually(lambda: machine.show("ActiveState") == "active", 20)
    log = machine.run("journalctl -u kvstore -o cat").stdout
    assert "Failed with result 'watchdog'" in log
    assert "Current thread" in log


def test_a_stop_is_clean(machine: Machine) -> None:
    machine.run("printf y | kvstore put 00fe -i -", check=True)
    machine.run("systemctl stop kvstore", check=True)
    assert (machine.show("Result"), machine.show("ExecMainStatus")) == ("success", "0")
    machine.run("systemctl start kvstore", check=True)
    assert machine.run("kvstore get 00fe").stdout == "y"


def test_a_start_that_cannot_succeed_is_not_repeated(machine: Machine) -> None:
    machine.run("systemctl stop kvstore; echo 'capacity = 1' >>/etc/kvstore/kvstore.toml")
    assert machine.run("systemctl start kvstore").returncode != 0
    time.sleep(1.5)
    assert machine.show("ExecMainStatus") == "13"
    assert machine.show("ActiveState") == "failed"

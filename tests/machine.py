"""A real systemd in a container over this machine's own files, with kvstore installed in it.

Each command run in it is printed with what it answered; ``pytest -s`` shows that as it goes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import mounted
from tests.talk import eventually

ROOT = Path(__file__).parent.parent
BOOT_SECONDS = 60.0
DISK = "/mnt/disk"
"""Where a filesystem on a device is mounted, which the tests can freeze."""
NEEDED = ("systemd-nspawn", "nsenter", "mount", "umount", "fsfreeze", "make")


class Machine:
    """A booted container. ``root`` is its overlay, ``disk`` the filesystem at DISK, seen from
    outside."""

    def __init__(self, root: Path, disk: Path) -> None:
        self.root, self.disk = root, disk
        self._init = ""

    @contextlib.contextmanager
    def booted(self, log: Path) -> Iterator[None]:
        flags = ["--register=no", "--keep-unit", "--private-network", "-q", "--console=pipe"]
        with log.open("wb") as written:
            nspawn = subprocess.Popen(
                ["systemd-nspawn", *flags, f"--bind={self.disk}:{DISK}", "-D", self.root, "-b"],
                stdin=subprocess.DEVNULL, stdout=written, stderr=written,
            )  # fmt: skip
        try:
            if not eventually(lambda: nspawn.poll() is not None or self._up(nspawn), BOOT_SECONDS):
                pytest.skip(f"no container can be booted here:\n{log.read_text()}")
            yield
        finally:
            self._end(nspawn)

    def _up(self, nspawn: subprocess.Popen[bytes]) -> bool:
        children = Path(f"/proc/{nspawn.pid}/task/{nspawn.pid}/children")
        self._init = children.read_text().split(" ")[0]
        states = ("running", "degraded")  # a unit of the host's may fail here
        return bool(self._init) and self._ask("systemctl is-system-running").strip() in states

    def _end(self, nspawn: subprocess.Popen[bytes]) -> None:
        if self._init:
            self._ask("systemctl poweroff")
        try:
            nspawn.wait(20)
        except subprocess.TimeoutExpired:
            nspawn.kill()
            nspawn.wait()

    def _start(self, script: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["nsenter", "-t", self._init, "-a", "bash", "-e", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _ask(self, script: str) -> str:
        return self._start(script).communicate(timeout=120)[0]

    def begin(self, script: str) -> subprocess.Popen[str]:
        """Start a script inside, as root; whoever calls sees to its end."""
        print("# " + script.strip().replace("\n", "\n# ") + " &")
        return self._start(script)

    def run(self, script: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a script inside, as root, and show what it answered."""
        print("# " + script.strip().replace("\n", "\n# "))
        started = self._start(script)
        out, err = started.communicate(timeout=120)
        ended = f"[exit code {started.returncode}]" if started.returncode else ""
        for told in filter(None, (out, err, ended)):
            print(told.removesuffix("\n"))
        if check and started.returncode:
            pytest.fail(out + err + self._ask("journalctl -o cat -n 60"))
        return subprocess.CompletedProcess(script, started.returncode, out, err)

    def show(self, name: str, unit: str = "kvstore") -> str:
        """Return a property of a unit."""
        return self._ask(f"systemctl show -P {name} {unit}").strip()

    def shows(self, name: str, value: str, unit: str = "kvstore", seconds: float = 20) -> bool:
        """Whether a property gets this value in time, or one that begins so."""
        found = eventually(lambda: self.show(name, unit).startswith(value), seconds)
        print(f"# systemctl show -P {name} {unit}\n{self.show(name, unit)}")
        return found

    @contextlib.contextmanager
    def frozen_disk(self) -> Iterator[None]:
        """Whatever writes to DISK waits."""
        print(f"-- {DISK} hangs --")
        subprocess.run(["fsfreeze", "--freeze", self.disk], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", self.disk], check=True)
            print(f"-- {DISK} goes on --")


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", place], check=False)


@contextlib.contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    """Lay memory over this machine's root, so that nothing written there stays."""
    over = folder / "over"
    over.mkdir()
    with contextlib.ExitStack() as stack:
        for kind, options, place in (
            ("tmpfs", "rw", over),
            ("overlay", f"lowerdir=/,upperdir={over}/upper,workdir={over}/work", over / "root"),
        ):
            command = ["mount", "-t", kind, "-o", options, "kvstore-test", str(place)]
            if subprocess.run(command, check=False, capture_output=True).returncode:
                pytest.skip("overlays cannot be mounted here")
            stack.callback(_unmount, place)
            for name in ("upper", "work", "root"):
                (over / name).mkdir(exist_ok=True)
        yield over / "root"


def install(destination: Path) -> None:
    """Run make install, with the packages from where pip gets them."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "install", f"DESTDIR={destination}", "EXTRAS=rocksdb"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    if "no Python 3.11 or later that a service may use" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


def follow_the_page(machine: Machine) -> None:
    """Do what docs/operations.md says, without what has been installed from outside."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (script,) = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    assert len(re.findall(r"^make install\b.*\n", script, re.M)) == 1
    machine.run(re.sub(r"^make install\b.*\n", "", script, flags=re.M))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Machine]:
    """Boot a machine with the service installed and started; skips where that is not possible."""
    missing = [name for name in NEEDED if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing or NEEDED)}")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)  # the disk's image is large
        disk = stack.enter_context(mounted(folder, "ext4", image_mib=1024))
        root = stack.enter_context(overlay(folder))
        install(root)
        machine = Machine(root, disk)
        stack.enter_context(machine.booted(folder / "boot.log"))
        follow_the_page(machine)
        machine.run("useradd -G kvstore alice; useradd -G kvstore bob; useradd carol")
        yield machine

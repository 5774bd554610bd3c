"""What README.md shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvstore import config
from kvstore.answers import BlockStatus
from tests.command import COMMAND, Daemon

README = Path(__file__).parent.parent / "README.md"


def part(language: str) -> str:
    """Return the one part of the page that is written in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)
    return str(found)


def test_the_tour_is_a_script(tmp_path: Path) -> None:
    # The page puts .venv/bin of its own folder first; here that may be another folder, or none.
    lines = part("bash").replace("$PWD/.venv/bin", str(COMMAND.parent))
    done = subprocess.run(
        ["bash", "-eu", "-c", lines],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "00ff 2000000 stored\n00ff yes\n0100 no\nexit code 4: one of them is" in done.stdout
    assert "stopped cleanly" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_python_example_runs(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        daemon.start()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", part("python")],
            capture_output=True,
            text=True,
            env={**os.environ, "KVSTORE_SOCKET": str(daemon.socket)},
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert len(daemon.run("list", "--namespace", "m").text.splitlines()) == 3
    finally:
        assert daemon.stop() == 0


def test_the_settings_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(part("toml"))
    assert len(part("toml").splitlines()) == 4
    assert config.load({"config": str(file)}, {}).settings.capacity == 512 << 30


def test_statuses_have_the_numbers_that_the_page_gives() -> None:
    told = re.findall(r"\b(\d) ([A-Z_]{2,})\b", README.read_text())
    assert {name: int(number) for number, name in told} == {
        status.name: status.value for status in BlockStatus if status is not BlockStatus.MISS
    }

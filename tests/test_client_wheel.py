"""The small wheel: built, installed alone, used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import __version__
from kvstore.protocol import Flag, Op
from tests.fake_daemon import FakeDaemon

ROOT = Path(__file__).parent.parent
STRANGERS = ("click", "msgspec", "lmdb", "xxhash", "kvstore.store", "kvstore.cli", "kvstore.config")

USE = """
import asyncio, importlib.util, sys
from kvstore import aclient, answers, client, errors, keys, protocol, regions, tls

strangers = sys.argv[2].split(",")
assert not [name for name in strangers if importlib.util.find_spec(name)]
block = bytes(range(256)) * 4096
with client.connect(sys.argv[1]) as blocking:
    assert blocking.put(b"one", block) == "stored"
    assert blocking.get(b"one") == block
    assert [bytes(view) for _, _, view in blocking.stream_get([b"one", b"one"])] == [block] * 2
    with blocking.staging(len(block)) as staging:
        staging.slots([len(block)])[0][:] = block
        assert blocking.put_staged([b"two"], staging).tolist() == [answers.BlockStatus.OK]

async def act():
    async with aclient.AsyncClient(sys.argv[1]) as waiting:
        assert await waiting.get(b"two") == block

asyncio.run(act())
print(client.__file__)
"""


def run(*command: str | Path) -> str:
    environment = {
        n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "PIP_TARGET"))
    }
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = ROOT / "packaging" / "client"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source)
    return next(folder.iterdir())


def pythons() -> Sequence[str]:
    """Return this interpreter and, if there is one, the oldest that the client supports."""
    found = [sys.executable]
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += sorted(Path.home().glob(".pyenv/versions/3.10*/bin"))
    for folder in folders:
        oldest = folder / "python3.10"
        if (
            oldest.exists()
            and not subprocess.run([oldest, "-c", ""], capture_output=True).returncode
        ):
            return [*found, str(oldest)]
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_client_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"kvstore_client-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("METADATA"))
        lines = archive.read(metadata).decode().splitlines()
        modules = {name for name in names if name.startswith("kvstore/")}
        for name in modules:
            assert archive.read(name) == (ROOT / name).read_bytes()
    assert {"kvstore/client.py", "kvstore/aclient.py", "kvstore/py.typed"} <= modules
    assert not {"kvstore/store.py", "kvstore/server.py", "kvstore/cli.py"} & modules
    wanted = [line.split(":")[1].split()[0] for line in lines if line.startswith("Requires-Dist")]
    assert [name.split(">")[0] for name in wanted] == ["numpy", "xxhash"]
    assert "Requires-Python: >=3.10" in lines


@pytest.mark.slow
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_the_wheel_works_alone(wheel: Path, tmp_path: Path, python: str) -> None:
    venv = tmp_path / "venv"
    run(python, "-m", "venv", venv)
    inside = venv / "bin" / "python"
    run(inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    daemon = FakeDaemon(tmp_path / "socket")
    try:
        told = run(inside, "-c", USE, daemon.address, ",".join(STRANGERS))
        assert Path(told.strip()).is_relative_to(venv)
        assert not any(one.frame.flags & Flag.CHECKSUM for one in daemon.of(Op.PUT))
        assert daemon.of(Op.REGISTER)
    finally:
        daemon.close()
        shutil.rmtree(venv)

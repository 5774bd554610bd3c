"""A real vLLM against a real daemon. Its log-probabilities prove that blocks are the right ones.

Not collected by ``make test``: it needs vLLM (``make e2e-vllm``). ``short`` are those for CI.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Daemon
from tests.e2e_vllm.process import Vllm, built_in, cached, extra, make_model, regions, said

FOX = "The quick brown fox jumps over the lazy dog. " * 20
HIDDEN = "A hidden prefix is stored only once. " * 20
TOKENS = [896, 736]
"""What is found of them: whole blocks of 32 tokens."""
OTHERS = [f"{number} is a number that nobody else begins with. " * 20 for number in range(12)]
SECONDS = 1800

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder, 0)
    return folder


@pytest.fixture(scope="module")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a vLLM without any tier says to every prompt."""
    log = tmp_path_factory.mktemp("cold") / "log"
    with Vllm(model, None, log) as vllm:
        return {prompt: said(vllm.ask(prompt))[0] for prompt in (FOX, HIDDEN, *OTHERS)}


Start = Callable[..., Vllm]


@pytest.fixture
def start(model: Path, daemon: Daemon, tmp_path: Path) -> Iterator[Start]:
    """Starts vLLMs with a tier in the daemon; at the end nothing of them is left."""
    before, made = regions(), []

    def act(model: Path = model, at_once: int = 1, **settings: Any) -> Vllm:
        tier = extra(daemon.socket, **settings)
        made.append(Vllm(model, tier, tmp_path / "vllm.log", at_once))
        return made[-1]

    yield act
    for vllm in made:
        if vllm.process.poll() is None:
            vllm.process.kill()
            vllm.process.wait()
    assert regions() == before


def right(vllm: Vllm, cold: dict[str, Any], *prompts: str) -> list[int]:
    """Ask and compare; return the numbers of cached tokens."""
    found = []
    for prompt in prompts:
        told = vllm.ask(prompt)
        assert said(told) == [cold[prompt]]
        found += cached(told)
    return found


def stored(daemon: Daemon) -> int:
    return int(str(daemon.status()["blocks"]))


# -- short ----------------------------------------------------------------------------------------


def test_short_restart_damage_other_weights(
    start: Start, daemon: Daemon, cold: dict[str, Any], tmp_path: Path
) -> None:
    with start() as vllm:
        assert right(vllm, cold, FOX, HIDDEN) == [0, 0]
    assert stored(daemon) == 51

    daemon.stop(signal.SIGKILL)
    daemon.start()
    with start() as vllm:
        assert right(vllm, cold, FOX, HIDDEN) == TOKENS

    # Every payload on disk is damaged: that is found out, and computed again.
    assert daemon.stop() == 0
    damage(daemon.store)
    daemon.start()
    with start() as vllm:
        assert right(vllm, cold, FOX, HIDDEN) == [0, 0]
    assert int(str(daemon.status()["corrupt_blocks"])) > 0
    assert daemon.run("scrub", "ack").code == 0

    # Other weights under the same path: nothing of the old ones is found.
    model = tmp_path / "swapped"
    make_model(model, 0)
    with start(model) as vllm:
        assert right(vllm, cold, FOX) == [0]
    make_model(model, 1)
    with Vllm(model, None, tmp_path / "log") as plain:
        other = said(plain.ask(FOX))[0]
    assert other != cold[FOX]
    with start(model) as vllm:
        assert right(vllm, {FOX: other}, FOX) == [0]


def damage(store: Path) -> None:
    """Flip a byte in the payload of each record."""
    records = [path for path in (store / "blocks").rglob("*") if path.stat().st_size > 65536]
    assert records
    for path in records:
        with path.open("r+b") as file:
            file.seek(4096 + 30_000)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))


# -- long -----------------------------------------------------------------------------------------


def test_as_many_tokens_as_vllms_own_tier(
    start: Start, model: Path, cold: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for _ in range(2):
        with Vllm(model, built_in(tmp_path / "fs"), tmp_path / "log") as vllm:
            found = right(vllm, cold, FOX, HIDDEN)
    with start() as vllm:
        right(vllm, cold, FOX, HIDDEN)
    with start() as vllm:
        assert right(vllm, cold, FOX, HIDDEN) == found == TOKENS


def test_the_daemon_ends_and_comes_back(start: Start, daemon: Daemon, cold: dict[str, Any]) -> None:
    with start() as vllm:
        right(vllm, cold, FOX)
        daemon.stop(signal.SIGKILL)
        assert right(vllm, cold, HIDDEN) == [0]
        daemon.start()
        time.sleep(5)  # longer than the pause after a failure
        right(vllm, cold, OTHERS[0])
    with start() as vllm:
        assert right(vllm, cold, FOX, OTHERS[0])[0] == TOKENS[0]


def test_two_vllms_share_a_daemon(start: Start, cold: dict[str, Any]) -> None:
    with start() as one, start() as two:
        assert right(one, cold, FOX) == [0]
        assert right(two, cold, FOX) == TOKENS[:1]
        assert right(two, cold, HIDDEN) == [0]
        assert right(one, cold, HIDDEN) == TOKENS[1:]


def test_a_daemon_that_stands_still_in_the_middle(
    start: Start, daemon: Daemon, cold: dict[str, Any]
) -> None:
    """Its deadlines pass, rows go to other prompts, it goes on: nothing wrong comes of it."""
    hasty = {"rows": 64, "lookup_seconds": 1, "load_seconds": 1, "store_seconds": 1}
    with start(**hasty) as vllm:
        right(vllm, cold, FOX, HIDDEN, *OTHERS[:4])
    with start(**hasty) as vllm:
        for number, delay in enumerate((0.0, 0.01, 0.03, 0.1)):
            vllm.send([FOX, HIDDEN, *OTHERS[number : number + 3]])
            time.sleep(delay)
            os.kill(daemon.pid, signal.SIGSTOP)
            told = vllm.receive()
            assert said(told)[:2] == [cold[FOX], cold[HIDDEN]]
            right(vllm, cold, *OTHERS[number + 3 : number + 6])
            os.kill(daemon.pid, signal.SIGCONT)
            time.sleep(3)
            right(vllm, cold, FOX, HIDDEN, *OTHERS[:3])
    with start() as vllm:
        right(vllm, cold, FOX, HIDDEN, *OTHERS)


def test_two_hundred_requests_at_once(start: Start, cold: dict[str, Any]) -> None:
    prompts = [f"{number % 20} short prompts share a little. " * 4 for number in range(200)]
    with start(at_once=8) as vllm:
        first = said(vllm.ask(*prompts))
    with start(at_once=8) as vllm:
        told = vllm.ask(*prompts)
        assert sum(cached(told)) > 0
        assert [one[0] for one in said(told)] == [one[0] for one in first]

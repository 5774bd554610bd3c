"""A vLLM in a process of its own, and what is compared of its answers."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
START_SECONDS = 600.0
ANSWER = "ANSWER "
SHARED_MEMORY = Path("/dev/shm")


def python() -> str:
    """Return the interpreter of vLLM's environment."""
    return os.environ["VLLM_PYTHON"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def extra(socket: Path, rows: int = 1024, **settings: Any) -> dict[str, Any]:
    """Return the connector's settings for a pool of ``rows`` of 64 KiB."""
    tier = {"type": "KvstoreTier", "module_path": "kvstore.integrations.vllm"}
    return {
        "spec_name": "CpuTieringOffloadingSpec",
        "spec_module_path": "kvstore.integrations.vllm_cpu",
        "cpu_bytes_to_use": rows * 65536,
        "secondary_tiers": [{**tier, "socket": str(socket), **settings}],
    }


def built_in(folder: Path) -> dict[str, Any]:
    """Return the settings of vLLM's own tier of files."""
    tier = {"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2}
    return {**extra(folder), "secondary_tiers": [tier]}


def make_model(folder: Path, seed: int) -> None:
    command = [python(), str(HERE / "tiny_model.py"), str(folder), str(seed)]
    subprocess.run(command, check=True, env=environment())


class Vllm:
    """One vLLM, ready to be asked; ``log`` receives what it says.

    ``at_once``: prompts that are computed together.
    """

    def __init__(
        self, model: Path, extra: dict[str, Any] | None, log: Path, at_once: int = 1
    ) -> None:
        self._log = log
        options = json.dumps({"model": str(model), "extra": extra, "at_once": at_once})
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [python(), str(HERE / "engine.py"), options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                text=True,
            )
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._next(START_SECONDS)

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.startswith(ANSWER):
                    self._answers.put(json.loads(line.removeprefix(ANSWER)))

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            return self._answers.get(timeout=seconds)
        except Empty:
            raise AssertionError(f"no answer from vLLM:\n{self._log.read_text()[-8000:]}") from None

    def send(self, prompts: Sequence[str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(prompts)) + "\n")
        self.process.stdin.flush()

    def receive(self, seconds: float = 300.0) -> dict[str, Any]:
        return self._next(seconds)

    def ask(self, *prompts: str) -> dict[str, Any]:
        """Have the prompts answered together."""
        self.send(prompts)
        return self.receive()

    def close(self) -> None:
        """End it in order; what it shared is gone then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(START_SECONDS)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert code == 0, self._log.read_text()[-8000:]


def said(told: dict[str, Any]) -> list[Any]:
    """Return tokens with log-probabilities, the proof of right bytes."""
    return [answer["said"] for answer in told["answers"]]


def cached(told: dict[str, Any]) -> list[int]:
    return [answer["cached"] for answer in told["answers"]]


def regions() -> set[str]:
    """Return the names of all memory that vLLMs share with their workers."""
    return {path.name for path in SHARED_MEMORY.glob("vllm_offload_*")}

"""Chooses what goes into the wheel kvstore-client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = (
    *("__init__.py", "py.typed", "errors.py", "answers.py", "keys.py", "protocol.py"),
    *("credentials.py", "tls.py"),
    *("regions.py", "exchange.py", "waiting.py", "requests.py", "session.py"),
    *("questions.py", "transfer.py", "operations.py", "client.py", "aclient.py", "tokens.py"),
    "integrations",
)


class ClientFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Takes the client's files from the tree of kvstore, wherever this is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root).parents[1] / "kvstore"
        for name in FILES:
            build_data["force_include"][str(package / name)] = f"kvstore/{name}"

"""The table of importers: other systems' directories of KV-cache blocks, read and never written."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import Finding
    from kvstore.importers.base import Importer

IMPORTERS = {
    "vllm-fs": "kvstore.importers.vllm_fs:VllmFs",
    "hicache": "kvstore.importers.hicache:HiCache",
    "lmcache-fs": "kvstore.importers.lmcache_fs:LmcacheFs",
}


def importer_class(name: str) -> type[Importer]:
    """Return the class of the importer called ``name``. Raises ConfigError."""
    if name not in IMPORTERS:
        raise ConfigError(
            f"there is no importer {name!r}", f"choose one of {', '.join(sorted(IMPORTERS))}"
        )
    module, _, attribute = IMPORTERS[name].partition(":")
    found: type[Importer] = getattr(import_module(module), attribute)
    return found


def check(name: str, path: Path, *, length: int | None = None) -> list[Finding]:
    """Return what is wrong with another system's directory: files that are cut off, empty, left
    over, there twice, or not its own. What such files hold cannot be verified.

    ``length``: bytes that every block must have, if that is known. Raises ConfigError for an
    unknown name, NotFound, PermissionDenied, EngineError.
    """
    return importer_class(name)(path, length=length).listing().findings

"""The directory of vLLM's file tier (``fs``), version 0.25 to 0.33, and of llm-d's file backend.

::

    <root>/<model, "/" as "_">_<12 hex>/config.json
    <root>/<the same>_r<rank>/<hash[0:3]>/<hash[3:5]>_g<group>/<hash, hex>.bin

The 12 digits begin the SHA-256 of config.json with sorted keys and no spaces, so it shows whether
directory and configuration belong together. A file is one row of all layers, a multiple of 4,096
bytes, without header or checksum. Key of a block: the hash, then the group as u32, big endian, as
vLLM itself has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore import files
from kvstore.errors import CorruptStore
from kvstore.importers.base import Entry, Importer, Space
from kvstore.keys import MAX_SHARD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.base import Finding

CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 20
_FOLDER = re.compile(r"(?P<base>.+_(?P<digest>[0-9a-f]{12}))(?:_r(?P<rank>\d{1,5}))?")
_FAN = re.compile(r"[0-9a-f]{3}")
_GROUP = re.compile(r"(?P<fan>[0-9a-f]{2})_g(?P<group>\d{1,9})")
_FILE = re.compile(r"(?P<hash>[0-9a-f]{64}|[0-9a-f]{32})\.bin")
_TEMPORARY = re.compile(r"(?:[0-9a-f]+\.bin|\.o_direct_probe)_\d+\.tmp")
ROW_UNIT = 4096


class VllmFs(Importer):
    """vLLM's file tier. Namespaces are what config.json says, shards the ranks."""

    name: ClassVar[str] = "vllm-fs"

    def look(self) -> Iterator[Entry | Finding]:
        spaces: dict[str, Space | str] = {}
        for folder in _sorted(self.root):
            known = _FOLDER.fullmatch(folder.name)
            if known is None or not folder.is_dir(follow_symlinks=False):
                yield self.finding("foreign", folder.path, "no folder of vLLM's file tier")
                continue
            base = known["base"]
            if base not in spaces:
                spaces[base] = self._space(base, known["digest"])
            space = spaces[base]
            if known["rank"] is None:
                strays = map(self._stray, _sorted(Path(folder.path)))
                yield from (one for one in strays if one.kind == "temporary")
                continue
            if int(known["rank"]) > MAX_SHARD:
                yield self.finding("foreign", folder.path, f"ranks go up to {MAX_SHARD}")
            elif isinstance(space, str):
                yield self.finding("config", folder.path, space)
            else:
                yield from self._rank(folder, space, int(known["rank"]))

    def _space(self, base: str, digest: str) -> Space | str:
        """Return the namespace of a model's folder, or what is wrong with its configuration."""
        try:
            config = json.loads(files.read_regular(self.root / base / CONFIG, _MAX_CONFIG_BYTES))
        except FileNotFoundError:
            return f"{base}/{CONFIG} is missing"
        except (OSError, CorruptStore, ValueError, RecursionError) as error:
            return f"{base}/{CONFIG} cannot be read: {error}"
        if not isinstance(config, dict):
            return f"{base}/{CONFIG} holds no object"
        found = digest_of(config)
        if found != digest:
            return f"{base}/{CONFIG} belongs to another folder: its digest is {found}"
        return self.space(config)

    def _rank(self, folder: os.DirEntry[str], space: Space, rank: int) -> Iterator[Entry | Finding]:
        for fan in _sorted(Path(folder.path)):
            if not _FAN.fullmatch(fan.name) or not fan.is_dir(follow_symlinks=False):
                yield self._stray(fan)
                continue
            for group in _sorted(Path(fan.path)):
                known = _GROUP.fullmatch(group.name)
                if known is None or not group.is_dir(follow_symlinks=False):
                    yield self._stray(group)
                    continue
                for file in _sorted(Path(group.path)):
                    yield self._file(
                        file, fan.name + known["fan"], int(known["group"]), space, rank
                    )

    def _file(
        self, file: os.DirEntry[str], fan: str, group: int, space: Space, rank: int
    ) -> Entry | Finding:
        known = _FILE.fullmatch(file.name)
        if known is None or not file.is_file(follow_symlinks=False):
            return self._stray(file)
        if not known["hash"].startswith(fan):
            return self.finding("misplaced", file.path, "vLLM looks for it in another folder")
        found = file.stat(follow_symlinks=False)
        if found.st_size % ROW_UNIT:
            detail = f"{found.st_size} bytes are no multiple of {ROW_UNIT}"
            return self.finding("truncated", file.path, detail)
        key = bytes.fromhex(known["hash"]) + group.to_bytes(4, "big")
        return Entry(space, rank, key, found.st_size, found.st_mtime, Path(file.path))

    def _stray(self, item: os.DirEntry[str]) -> Finding:
        if _TEMPORARY.fullmatch(item.name):
            return self.finding("temporary", item.path, "left over by a write that was cut short")
        return self.finding("foreign", item.path, "no file of vLLM's file tier")


def digest_of(config: dict[str, Any]) -> str:
    """Return the 12 hex digits that the folder of a configuration ends with."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sorted(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as items:
        return sorted(items, key=lambda item: item.name)

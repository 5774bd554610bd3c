"""The directory of LMCache's file adapters ``fs`` and ``fs_native``, version 0.5.

One flat directory of ``<model, "/" as "-SEP-">@0x<rank, 8 hex>@<group, hex>@<hash, hex>[@<salt>]``
with the ending ``.data``; the rank packs world size, global rank, local world size and local rank,
a byte each. A file is the raw payload, with O_DIRECT padded to 4,096 bytes: then the user gives the
length of a block. Folders below are not looked at: temporary files may lie there under final names.

Key of a block: the hash, the group as u32 (big endian), and where there is a salt the first 16
bytes of its SHA-256; salted blocks have a namespace of their own, because their keys are longer.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvstore.importers.base import Entry, Importer, Space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.base import Finding

_ENDING = ".data"
_RANK = re.compile(r"0x[0-9a-f]{8}")
_GROUP = re.compile(r"[0-9a-f]{1,4}")
_HASH = re.compile(r"(?:[0-9a-fA-F]{2}){3,32}")


class LmcacheFs(Importer):
    """LMCache's file adapters. Shards are the global ranks."""

    name: ClassVar[str] = "lmcache-fs"

    def look(self) -> Iterator[Entry | Finding]:
        spaces: dict[str, Space] = {}
        with os.scandir(self.root) as items:
            for item in sorted(items, key=lambda one: one.name):
                yield self._file(item, spaces)

    def _file(self, item: os.DirEntry[str], spaces: dict[str, Space]) -> Entry | Finding:
        if item.name.endswith(".tmp"):
            return self.finding("temporary", item.path, "left over by a write that was cut short")
        if not item.name.endswith(_ENDING) or not item.is_file(follow_symlinks=False):
            return self.finding("foreign", item.path, "no file of LMCache's file adapters")
        model, *words = item.name.removesuffix(_ENDING).split("@")
        if not model or not words or not _RANK.fullmatch(words[0]):
            return self.finding(
                "foreign", item.path, "a key of LMCache in the process: no way back"
            )
        if len(words) not in (3, 4) or not _GROUP.fullmatch(words[1]):
            return self.finding("foreign", item.path, "no key of LMCache 0.5, which has a group")
        if not _HASH.fullmatch(words[2]):
            return self.finding("foreign", item.path, "its hash is not hexadecimal")
        return self._entry(item, model.replace("-SEP-", "/"), words, spaces)

    def _entry(
        self, item: os.DirEntry[str], model: str, words: list[str], spaces: dict[str, Space]
    ) -> Entry:
        world, rank, local, _ = int(words[0], 16).to_bytes(4, "big")
        group, salt = int(words[1], 16), words[3:]
        record: dict[str, object] = {"model": model, "world_size": world, "local_world_size": local}
        key = bytes.fromhex(words[2]) + group.to_bytes(4, "big")
        if salt:
            record["salted"] = 1
            key += hashlib.sha256(salt[0].encode()).digest()[:16]
        space = spaces.setdefault(repr(record), self.space(record))
        found = item.stat(follow_symlinks=False)
        used, path = found.st_mtime, Path(item.path)
        return Entry(space, rank, key, found.st_size, used, path, alike=str(group))

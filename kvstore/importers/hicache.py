"""The directory of SGLang's HiCache file backend, version 0.5.

One flat directory of ``<64 hex>[.<pool>]<suffix>.bin``. The suffix tells the model, "/" as "-", and
the ranks: ``_<model>_<tp rank>_<tp size>[_<pp size>_<pp rank>][_cp<rank>_<size>]``; models with MLA
leave out the tp part, with DCP they have ``_tp<n>_dcp<rank>_<size>_page<p>`` instead. The name does
not say which, so for MLA the user gives the field ``kind=mla``. A file is the raw bytes of a page,
whose dtype and layout are nowhere to be found: the user gives them as fields too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvstore.importers.base import Entry, Importer, Space
from kvstore.keys import MAX_SHARD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.base import Finding

_POOL = (
    r"auxiliary_swa|draft_indexer|draft_swa"
    r"|deepseek_v4_c\d+(?:_indexer(?:_scale|_state)?|_rope|_state)?|[A-Za-z0-9-]+"
)
"""The names of pools in 0.5.23 that have a "_", and any without."""
_FILE = re.compile(rf"(?P<hash>[0-9a-f]{{64}})(?:\.(?P<pool>{_POOL}))?_(?P<rest>.+)\.bin")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_CP = re.compile(r"(?P<before>.*)_cp(?P<cp_rank>\d+)_(?P<cp_size>\d+)")
_DCP = re.compile(
    r"(?P<before>.*)_tp(?P<tp_size>\d+)_dcp(?P<dcp_rank>\d+)_(?P<dcp_size>\d+)_page(?P<page>\d+)"
)
_PP = re.compile(
    r"(?P<model>.*)_(?P<tp_rank>\d+)_(?P<tp_size>\d+)_(?P<pp_size>\d+)_(?P<pp_rank>\d+)"
)
_TP = re.compile(r"(?P<model>.*)_(?P<tp_rank>\d+)_(?P<tp_size>\d+)")
_MLA_PP = re.compile(r"(?P<model>.*)_(?P<pp_size>\d+)_(?P<pp_rank>\d+)")

SHARDED = ("mamba",)
"""Pools whose state each tp rank has its own of, also with MLA."""

Numbers = dict[str, int]


class HiCache(Importer):
    """HiCache's file backend. Shards are the ranks, numbered tp first, then pp, then cp."""

    name: ClassVar[str] = "hicache"

    def look(self) -> Iterator[Entry | Finding]:
        spaces: dict[str, Space] = {}
        with os.scandir(self.root) as items:
            for item in sorted(items, key=lambda one: one.name):
                yield self._file(item, spaces)

    def _file(self, item: os.DirEntry[str], spaces: dict[str, Space]) -> Entry | Finding:
        if _TEMPORARY.fullmatch(item.name):
            return self.finding("temporary", item.path, "left over by a write that was cut short")
        known = _FILE.fullmatch(item.name)
        if known is None or not item.is_file(follow_symlinks=False):
            return self.finding("foreign", item.path, "no page of HiCache")
        mla = self.fields.get("kind") == "mla"
        parsed = parse(known["rest"], mla=mla, sharded=known["pool"] in SHARDED)
        if parsed is None:
            return self.finding("foreign", item.path, "its name has no ranks; for MLA: kind=mla")
        model, numbers = parsed
        shard, sizes = _shard(numbers)
        if shard > MAX_SHARD:
            return self.finding("foreign", item.path, f"ranks go up to {MAX_SHARD}")
        record = {"model": model, "pool": known["pool"], **sizes}
        space = spaces.setdefault(repr(record), self.space(record))
        found = item.stat(follow_symlinks=False)
        key = bytes.fromhex(known["hash"])
        return Entry(space, shard, key, found.st_size, found.st_mtime, Path(item.path))


def parse(rest: str, *, mla: bool, sharded: bool = False) -> tuple[str, Numbers] | None:
    """Return the model and the numbers that a suffix (without its first "_") names; None if it
    cannot be one. A model's name may itself end in numbers: a rank must be below its size.
    ``sharded``: the tp part is there whatever the model."""
    numbers: Numbers = {}
    for pattern in (_DCP, _CP):
        if known := pattern.fullmatch(rest):
            numbers |= {k: int(v) for k, v in known.groupdict().items() if k != "before"}
            rest = known["before"]
    if not sharded and (mla or "dcp_size" in numbers):
        known = _MLA_PP.fullmatch(rest)
        found = None if known is None else _numbers(known)
        return (known["model"], numbers | found) if known and found else (rest, numbers)
    for pattern in (_PP, _TP):
        known = pattern.fullmatch(rest)
        found = None if known is None else _numbers(known)
        if known and found:
            return known["model"], numbers | found
    return None


def _numbers(known: re.Match[str]) -> Numbers | None:
    found = {name: int(text) for name, text in known.groupdict().items() if name != "model"}
    if found.get("tp_rank", 0) >= found.get("tp_size", 1):
        return None
    # Written only where there are several.
    if "pp_size" in found and not found["pp_rank"] < found["pp_size"] > 1:
        return None
    return found


def _shard(numbers: Numbers) -> tuple[int, Numbers]:
    """Return one number for all ranks, and the sizes, which belong to the namespace."""
    shard, factor = 0, 1
    for part in ("tp", "pp", "cp", "dcp"):
        if f"{part}_rank" in numbers:
            shard += numbers[f"{part}_rank"] * factor
            factor *= numbers[f"{part}_size"]
    sizes = {name: value for name, value in numbers.items() if not name.endswith("_rank")}
    return shard, sizes

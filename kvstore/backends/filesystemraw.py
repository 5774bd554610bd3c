"""The raw reader of the engine `filesystem`: files that begin with an envelope, whatever their
names and wherever they lie below the engine's directory, but for ``tmp``."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, ClassVar

from xxhash import xxh3_64_intdigest

from kvstore.backends.filetree import MAX_FANOUT, SUFFIX, TEMPORARY, Tree
from kvstore.backends.raw import Extent, Raw, Remains, Salvage, spare_of
from kvstore.errors import CorruptBlock
from kvstore.files import DIRECTORY_MODE, sync_directory
from kvstore.record import HEADER_PAGE, MAGIC, Header, claimed_header_length, decode, image_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.backends.base import EngineContext
    from kvstore.backends.raw import Identity

_NAME = re.compile(
    r"([0-9a-f]{32})/([0-9a-f]{2,3})/([0-9a-f]{4})-([0-9a-f]{2,128})\.([0-9a-f]{16})\.kvb"
)
_SAMPLES = 64


class FilesystemSalvage(Salvage):
    in_place: ClassVar[bool] = True
    forgets: ClassVar[bool] = False

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        fanout = context.options.get("fanout")
        good = isinstance(fanout, int) and 1 <= fanout <= MAX_FANOUT
        self._tree = Tree(fanout if good else self._guess_fanout())  # type: ignore[arg-type]

    def options(self) -> Mapping[str, object]:
        return {"fanout": self._tree.fanout}

    def agrees(self) -> bool:
        return dict(self.context.options) == self.options()

    def _guess_fanout(self) -> int:
        """Return the fan-out that names the directories in which most files lie."""
        names = [found for path in self.files.paths if (found := _NAME.fullmatch(path))]
        samples = [
            (xxh3_64_intdigest(bytes.fromhex(found[4])), int(found[2], 16))
            for found in names[:: max(1, len(names) // _SAMPLES)]
            if len(found[4]) % 2 == 0
        ]
        if not samples:
            return 256
        wide = sum(len(found[2]) == 3 for found in names) > len(names) // 2
        choices = range(257, MAX_FANOUT + 1) if wide else range(256, 0, -1)
        return max(choices, key=lambda n: sum(digest % n == fan for digest, fan in samples))

    def find(self) -> Iterator[Raw | Remains]:
        for file, path in enumerate(self.files.paths):
            if not path.startswith(f"{TEMPORARY}/"):
                yield from self._look(file, path)
            self.seen(self.files.sizes[file])

    def _look(self, file: int, path: str) -> Iterator[Raw | Remains]:
        page, whole = self.files.read(file, 0, HEADER_PAGE), Extent(file, 0, self.files.sizes[file])
        try:
            header = decode(page)
        except CorruptBlock as error:
            identity, generation = _named(path)
            if identity is not None or path.endswith(SUFFIX) or page.startswith(MAGIC):
                yield Remains(whole, error.message, identity, generation)
            return
        fits = whole.length >= image_bytes(header.stored_length)
        place = 0 if fits and path == self._path(header) else None
        payload = Extent(file, HEADER_PAGE, header.stored_length)
        head, spare = page[: claimed_header_length(page)], spare_of(header, whole)
        yield Raw(header, head, (((payload,),),), whole, place, spare=spare)

    def _path(self, header: Header) -> str:
        name = f"{header.shard:04x}-{header.key.hex()}.{header.generation:016x}{SUFFIX}"
        return f"{header.namespace.hex()}/{self._tree.fan(header.key)}/{name}"

    def rename(self, raws: list[Raw]) -> bool:
        files, moved = self.files, list[int]()
        # Each name may be that of another one, so all leave theirs first, for any other: a file is
        # known by what is in it.
        for raw in raws:
            assert raw.whole is not None
            moved.append(raw.whole.file)
            self._complete(raw)
            self._move(raw.whole.file, f"{os.urandom(8).hex()}{SUFFIX}")
        for raw, file in zip(raws, moved, strict=True):
            path = self._path(raw.header)
            (files.root / path).parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
            self._move(file, path)
        for folder in {(files.root / files.paths[file]).parent for file in moved}:
            sync_directory(folder)
            sync_directory(folder.parent)
        return True

    def _complete(self, raw: Raw) -> None:
        """Bring back zeros that were cut off behind the payload."""
        assert raw.whole is not None
        size = image_bytes(raw.header.stored_length)
        if raw.whole.length < size:
            path = self.files.root / self.files.paths[raw.whole.file]
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _move(self, file: int, path: str) -> None:
        os.rename(self.files.root / self.files.paths[file], self.files.root / path)
        self.files.paths[file] = path

    def remove(self, extent: Extent) -> None:
        path = self.files.root / self.files.paths[extent.file]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            sync_directory(path.parent)


def _named(path: str) -> tuple[Identity | None, int]:
    """Return the block that a file's name names, and its generation."""
    found = _NAME.fullmatch(path)
    if not found or len(found[4]) % 2:
        return None, 0
    key = bytes.fromhex(found[4])
    return (bytes.fromhex(found[1]), int(found[3], 16), key), int(found[5], 16)

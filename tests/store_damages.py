"""Every kind of damage that the matrix knows, done to a real store of each engine.

A damage is a function of a :class:`Scene`; it may raise :class:`NotApplicable` with the reason.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import numpy as np
import plyvel

from kvstore import checkpoint, layout, record
from kvstore.backends import engine_class
from kvstore.backends.base import Blocks, EngineContext
from kvstore.compare import blocks_at
from kvstore.events import Kind, seal
from kvstore.settle import settle
from kvstore.testing.records import full_images
from tests.stores import Local, block, key

BLOCKS = 20
SIZE = 9000
VICTIM, OTHER = 7, 8
PAGE = 4096
KEY_VALUE = ("lmdb", "leveldb", "sqlite")
ENGINES = ("filesystem", "superblock", *KEY_VALUE)


class NotApplicable(Exception):
    """The engine cannot have this damage; the text says why."""


class Scene:
    """A store at rest, with 20 blocks of 9,000 bytes in a chain."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = layout.read(path)
        self.engine = self.record.engine
        self.blocks = path / self.record.blocks
        loaded = checkpoint.load(self.blocks, self.record.uuid, self.record.epoch)
        rows = settle(loaded.events).rows
        self.rows = rows[rows["kind"] == Kind.PUT]

    def context(self) -> EngineContext:
        options, capacity = self.record.engine_options, self.record.capacity_bytes
        return EngineContext(self.blocks, self.record.uuid, options, capacity=capacity)

    def row(self, number: int) -> Blocks:
        """Return a block of the store as the engine wants it."""
        name = np.frombuffer(key(number).ljust(64, b"\0"), np.uint8)
        (at,) = np.flatnonzero((self.rows["key"] == name).all(axis=1))
        return blocks_at(self.rows, int(at))

    def where(self, number: int) -> str:
        return engine_class(self.engine)(self.context()).where(self.row(number))[0]

    # -- bytes of a record ------------------------------------------------------------------------

    def edit(self, number: int, change: Callable[[bytearray], object]) -> None:
        """Change the image of a record: a header page, then payload."""
        if self.engine == "filesystem":
            path = self.blocks / self.where(number)
            data = bytearray(path.read_bytes())
            change(data)
            path.write_bytes(data)
        elif self.engine == "superblock":
            path, offset, size = self.slot(number)
            with path.open("r+b") as file:
                data = bytearray(os.pread(file.fileno(), size, offset))
                change(data)
                os.pwrite(file.fileno(), data, offset)
        else:
            self.edit_piece(number, change)

    def slot(self, number: int) -> tuple[Path, int, int]:
        """Return file, offset and length of the slot of a block."""
        place = int(self.row(number).places[0])
        path = self.blocks / "super" / f"{place >> 32:08x}.sb"
        (slot_bytes,) = struct.unpack_from("<I", path.read_bytes()[:PAGE], 28)
        return path, PAGE + (place & 0xFFFFFFFF) * slot_bytes, slot_bytes

    def edit_piece(self, number: int, change: Callable[[bytearray], object]) -> None:
        """Change the bytes of a piece, wherever its library keeps them: header, u32, payload."""
        header = record.encode(self.header(number))
        payload = block(number, SIZE)
        image = bytearray(header.ljust(PAGE, b"\0") + payload)
        before = bytes(image)
        change(image)
        if bytes(image[PAGE:]) != payload:
            self.replace_bytes(payload[:512], bytes(image[PAGE : PAGE + 512]))
        if bytes(image[: len(header)]) != before[: len(header)]:
            self.replace_bytes(header, bytes(image[: len(header)]))

    def header(self, number: int) -> record.Header:
        engine = engine_class(self.engine)(self.context())
        engine.open()
        one = self.row(number)
        image = memoryview(bytearray(record.image_bytes(SIZE)))
        engine.get_many_into(one, [image])
        engine.close()
        return record.decode(image[:PAGE])

    def replace_bytes(self, old: bytes, new: bytes) -> None:
        """Replace bytes wherever the files of the engine have them."""
        done = 0
        for path in self.engine_files():
            data = path.read_bytes()
            if old in data:
                path.write_bytes(data.replace(old, new))
                done += 1
        assert done, "the bytes are nowhere"

    def engine_files(self) -> list[Path]:
        return sorted(p for p in (self.blocks / self.engine).iterdir() if p.is_file())

    def journals(self) -> list[Path]:
        return sorted(p for p in self.blocks.iterdir() if p.name.startswith("journal."))

    def checkpoints(self) -> list[Path]:
        return sorted(p for p in self.blocks.iterdir() if p.name.startswith("checkpoint."))

    # -- entries of a key/value library -----------------------------------------------------------

    def entry(self, number: int, table: bytes = b"h") -> bytes:
        one = self.row(number)
        name = one.generations.astype(">u8").tobytes() + one.namespace
        name += one.shard.to_bytes(2, "big") + bytes([one.keys.shape[1]]) + one.keys.tobytes()
        return table + name + (b"\0\0" if table == b"b" else b"")

    def set_entries(self, pairs: Sequence[tuple[bytes, bytes | None]]) -> list[bytes | None]:
        """Write or (None) delete entries by the library itself; return what they were before."""
        folder = self.blocks / self.engine
        if self.engine == "lmdb":
            with lmdb.open(str(folder), map_size=64 << 20) as env, env.begin(write=True) as txn:
                before = [txn.get(name) for name, _ in pairs]
                for name, value in pairs:
                    txn.delete(name) if value is None else txn.put(name, value)
            return before
        if self.engine == "leveldb":
            with plyvel.DB(str(folder), compression=None) as db:
                before = [db.get(name) for name, _ in pairs]
                for name, value in pairs:
                    db.delete(name) if value is None else db.put(name, value)
            (folder / "sizes.json").unlink(missing_ok=True)
            return before
        made = sqlite3.connect(folder / "store.db")
        with made:
            before = []
            for name, value in pairs:
                table = "headers" if name[:1] == b"h" else "pieces"
                row = made.execute(f"SELECT v FROM {table} WHERE k = ?", (name,)).fetchone()
                before.append(row[0] if row else None)
                made.execute(f"DELETE FROM {table} WHERE k = ?", (name,))
                if value is not None:
                    made.execute(f"INSERT INTO {table} VALUES (?, ?)", (name, value))
        made.close()
        return before

    def put(self, number: int, generation: int, *, store: bytes | None = None) -> Blocks:
        """Have the engine put a version that the index does not know."""
        one = self.row(number) if number < BLOCKS else self.row(0)
        keys = np.frombuffer(key(number), np.uint8).reshape(1, -1)
        made = Blocks(one.namespace, 0, keys, one.lengths, np.array([generation], np.uint64),
                      np.zeros(1, np.uint64))  # fmt: skip
        (image,) = full_images(made)
        payload = block(number, SIZE)
        image[PAGE : PAGE + SIZE] = payload
        header = record.decode(image[:PAGE])
        fields = {name: getattr(header, name) for name in header.__dataclass_fields__}
        fields |= {"store": store or self.record.uuid, "checksum": record.payload_checksum(payload)}
        record.encode_into(record.Header(**fields), image[:PAGE])
        engine = engine_class(self.engine)(self.context())
        engine.open()
        rows = self.rows
        engine.claim(rows["place"], rows["length"], rows["generation"], complete=True)
        written = engine.put_many(made, [image], sync=True)
        engine.close()
        return made.at(written.places)

    def append(self, name: str, **changes: object) -> None:
        """Append a record to the journal, in the place of its CLOSE."""
        path = self.journals()[-1]
        data = bytearray(path.read_bytes())
        records = np.frombuffer(data, self.rows.dtype, offset=128)
        end = int(np.flatnonzero(records["kind"] == 0)[0])
        one = records[:1].copy()
        one[:] = np.zeros(1, one.dtype)
        for field, value in changes.items():
            one[field] = value
        seal(one)
        data[128 + end * 128 : 256 + end * 128] = one.tobytes()
        path.write_bytes(data)


def _flip(offset: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[offset] ^= 0x10

    return change


def _zero(start: int, size: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[start : start + size] = bytes(size)

    return change


# -- values ---------------------------------------------------------------------------------------


def flipped_payload(scene: Scene) -> None:
    scene.edit(VICTIM, _flip(PAGE + 300))


def zeroed_page(scene: Scene) -> None:
    scene.edit(VICTIM, _zero(PAGE, 512 if scene.engine in KEY_VALUE else PAGE))


def flipped_header(scene: Scene) -> None:
    scene.edit(VICTIM, _flip(70))


def flipped_key(scene: Scene) -> None:
    scene.edit(VICTIM, _flip(100))


def flipped_padding(scene: Scene) -> None:
    if scene.engine in KEY_VALUE:
        raise NotApplicable("entries have no padding")
    scene.edit(VICTIM, _flip(3000))


def cut_record(scene: Scene) -> None:
    if scene.engine == "filesystem":
        os.truncate(scene.blocks / scene.where(VICTIM), PAGE + 100)
    elif scene.engine == "superblock":
        raise NotApplicable("slots have one length; see a file that was cut off")
    else:
        (value,) = scene.set_entries([(scene.entry(VICTIM, b"b"), b"")])
        assert value is not None
        scene.set_entries([(scene.entry(VICTIM, b"b"), value[:-100])])


def cut_file(scene: Scene) -> None:
    if scene.engine == "filesystem":
        raise NotApplicable("a file is a record; see a record that was cut off")
    path = max(_data_files(scene), key=lambda file: file.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


def _data_files(scene: Scene) -> list[Path]:
    if scene.engine == "superblock":
        return sorted((scene.blocks / "super").glob("*.sb"))
    return [p for p in scene.engine_files() if p.suffix in (".mdb", ".ldb", ".db", ".log")]


def emptied_file(scene: Scene) -> None:
    if scene.engine == "filesystem":
        os.truncate(scene.blocks / scene.where(VICTIM), 0)
        return
    os.truncate(max(_data_files(scene), key=lambda file: file.stat().st_size), 0)


def lost_file(scene: Scene) -> None:
    if scene.engine == "filesystem":
        (scene.blocks / scene.where(VICTIM)).unlink()
        return
    max(_data_files(scene), key=lambda file: file.stat().st_size).unlink()


def lost_record(scene: Scene) -> None:
    if scene.engine == "filesystem":
        raise NotApplicable("a record is a file; see a file that is gone")
    if scene.engine == "superblock":
        scene.edit(VICTIM, lambda data: data.__setitem__(slice(None), bytes(len(data))))
    else:
        scene.set_entries([(scene.entry(VICTIM), None), (scene.entry(VICTIM, b"b"), None)])


# -- index ----------------------------------------------------------------------------------------


def unknown_record(scene: Scene) -> None:
    if scene.engine == "superblock":
        raise NotApplicable("a slot that the index does not name is a free one, by design")
    scene.put(BLOCKS, 7)


def lost_index(scene: Scene) -> None:
    for path in (*scene.journals(), *scene.checkpoints()):
        path.unlink()


def torn_journal(scene: Scene) -> None:
    """One flipped bit in the record of a block, before others."""
    path = scene.journals()[-1]
    data = bytearray(path.read_bytes())
    data[128 + 10 * 128 + 40] ^= 1
    path.write_bytes(data)


def cut_journal(scene: Scene) -> None:
    path = scene.journals()[-1]
    os.truncate(path, 128 + 15 * 128)


def spoiled_checkpoint(scene: Scene) -> None:
    local = Local(scene.path)
    local.store.checkpoint()
    local.store.run_chores()
    local.stop()
    (path,) = Scene(scene.path).checkpoints()
    data = bytearray(path.read_bytes())
    data[128 + 3 * 128 + 20] ^= 1
    path.write_bytes(data)


def index_newer_than_data(scene: Scene) -> None:
    row = scene.rows[np.flatnonzero(scene.rows["generation"] == scene.row(VICTIM).generations[0])]
    fields = ("key_length", "shard", "row", "parent", "length", "place", "last_use")
    changes = {name: row[name][0] for name in (*fields, "namespace", "key")}
    scene.append("PUT", kind=Kind.PUT, generation=int(row["generation"][0]) + 1000, **changes)


def duplicate(scene: Scene) -> None:
    if scene.engine == "superblock":
        path, offset, size = scene.slot(VICTIM)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), os.pread(file.fileno(), size, offset), PAGE + 60 * size)
        return
    scene.put(VICTIM, 5)


def swapped(scene: Scene) -> None:
    if scene.engine == "filesystem":
        one, other = (scene.blocks / scene.where(number) for number in (VICTIM, OTHER))
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif scene.engine == "superblock":
        (path, first, size), (_, second, _) = scene.slot(VICTIM), scene.slot(OTHER)
        with path.open("r+b") as file:
            image = os.pread(file.fileno(), size, first)
            os.pwrite(file.fileno(), os.pread(file.fileno(), size, second), first)
            os.pwrite(file.fileno(), image, second)
    else:
        names = [scene.entry(VICTIM), scene.entry(OTHER)]
        values = scene.set_entries([(name, b"") for name in names])
        scene.set_entries(list(zip(names, reversed(values), strict=True)))


def two_in_one_place(scene: Scene) -> None:
    if scene.engine != "superblock":
        raise NotApplicable("the engine finds records by name, there are no places")
    generation = scene.row(VICTIM).generations[0]
    row = scene.rows[np.flatnonzero(scene.rows["generation"] == generation)]
    fields = ("key_length", "shard", "row", "parent", "length", "generation", "last_use")
    changes = {name: row[name][0] for name in (*fields, "namespace", "key")}
    scene.append("PUT", kind=Kind.PUT, place=int(scene.row(OTHER).places[0]), **changes)


def wrong_free_list(scene: Scene) -> None:
    raise NotApplicable("which room is free is never stored, it follows from the index")


def wrong_counters(scene: Scene) -> None:
    raise NotApplicable("bytes and blocks are counted at every opening, no counter is stored")


# -- files beside ---------------------------------------------------------------------------------


def leftovers(scene: Scene) -> None:
    (scene.path / "namespaces" / f"{'ab' * 16}.json.new").write_bytes(b"{")
    (scene.path / "STORE.json.new").write_bytes(b"{")
    if scene.engine == "filesystem":
        (scene.blocks / "tmp" / "1f-2a-0").write_bytes(b"x" * 5000)


def symlink(scene: Scene) -> None:
    _spot(scene).symlink_to("/etc/hostname")


def fifo(scene: Scene) -> None:
    os.mkfifo(_spot(scene))


def device(scene: Scene) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("only root makes devices")
    os.mknod(_spot(scene), 0o600 | 0o020000, os.makedev(1, 3))


def _spot(scene: Scene) -> Path:
    """Return a name where the engine, or the index, would look."""
    if scene.engine == "filesystem":
        path = scene.blocks / scene.where(VICTIM)
        path.unlink()
        return path
    if scene.engine == "superblock":
        return scene.blocks / "super" / "0000ffff.sb.x"
    return scene.blocks / "journal.x"


def second_name(scene: Scene) -> None:
    path = scene.blocks / scene.where(VICTIM) if scene.engine == "filesystem" else None
    path = path or max(_data_files(scene), key=lambda file: file.stat().st_size)
    os.link(path, scene.path.parent / f"backup-{scene.engine}")


def no_rights(scene: Scene) -> None:
    (scene.path / "namespaces").chmod(0o000)
    scene.journals()[-1].chmod(0o000)


def other_owner(scene: Scene) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("only root gives files away")
    os.chown(scene.path / "lock", 12345, 12345)


def of_another_store(scene: Scene) -> None:
    scene.put(BLOCKS + 1, 9, store=bytes(range(16)))


def stale_lock(scene: Scene) -> None:
    (scene.path / "lock").write_bytes(b"4121 kvstore serve\n")


# -- what the store is ----------------------------------------------------------------------------


def newer_format(scene: Scene) -> None:
    path = scene.path / "STORE.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))


def spoiled_store_file(scene: Scene) -> None:
    (scene.path / "STORE.json").write_bytes(b"\0" * 300)


def lost_store_file(scene: Scene) -> None:
    (scene.path / "STORE.json").unlink()


def spoiled_namespace(scene: Scene) -> None:
    (path,) = (scene.path / "namespaces").glob("*.json")
    path.write_bytes(b"[]")


def lost_directories(scene: Scene) -> None:
    for name in ("incoming", "quarantine"):
        (scene.path / name).rmdir()


# -- the engine's own structure -------------------------------------------------------------------


def lost_structure(scene: Scene) -> None:
    """What an engine needs to find anything at all."""
    if scene.engine == "filesystem":
        (scene.blocks / "tmp").rmdir()
    elif scene.engine == "superblock":
        path = _data_files(scene)[0]
        data = bytearray(path.read_bytes())
        data[:PAGE], data[-PAGE:] = b"\xaa" * PAGE, b"\xaa" * PAGE
        path.write_bytes(data)
    elif scene.engine == "lmdb":
        path = scene.blocks / "lmdb" / "data.mdb"
        data = bytearray(path.read_bytes())
        data[: 2 * PAGE] = bytes(2 * PAGE)
        path.write_bytes(data)
    elif scene.engine == "leveldb":
        (scene.blocks / "leveldb" / "CURRENT").unlink()
    else:
        path = scene.blocks / "sqlite" / "store.db"
        data = bytearray(path.read_bytes())
        data[:100] = b"\xaa" * 100
        path.write_bytes(data)


def spoiled_structure(scene: Scene) -> None:
    """A page or file of the structure with other bytes in it."""
    if scene.engine == "filesystem":
        path = (scene.blocks / scene.where(VICTIM)).parent
        path.rename(path.with_name("zz"))
    elif scene.engine == "superblock":
        path = _data_files(scene)[0]
        data = bytearray(path.read_bytes())
        data[:PAGE] = b"\xaa" * PAGE
        path.write_bytes(data)
    elif scene.engine == "lmdb":
        path = scene.blocks / "lmdb" / "data.mdb"
        data = bytearray(path.read_bytes())
        metas = [struct.unpack_from("<QQQ", data, base + 16 + 112) for base in (0, PAGE)]
        root = max(metas, key=lambda meta: meta[2])[0]
        data[root * PAGE : (root + 1) * PAGE] = b"\xaa" * PAGE
        path.write_bytes(data)
    elif scene.engine == "leveldb":
        (path,) = (scene.blocks / "leveldb").glob("MANIFEST-*")
        os.truncate(path, path.stat().st_size // 2)
    else:
        path = scene.blocks / "sqlite" / "store.db"
        data = bytearray(path.read_bytes())
        data[65536 : 65536 + 512] = b"\xaa" * 512
        path.write_bytes(data)


def spoiled_log(scene: Scene) -> None:
    """A flipped bit in the engine's own log, after a kill."""
    if scene.engine not in ("leveldb",):
        raise NotApplicable("it has no log, or none after a clean stop")
    path = max((scene.blocks / "leveldb").glob("*.ldb"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Scene], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        flipped_payload, zeroed_page, flipped_header, flipped_key, flipped_padding, cut_record,
        cut_file, emptied_file, lost_file, lost_record, unknown_record, lost_index, torn_journal,
        cut_journal, spoiled_checkpoint, index_newer_than_data, duplicate, swapped,
        two_in_one_place, wrong_free_list, wrong_counters, leftovers, symlink, fifo, device,
        second_name, no_rights, other_owner, of_another_store, stale_lock, newer_format,
        spoiled_store_file, lost_store_file, spoiled_namespace, lost_directories, lost_structure,
        spoiled_structure, spoiled_log,
    )
}  # fmt: skip

"""docs/formats.md says what the code does: its tables are compared, its example is run."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from kvstore import events, journal, layout, namespaces, record
from kvstore.backends import graves, superfile
from kvstore.keys import named, namespace_id

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
TEXT = (ROOT / "docs" / "formats.md").read_text()

Table = list[list[str]]


def tables(heading: str) -> list[Table]:
    """Return the tables between this heading and the next, as rows of cells without backticks."""
    section = re.split(rf"^#+ {re.escape(heading)}$", TEXT, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    return [
        [[cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in rows]
        for rows in (block.splitlines()[2:] for block in blocks)
    ]


def layout_of(form: struct.Struct, names: list[str]) -> list[tuple[int, int, str]]:
    """Return (offset, size, name) for the fields of a little-endian struct."""
    assert form.format.startswith("<")
    codes = re.findall(r"\d*[sx]|[A-Z]", form.format)
    sizes = [struct.calcsize("<" + code) for code in codes]
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return list(zip(offsets, sizes, names, strict=True))


def documented(table: Table) -> list[tuple[int, int, str]]:
    return [(int(offset), int(size), name) for offset, size, name, _ in table]


def test_the_envelope() -> None:
    names = list(record._Parsed._fields)
    assert documented(tables("Envelope")[0]) == layout_of(record.FIXED, names)
    assert tables("Envelope")[0][0][3] == record.MAGIC.decode()
    assert f"At {record.FIXED.size} follow the key" in TEXT
    assert f"0x{record.INCOMPAT_FLAGS:08x}" in TEXT
    assert tables("Envelope")[0][1][3] == str(record.VERSION)


def test_tlvs() -> None:
    _, header, types = tables("Envelope")
    assert documented(header) == layout_of(record._TLV, ["type", "reserved", "length"])
    values = {name: value for name, value in vars(record).items() if name.startswith("TLV_")}
    assert {f"TLV_{name.upper()}": int(number) for number, name, _ in types} == values


def test_the_record_image() -> None:
    rows = tables("Record image")[0]
    assert rows[0][:2] == ["0", str(record.HEADER_PAGE)]
    assert rows[1][0] == str(record.HEADER_PAGE)


def test_the_super_block() -> None:
    names = ["magic", "version", "reserved", "store", "number", "slot_bytes", "file_bytes"]
    expected = layout_of(superfile.HEADER, [*names, "edition"])
    expected.append((superfile.HEADER.size, superfile.SUM.size, "checksum"))
    table = tables("Super-block")[0]
    assert documented(table) == expected
    assert table[0][3] == superfile.MAGIC.decode()
    assert table[1][3] == str(superfile.VERSION)
    assert f"`{superfile.TOMBSTONE.decode()}`" in TEXT
    fields = graves.ENTRY.fields
    assert fields is not None
    entry = [(offset, kind.itemsize, name) for name, (kind, offset, *_) in fields.items()]
    assert documented(tables("Super-block")[1]) == entry
    assert f"{graves._CHECK:#x}" in TEXT
    assert f"ending in\n`{superfile.SUFFIX}{superfile.NEW}`" in TEXT


def test_the_golden_super_block() -> None:
    """Header page, a slot with the golden record, one with a tombstone, one that is blank."""
    data = (GOLDEN / "superblock.sb").read_bytes()
    shape = superfile.Shape(bytes(range(16)), 1, 8192, len(data), 3)
    for start in (0, len(data) - 4096):
        assert superfile.decode(memoryview(data)[start:]) == shape
        assert data[start : start + 4096] == shape.encode().ljust(4096, b"\0")
    assert record.decode(data[4096:]).generation == 5
    assert data[4096 + 8192 :].startswith(superfile.TOMBSTONE)
    assert data[4096 + 2 * 8192 : 4100 + 2 * 8192] == bytes(4)


def test_the_file_header() -> None:
    names = ["magic", "version", "record_bytes", "epoch", "uuid", "sequence", "size", "sums"]
    expected = layout_of(journal.HEADER, [*names, "reserved"])
    expected.append((journal.HEADER.size, 8, "header_checksum"))
    table = tables("File header")[0]
    assert documented(table) == expected
    for kind in journal.FileKind:
        assert f"`{kind.value.decode()}`" in TEXT
        assert kind.value.decode() in table[0][3]
    assert table[1][3] == str(journal.VERSION)
    assert table[2][3] == str(events.RECORD_BYTES) == str(events.RECORD.itemsize)


def test_records() -> None:
    fields = events.RECORD.fields
    assert fields is not None
    expected = [(offset, kind.itemsize, name) for name, (kind, offset, *_) in fields.items()]
    assert documented(tables("Record")[0]) == sorted(expected)


def test_kinds_of_records() -> None:
    table = tables("Record")[1]
    assert {name: int(number) for number, name, _ in table} == {
        kind.name: kind.value for kind in events.Kind
    }


def test_the_checksum_formula_and_its_constants() -> None:
    assert f"s = 0x{events._SEED:x}" in TEXT
    assert f"* 0x{events._FACTOR:x}" in TEXT
    assert f"up to {events.TOUCH_ROWS} row numbers" in TEXT
    assert f"`0x{events.NONE:x}` = none" in TEXT


def test_store_json() -> None:
    made = layout.new_record(engine="filesystem", capacity=1 << 30)
    written = re.findall(r'^  "(\w+)"', layout.encode(made).decode(), flags=re.MULTILINE)
    assert [row[0] for row in tables("STORE.json")[0]] == written
    assert tables("STORE.json")[0][0][2].startswith(f"{layout.FORMAT}.")
    assert all(f"`{group}`" in TEXT for group in layout.KNOWN_FEATURES)


def test_the_namespace_file() -> None:
    written = re.findall(r'^  "(\w+)"', namespaces.encode({"a": 1}, 1).decode(), flags=re.MULTILINE)
    assert {row[0] for row in tables("Namespaces")[0]} == set(written)
    assert f"`{namespace_id(named('default')).hex()}`" in TEXT


@pytest.fixture(scope="module")
def example() -> dict[str, object]:
    code = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    found: dict[str, object] = {}
    exec(compile("\n".join(code), "formats.md", "exec"), found)
    return found


def test_the_example_reads_the_golden_envelope(example: dict[str, object]) -> None:
    read = example["envelope"]
    assert callable(read)
    image = (GOLDEN / "envelope.kvb").read_bytes()
    header = record.decode(image)
    assert read(image) == {
        "store": header.store.hex(),
        "namespace": header.namespace.hex(),
        "shard": header.shard,
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "generation": header.generation,
        "payload": image[4096 : 4096 + header.stored_length],
    }


@pytest.mark.parametrize("name", ["journal.0000000000000001", "checkpoint.0000000000000001"])
def test_the_example_reads_the_golden_journal_and_checkpoint(
    example: dict[str, object], name: str
) -> None:
    read = example["records"]
    assert callable(read)
    data = (GOLDEN / name).read_bytes()
    found = list(read(data))
    assert len(found) >= 6
    kinds = {events.Kind(kind) for kind, *_ in found}
    assert events.Kind.SYNC in kinds
    with pytest.raises(AssertionError, match="damaged at 128"):
        list(read(data[:150] + bytes([data[150] ^ 1]) + data[151:]))

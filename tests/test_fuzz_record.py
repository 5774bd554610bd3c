"""Bytes that nobody wrote: decode answers or raises CorruptBlock, judge always answers."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from dataclasses import replace

import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore import record
from kvstore.errors import CorruptBlock
from kvstore.record import FIXED, HEADER_PAGE, Header, Verdict

ROUNDS = 20_000
SEED = 20_261_130


def some_header(chance: random.Random) -> Header:
    length = chance.randint(1, 5000)
    return Header(
        store=chance.randbytes(16),
        namespace=chance.randbytes(16),
        shard=chance.randrange(1 << 16),
        key=chance.randbytes(chance.randint(1, 64)),
        parent=chance.randbytes(chance.choice([0, 1, 36, 64])),
        generation=chance.randrange(1 << 64),
        written_ns=chance.randrange(1 << 64),
        logical_length=length,
        stored_length=length,
        checksum=chance.randrange(1 << 64),
        label="l" * chance.choice([0, 1, 255]),
        extra=chance.choice([b"", b"\x02\x00\x04\x00abcd"]),
    )


def repair(image: bytearray) -> None:
    """Let the header checksum match, at whatever length the header claims."""
    length = struct.unpack_from("<H", image, 6)[0]
    if 8 <= length <= len(image):
        struct.pack_into("<Q", image, length - 8, xxhash.xxh3_64_intdigest(image[: length - 8]))


def mutate(image: bytearray, chance: random.Random) -> None:
    """Change a few bytes, mostly where the header keeps its lengths."""
    for _ in range(chance.randint(1, 3)):
        where = chance.choice([6, 7, 14, 15, 64, 68, 80, 82, 83, chance.randrange(len(image))])
        image[where] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])


def look(image: bytearray, header: Header) -> Verdict:
    """Have both look at the image; return the verdict."""
    decoded = None
    with contextlib.suppress(CorruptBlock):
        decoded = record.decode(image)
    verdict, checksum, reason = record.judge(
        memoryview(image),
        len(image),
        store=header.store,
        namespace=header.namespace,
        shard=header.shard,
        key=header.key,
        generation=header.generation,
        length=header.stored_length,
    )
    assert (verdict is Verdict.OK) == (reason == "")
    assert verdict is not Verdict.OK or checksum == record.payload_checksum(
        image[HEADER_PAGE : HEADER_PAGE + header.stored_length]
    )
    # The two agree on what a header is.
    assert (decoded is not None) or verdict is Verdict.DAMAGED
    if decoded is not None and not decoded.flags:
        assert record.decode(record.encode(decoded)) == decoded
    return verdict


def test_mutated_headers_with_a_repaired_checksum() -> None:
    chance = random.Random(SEED)
    seen = set()
    for _ in range(ROUNDS):
        header = some_header(chance)
        payload = chance.randbytes(header.stored_length)
        header = replace(header, checksum=record.payload_checksum(payload))
        image = bytearray(record.image_bytes(len(payload)))
        record.encode_into(header, memoryview(image)[:HEADER_PAGE])
        image[HEADER_PAGE : HEADER_PAGE + len(payload)] = payload
        page = image[: chance.choice([len(record.encode(header)), HEADER_PAGE])]
        mutate(page, chance)
        repair(page)
        image[: len(page)] = page
        seen.add(look(image, header))
    # Otherwise the mutations are too weak to prove anything.
    assert seen == set(Verdict)


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=2 * HEADER_PAGE), checksum_fits=st.booleans())
@example(data=b"KVB1", checksum_fits=False)
@example(data=b"KVB1\x01\x00\x68\x00".ljust(104, b"\0"), checksum_fits=True)
def test_any_bytes(data: bytes, checksum_fits: bool) -> None:
    image = bytearray(data)
    if checksum_fits and len(image) >= FIXED.size:
        image[:6] = b"KVB1\x01\x00"
        repair(image)
    look(image, some_header(random.Random(SEED)))


@settings(max_examples=300, deadline=None)
@given(
    area=st.binary(max_size=400),
    key_length=st.integers(0, 255),
    parent_length=st.integers(0, 255),
    tlv_length=st.integers(0, 0xFFFF) | st.none(),
)
def test_any_variable_part(
    area: bytes, key_length: int, parent_length: int, tlv_length: int | None
) -> None:
    """Headers that are right up to the variable part: lengths and TLVs are the fuzzed ones."""
    if tlv_length is None:
        tlv_length = max(0, len(area) - key_length - parent_length)
    body = key_length + parent_length + tlv_length
    length = min((FIXED.size + body + 7) // 8 * 8 + 8, 0xFFF8)
    image = bytearray(2 * HEADER_PAGE)
    FIXED.pack_into(
        image, 0, b"KVB1", 1, length, 0, 0, key_length, parent_length, bytes(16), bytes(16),
        1, 2, 3, 3, 4, 0, tlv_length, 0, 0,
    )  # fmt: skip
    image[FIXED.size : FIXED.size + len(area)] = area
    repair(image)
    look(image, some_header(random.Random(SEED)))


def peak_of(action: object) -> int:
    assert callable(action)
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_nothing_is_allocated_beyond_the_input() -> None:
    chance = random.Random(SEED)
    header = replace(some_header(chance), logical_length=64 << 20, stored_length=64 << 20)
    page = bytearray(record.encode(header).ljust(HEADER_PAGE, b"\0"))
    view = memoryview(page)

    def decode_lies() -> None:
        for offset, form in ((6, "<H"), (14, "B"), (15, "B"), (68, "<I"), (82, "<H")):
            lie = bytearray(page)
            struct.pack_into(form, lie, offset, (1 << 8 * struct.calcsize(form)) - 1)
            repair(lie)
            try:
                record.decode(lie)
            except CorruptBlock:
                continue

    image = bytearray(record.image_bytes(8 << 20))
    image[:HEADER_PAGE] = page
    assert peak_of(lambda: record.decode(view)) < 2 * HEADER_PAGE
    assert peak_of(decode_lies) < 4 * HEADER_PAGE
    # Neither a payload of 8 MiB nor one that claims 64 MiB is copied.
    assert peak_of(lambda: look(image, header)) < 4 * HEADER_PAGE
    shorter = replace(header, logical_length=8 << 20, stored_length=8 << 20, checksum=1)
    record.encode_into(shorter, memoryview(image)[:HEADER_PAGE])
    judged = peak_of(
        lambda: record.judge(
            memoryview(image), len(image), store=header.store, namespace=header.namespace,
            shard=header.shard, key=header.key, generation=header.generation, length=8 << 20,
        )
    )  # fmt: skip
    assert judged < 4 * HEADER_PAGE

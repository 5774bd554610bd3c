"""The envelope: what is written, what is believed, and what every kind of damage leads to."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore import record
from kvstore.errors import CorruptBlock, InvalidKey, UsageError
from kvstore.record import HEADER_PAGE, Header, Verdict

GOLDEN = Path(__file__).parent / "golden"
PAYLOAD = bytes(range(256)) * 4 + b"end"
HEADER = Header(
    store=bytes(range(16)),
    namespace=bytes(range(0xF0, 0x100)),
    shard=0x0102,
    key=b"\x00\xff" * 18,
    parent=b"\xaa" * 36,
    generation=0x0000_0007_0000_002A,
    written_ns=1_790_000_000_123_456_789,
    logical_length=len(PAYLOAD),
    stored_length=len(PAYLOAD),
    checksum=0x481C_A86D_41E0_418B,
    label="système ☃",
)


def image_of(header: Header = HEADER, payload: bytes = PAYLOAD) -> bytearray:
    image = bytearray(record.image_bytes(len(payload)))
    record.encode_into(header, memoryview(image)[:HEADER_PAGE])
    image[HEADER_PAGE : HEADER_PAGE + len(payload)] = payload
    return image


def judge(image: bytes | bytearray, **changes: object) -> tuple[Verdict, int, str]:
    asked: dict[str, object] = {
        "filled": len(image),
        "store": HEADER.store,
        "namespace": HEADER.namespace,
        "shard": HEADER.shard,
        "key": HEADER.key,
        "generation": HEADER.generation,
        "length": HEADER.stored_length,
    }
    return record.judge(memoryview(image), **(asked | changes))  # type: ignore[arg-type]


def repaired(image: bytes | bytearray, length: int | None = None) -> bytearray:
    """Return the image with a header checksum that matches what the header holds now."""
    copy = bytearray(image)
    length = struct.unpack_from("<H", copy, 6)[0] if length is None else length
    struct.pack_into("<Q", copy, length - 8, xxhash.xxh3_64_intdigest(copy[: length - 8]))
    return copy


# -- what is written ------------------------------------------------------------------------------


def test_the_golden_image_says_what_was_put_into_it() -> None:
    image = (GOLDEN / "envelope.kvb").read_bytes()
    assert record.decode(image) == HEADER
    assert image[HEADER_PAGE:][: len(PAYLOAD)] == PAYLOAD
    assert record.payload_checksum(PAYLOAD) == HEADER.checksum
    assert judge(image) == (Verdict.OK, HEADER.checksum, "")


def test_encoding_gives_the_golden_image_byte_for_byte() -> None:
    assert bytes(image_of()) == (GOLDEN / "envelope.kvb").read_bytes()


def test_decode_returns_what_encode_was_given() -> None:
    headers = [
        HEADER,
        replace(HEADER, parent=b"", label=""),
        replace(HEADER, key=b"k", parent=b"p" * 64, label="x" * 255),
        replace(HEADER, key=b"\0" * 64, transform=3, stored_length=9, flags=0x8000_0000),
        replace(HEADER, generation=2**64 - 1, written_ns=2**64 - 1, checksum=0, shard=0xFFFF),
        replace(HEADER, extra=b"\x02\x00\x03\x00abc" + b"\xc8\x07\x00\x00"),
        replace(HEADER, logical_length=64 << 20, stored_length=64 << 20),
    ]
    for header in headers:
        encoded = record.encode(header)
        assert len(encoded) % 8 == 0
        assert record.decode(encoded) == header
        assert record.decode(encoded.ljust(HEADER_PAGE, b"\x5a")) == header


def test_verdicts_keep_their_numbers() -> None:
    assert [(verdict.name, verdict.value) for verdict in Verdict] == [
        ("OK", 0), ("STALE", 1), ("DAMAGED", 2)
    ]  # fmt: skip


def test_the_smallest_block_is_a_block() -> None:
    header = replace(HEADER, logical_length=1, stored_length=1)
    header = replace(header, checksum=record.payload_checksum(b"x"))
    image = image_of(header, b"x")
    assert record.decode(image) == header
    assert judge(image, length=1) == (Verdict.OK, header.checksum, "")


def test_encode_into_fills_the_page_and_nothing_else() -> None:
    image = bytearray(b"\xee" * (HEADER_PAGE + 8))
    length = record.encode_into(HEADER, memoryview(image)[:HEADER_PAGE])
    assert image[:length] == record.encode(HEADER)
    assert image[length:HEADER_PAGE] == bytes(HEADER_PAGE - length)
    assert image[HEADER_PAGE:] == b"\xee" * 8


def test_the_header_ends_within_its_page() -> None:
    used = len(record.encode(replace(HEADER, label="")))
    extra = b"\x09\x00" + struct.pack("<H", HEADER_PAGE - used - 4) + bytes(HEADER_PAGE - used - 4)
    assert len(record.encode(replace(HEADER, label="", extra=extra))) == HEADER_PAGE
    longer = b"\x09\x00" + struct.pack("<H", len(extra) + 4) + bytes(len(extra) + 4)
    with pytest.raises(UsageError, match="4104 bytes"):
        record.encode(replace(HEADER, label="", extra=longer))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": b""}, UsageError),
        ({"key": bytes(65)}, UsageError),
        ({"parent": bytes(65)}, UsageError),
        ({"store": bytes(15)}, UsageError),
        ({"namespace": bytes(17)}, UsageError),
        ({"shard": 65_536}, InvalidKey),
        ({"logical_length": 0}, InvalidKey),
        ({"stored_length": (64 << 20) + 1}, InvalidKey),
        ({"label": "é" * 128}, UsageError),
        ({"label": "\ud800"}, UsageError),
    ],
)
def test_fields_out_of_bounds_are_not_encoded(
    change: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        record.encode(replace(HEADER, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "image"), [(1, 8192), (4096, 8192), (4097, 12288), (64 << 20, (64 << 20) + 4096)]
)
def test_an_image_is_a_page_and_whole_pages(length: int, image: int) -> None:
    assert record.image_bytes(length) == image
    assert record.image_bytes_of(np.array([length, 1], np.uint32)).tolist() == [image, 8192]


def test_checksums_are_xxh3_64_with_seed_0() -> None:
    # Values of the reference implementation.
    assert record.payload_checksum(b"") == 0x2D06800538D394C2
    assert record.payload_checksum(b"a" * 3) == xxhash.xxh3_64_intdigest(b"aaa", seed=0)
    assert record.payload_checksum(np.frombuffer(PAYLOAD, np.uint8).data) == HEADER.checksum


# -- what is believed -----------------------------------------------------------------------------


def test_every_flipped_bit_of_the_header_is_noticed() -> None:
    image = image_of()
    for position in range(len(record.encode(HEADER))):
        for bit in range(8):
            image[position] ^= 1 << bit
            verdict, checksum, reason = judge(image)
            assert (verdict, checksum) == (Verdict.DAMAGED, 0)
            assert reason
            with pytest.raises(CorruptBlock):
                record.decode(image)
            image[position] ^= 1 << bit
    assert judge(image)[0] is Verdict.OK


def test_every_flipped_byte_of_the_payload_is_noticed() -> None:
    image = image_of()
    for position in range(HEADER_PAGE, HEADER_PAGE + len(PAYLOAD)):
        image[position] ^= 0x40
        assert judge(image)[0] is Verdict.DAMAGED
        image[position] ^= 0x40


def test_padding_does_not_matter() -> None:
    image = image_of()
    header_end, payload_end = len(record.encode(HEADER)), HEADER_PAGE + len(PAYLOAD)
    image[header_end:HEADER_PAGE] = b"\xff" * (HEADER_PAGE - header_end)
    image[payload_end:] = b"\xff" * (len(image) - payload_end)
    assert judge(image) == (Verdict.OK, HEADER.checksum, "")


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"store": bytes(16)}, "store"),
        ({"namespace": bytes(16)}, "namespace"),
        ({"shard": 0}, "shard"),
        ({"key": HEADER.key[:-1]}, "key"),
        ({"key": HEADER.key[:-1] + b"\0"}, "key"),
        ({"key": HEADER.key + b"\0"}, "key"),
        ({"generation": HEADER.generation + 1}, "generation"),
        ({"generation": HEADER.generation - 1}, "generation"),
    ],
)
def test_a_record_of_another_identity_is_stale(asked: dict[str, object], word: str) -> None:
    verdict, checksum, reason = judge(image_of(), **asked)
    assert (verdict, checksum) == (Verdict.STALE, 0)
    assert word in reason


def test_a_stale_record_is_stale_even_if_its_payload_is_damaged() -> None:
    image = image_of()
    image[-1000] ^= 1
    assert judge(image, generation=1)[0] is Verdict.STALE


@pytest.mark.parametrize("length", [len(PAYLOAD) - 1, len(PAYLOAD) + 1, 0, 64 << 20])
def test_another_length_is_damage(length: int) -> None:
    verdict, checksum, reason = judge(image_of(), length=length)
    assert (verdict, checksum) == (Verdict.DAMAGED, 0)
    assert "payload" in reason


def test_an_image_is_good_exactly_when_header_and_payload_are_filled() -> None:
    image = image_of()
    needed = HEADER_PAGE + len(PAYLOAD)
    for filled in (-1, 0, 1, 95, 96, 200, HEADER_PAGE - 1, HEADER_PAGE, needed - 1):
        assert judge(image, filled=filled)[0] is Verdict.DAMAGED
    for filled in (needed, needed + 1, len(image), len(image) + 1):
        assert judge(image, filled=filled)[0] is Verdict.OK
    assert judge(image[:needed])[0] is Verdict.OK
    assert judge(b"")[0] is Verdict.DAMAGED


def test_what_was_not_filled_is_not_looked_at() -> None:
    # A recycled buffer still holds the right bytes of an earlier read.
    assert judge(image_of(), filled=HEADER_PAGE + len(PAYLOAD) - 1)[0] is Verdict.DAMAGED


# -- headers that are whole but wrong -------------------------------------------------------------


def changed(offset: int, form: str, value: int) -> bytearray:
    image = image_of()
    struct.pack_into(form, image, offset, value)
    return repaired(image, len(record.encode(HEADER)))


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (changed(4, "<H", 2), "version 2"),
        (changed(4, "<H", 0), "version 0"),
        (changed(8, "<I", 0x0001), "flags 0x0001"),
        (changed(8, "<I", 0x8000), "flags 0x8000"),
        (changed(14, "B", 0), "key"),
        (changed(14, "B", 65), "key"),
        (changed(14, "B", 28), "fill"),
        (changed(15, "B", 65), "parent"),
        (changed(15, "B", 0), "fill"),
        (changed(64, "<I", 0), "the block has 0"),
        (changed(64, "<I", (64 << 20) + 1), "the block has"),
        (changed(64, "<I", 5), "two lengths"),
        (changed(68, "<I", 0), "stored"),
        (changed(68, "<I", 2**32 - 1), "stored"),
        (changed(82, "<H", 0xFFFF), "fill"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(image: bytearray, word: str) -> None:
    with pytest.raises(CorruptBlock, match=word):
        record.decode(image)
    assert judge(image)[0] is Verdict.DAMAGED


def test_flags_and_fields_that_may_be_ignored_are() -> None:
    image = image_of()
    struct.pack_into("<I", image, 8, 0xFFFF_0000)
    struct.pack_into("<IQ", image, 84, 1, 2)
    assert judge(repaired(image))[0] is Verdict.OK
    assert record.decode(repaired(image)).flags == 0xFFFF_0000


def test_an_unknown_transform_is_named_and_not_served() -> None:
    image = image_of(replace(HEADER, transform=7))
    assert record.decode(image).transform == 7
    verdict, _, reason = judge(image)
    assert verdict is Verdict.DAMAGED
    assert "transform 7" in reason


@pytest.mark.parametrize("length", [0, 8, 96, 103, 4104, 65_528, 191, 193, 200, 184])
def test_a_wrong_header_length_is_refused(length: int) -> None:
    image = image_of()
    assert len(record.encode(HEADER)) == 192
    struct.pack_into("<H", image, 6, length)
    if 104 <= length <= HEADER_PAGE:
        image = repaired(image, length)
    with pytest.raises(CorruptBlock):
        record.decode(image)
    assert judge(image)[0] is Verdict.DAMAGED


def with_tlvs(area: bytes) -> bytearray:
    """Return an image whose TLV area holds these raw bytes."""
    padded = area.ljust(-(-len(area) // 8) * 8, b"\0")
    # Any unknown TLV makes room; its bytes are then overwritten.
    room = b"\x63\x00" + struct.pack("<H", len(area) - 4) + bytes(len(area) - 4)
    image = image_of(replace(HEADER, label="", extra=room))
    start = 96 + len(HEADER.key) + len(HEADER.parent)
    image[start : start + len(area)] = padded[: len(area)]
    return repaired(image)


@pytest.mark.parametrize(
    ("area", "word"),
    [
        (b"\x01\x00\x00\x00", "label has 0"),
        (b"\x01\x00\x00\x01" + b"a" * 256, "label has 256"),
        (b"\x01\x00\x02\x00\xff\xfe", "UTF-8"),
        (b"\x01\x00\x01\x00a\x01\x00\x01\x00b", "two labels"),
        (b"\x01\x00\x05\x00abcd", "longer"),
        (b"\x63\x00\xff\xffabcd", "longer"),
        (b"\x63\x00\x00\x00\x01\x00\x01", "cut off"),
    ],
)
def test_a_broken_tlv_area_is_refused(area: bytes, word: str) -> None:
    with pytest.raises(CorruptBlock, match=word):
        record.decode(with_tlvs(area))
    assert judge(with_tlvs(area))[0] is Verdict.DAMAGED


def test_unknown_tlvs_are_kept_in_order_around_the_label() -> None:
    image = with_tlvs(b"\x02\x00\x01\x00n\x01\x00\x02\x00hi\xc8\x05\x00\x00")
    header = record.decode(image)
    assert header.label == "hi"
    assert header.extra == b"\x02\x00\x01\x00n\xc8\x05\x00\x00"
    assert record.decode(record.encode(header)) == header
    assert judge(image)[0] is Verdict.OK


# -- buffers --------------------------------------------------------------------------------------


def test_any_contiguous_buffer_is_read() -> None:
    image = bytes(image_of())
    for buffer in (image, bytearray(image), memoryview(image), np.frombuffer(image, np.uint8)):
        assert record.decode(buffer) == HEADER  # type: ignore[arg-type]
    for empty in (b"", memoryview(b""), np.zeros(0, np.uint8)):
        with pytest.raises(CorruptBlock, match="cut off after 0"):
            record.decode(empty)  # type: ignore[arg-type]
    assert (
        record.judge(
            np.frombuffer(image, np.uint8).data,
            len(image),
            store=HEADER.store,
            namespace=HEADER.namespace,
            shard=HEADER.shard,
            key=HEADER.key,
            generation=HEADER.generation,
            length=len(PAYLOAD),
        )[0]
        is Verdict.OK
    )

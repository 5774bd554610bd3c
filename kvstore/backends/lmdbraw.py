"""The raw reader of the engine `lmdb`: envelopes anywhere in ``data.mdb``.

The value of a large node lies in one run of overflow pages behind the header of the first, that of
a small one inside of its page; neither is broken up, so neither meta pages nor trees are needed.
Pages that were given up keep what they held until they are used again.
"""

from __future__ import annotations

from kvstore.backends.raw import StreamSalvage, ends_with_number

_OVERFLOW = 4


class LmdbSalvage(StreamSalvage):
    def wanted(self, path: str) -> bool:
        return path == "lmdb/data.mdb"

    def is_key(self, before: bytes, number: int) -> bool:
        # A page header is 16 bytes: u64 number, u16 pad, u16 flags, u32 count of pages.
        flags, count = before[-6:-4], int.from_bytes(before[-4:], "little")
        overflow = flags == _OVERFLOW.to_bytes(2, "little") and 0 < count <= 1 << 10
        return overflow or ends_with_number(before, number)

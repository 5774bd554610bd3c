"""What can be asked of a put, and what can be answered for one block: the words both sides share.

Standard library only: model servers import this module.
"""

from __future__ import annotations

from enum import IntEnum


class Ack(IntEnum):
    """How far a put must have come before it is answered."""

    ACCEPTED = 0
    """Readable and queued; survives nothing."""
    WRITTEN = 1
    """Engine and journal have it; survives the death of the daemon."""
    DURABLE = 2
    """A successful sync of data, then of the journal, covers it; survives power loss."""


class BlockStatus(IntEnum):
    """The answer for one block of a batch."""

    OK = 0
    ALREADY_PRESENT = 1
    MISS = 2
    FULL = 3
    CONFLICT = 4
    """A put of a known key with another length; the old block is kept."""
    FAILED = 5
    MISMATCH = 6
    """What arrived is not what the sender's checksum says."""
    TOO_LARGE = 7
    """The block is longer than the room given for it; its length is in the reply."""
    BUSY = 8
    """No room in the daemon's memory now; to be repeated."""

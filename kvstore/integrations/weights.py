"""A fingerprint of a model's weights: other weights, other blocks.

The KV of a prompt depends on every weight, and a model server's own cache knows a model by its name
only. To read all weights would take minutes; so what is hashed is each file's size, the header of
each ``safetensors`` file (names, types, shapes and places of all tensors), and a few bytes out of
each tensor. Training changes every tensor, so it changes these bytes; somebody who edits single
weights by hand has to set a fingerprint of his own.

Standard library only: model servers import this module.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
MAX_HEADER_BYTES = 100 << 20
"""As the format has it."""
SAMPLE_BYTES = 256
SAMPLES_OF_A_TENSOR = 3
SAMPLES_OF_A_FILE = 256
"""Where the tensors are not known."""


def fingerprint(folder: Path) -> str:
    """Return 32 hex digits for the weights in a model's folder.

    Raises UsageError when there are none, OSError when they cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise UsageError(
            f"no weights in {folder}", "set weights to a text that changes when the weights do"
        )
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    for path in files:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield what is hashed of a file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        header = _header(fd, size) if path.suffix == ".safetensors" else b""
        yield header
        for start, end in _tensors(header) or [(0, size)]:
            count = SAMPLES_OF_A_TENSOR if header else SAMPLES_OF_A_FILE
            for number in range(count):
                at = start + (end - start) * number // count
                yield os.pread(fd, min(SAMPLE_BYTES, end - at), at)
    finally:
        os.close(fd)


def _header(fd: int, size: int) -> bytes:
    """Return the header of a safetensors file: u64 little endian, then so many bytes of JSON."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    return os.pread(fd, 8 + length, 0) if length <= min(size, MAX_HEADER_BYTES) else b""


def _tensors(header: bytes) -> list[tuple[int, int]]:
    """Return where each tensor lies in its file."""
    try:
        entries = json.loads(header[8:])
        places = [
            entry["data_offsets"] for name, entry in sorted(entries.items()) if name[0] != "_"
        ]
        return [(len(header) + int(start), len(header) + int(end)) for start, end in places]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []

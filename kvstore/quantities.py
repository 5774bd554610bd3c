"""Sizes and durations as people write them."""

from __future__ import annotations

import re

_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


class Size(int):
    """A number of bytes, written ``64GiB``, ``1.5 MiB`` or plain."""


class Duration(float):
    """A number of seconds, written ``250ms``, ``5s``, ``10min``, ``2h`` or plain."""


def parse_size(text: str | int) -> Size:
    """Return a size in bytes. Units are KiB, MiB, GiB and TiB, in any case; ValueError otherwise.

    ``1GB`` and ``1G`` are refused: people mean 1000 or 1024 by them, and a capacity that is 7 %
    off either fills a disk or wastes it.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError("negative")
        return Size(text)
    number, unit = _split(text)
    if unit not in _SIZE_UNITS:
        if unit.rstrip("b") in {"k", "m", "g", "t"}:
            raise ValueError(f"{unit.upper()} may mean 1000 or 1024; say {unit[0].upper()}iB")
        raise ValueError(f"unknown unit {unit!r}")
    size = number * _SIZE_UNITS[unit]
    if size != int(size) or size >= 1 << 63:
        raise ValueError("not a whole number of bytes below 8 EiB")
    return Size(size)


def parse_duration(text: str | float) -> Duration:
    """Return a duration in seconds. Units are ms, s, m or min, h and d; ValueError otherwise."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < 1e9:
            raise ValueError("out of range")
        return Duration(text)
    number, unit = _split(text)
    if unit not in _TIME_UNITS:
        raise ValueError(f"unknown unit {unit!r}")
    return parse_duration(number * _TIME_UNITS[unit])


def _split(text: object) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip().lower()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("not a number with a unit")
    number = match[1]
    return (float(number) if "." in number else int(number)), match[2]

"""What the service manager hears of the daemon: sd_notify(3), in a few lines of our own.

systemd gives ``$NOTIFY_SOCKET``, a datagram socket; where it is not set, nothing is sent. With
``$WATCHDOG_USEC`` a daemon that gives no sign of life for so long is killed and started again. The
signs come from the event loop once it has handed work to the workers, never from a call of the disk
that came back: with a disk that hangs, the next daemon would hang as well, and have lost what was
in memory.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

log = logging.getLogger(__name__)

STATUS_SECONDS = 5.0
"""How often the state is told while nothing special goes on."""
RECOVERY_SECONDS = 120.0
"""How much longer a start may take, counted from each message: a recovery that is cut short begins
anew, so only an event loop that hangs ends it."""
DRAIN_GRACE_SECONDS = 10.0
"""How much longer than its limit a drain may take: the daemon ends itself at the limit."""
_SIGNS = 3
"""Signs of life in the time after which the service manager takes us for dead."""
_MOST = 400
"""Characters of a status line."""


class Supervisor:
    """Whoever started the daemon and wants to hear of it; the variables are taken out of
    ``environ``, so that no child of ours speaks in our name.

    No method waits or raises. What cannot be sent is kept, and sent with what comes next.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._silence = _watchdog_seconds(environ)
        self._address = _address(environ.pop("NOTIFY_SOCKET", ""))
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self._unsent: dict[str, object] = {}
        self._failing = False
        self._tell_at = self._sign_at = 0.0

    def recovering(self, status: Mapping[str, Any]) -> None:
        """Tell how far the opening is, and that it goes on."""
        self._send(STATUS=describe(status), EXTEND_TIMEOUT_USEC=_micros(RECOVERY_SECONDS))

    def ready(self, status: Mapping[str, Any]) -> None:
        """Tell that requests are served from now on."""
        self._send(READY=1, STATUS=describe(status))

    def reloading(self) -> None:
        """Tell that settings are being read again; :meth:`ready` follows in any case."""
        self._send(RELOADING=1, MONOTONIC_USEC=_micros(time.monotonic()), STATUS="reloading")

    def tell(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Tell the state, if it was not told lately."""
        now = time.monotonic()
        if self._socket is not None and now >= self._tell_at:
            self._tell_at = now + STATUS_SECONDS
            self._send(STATUS=describe(status()))

    def sign(self) -> None:
        """Give a sign of life, if one is wanted and due."""
        now = time.monotonic()
        if self._silence is not None and now >= self._sign_at:
            self._sign_at = now + self._silence / _SIGNS
            self._send(WATCHDOG=1)

    def stopping(self, seconds: float) -> None:
        """Tell that the drain has begun and takes ``seconds`` at most."""
        extension = _micros(seconds + DRAIN_GRACE_SECONDS)
        self._send(STOPPING=1, STATUS="draining", EXTEND_TIMEOUT_USEC=extension)

    def draining(self, dirty_blocks: int, clients: int) -> None:
        """Tell what the drain still waits for."""
        self._send(STATUS=f"draining (blocks to write: {dirty_blocks:,}, clients: {clients:,})")

    def close(self) -> None:
        """Say no more. May be called twice."""
        self._send(STATUS="stopped")
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, **fields: object) -> None:
        if self._socket is None:
            return
        self._unsent.update(fields)
        message = "\n".join(f"{name}={_line(value)}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(message.encode(errors="replace"), self._address)
        except OSError as error:
            if not self._failing:
                log.warning("the service manager cannot be told how we are: %s", error)
            self._failing = True
            return
        self._failing = False
        self._unsent.clear()


def describe(status: Mapping[str, Any]) -> str:
    """Return in one line what ``kvstore status`` says at length."""
    state = status["state"]
    if state == "recovering":
        scanned = f", {status['scanned']:,} records scanned" if status["scanned"] else ""
        return f"recovering: {status['phase']}{scanned}"
    if problems := status["problems"]:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{state}: {problems[0]}{more}"
    live, capacity = status["live_bytes"] >> 20, status["capacity_bytes"] >> 20
    return f"{state}: {status['blocks']:,} blocks, {live:,} of {capacity:,} MiB"


def _line(value: object) -> str:
    """Return one line: a path with a line feed in it must not pass for another field."""
    return " ".join(str(value).split())[:_MOST]


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)


def _address(name: str) -> str:
    if name.startswith("@"):
        return "\0" + name[1:]
    if name and not name.startswith("/"):
        log.warning("NOTIFY_SOCKET=%s is of a kind that we do not know; ignored", name)
        return ""
    return name


def _watchdog_seconds(environ: MutableMapping[str, str]) -> float | None:
    """Return after what silence we are taken for dead, or None: sd_watchdog_enabled(3)."""
    micros, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(micros) / 1e6

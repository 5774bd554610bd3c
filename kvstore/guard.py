"""What the daemon asks of whoever comes by TCP: encryption, a certificate, a token.

On a Unix socket the kernel says who is there, and the mode of the socket who may come. By TCP
anybody may come. So a *stranger*, who has not shown the token, may say one small frame within a few
seconds, and only a few strangers are there at a time: they take no room from clients.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.credentials import MOST_TOKEN, read_token
from kvstore.errors import ConfigError, PermissionDenied
from kvstore.protocol import Op
from kvstore.tls import server_context

if TYPE_CHECKING:
    import socket
    import ssl
    from pathlib import Path

    from kvstore.protocol import Frame

STRANGERS = 32
STRANGER_SECONDS = 5.0
STRANGER_BYTES = MOST_TOKEN + 3072
"""The most that the first frame may have besides its header."""


@dataclass(frozen=True)
class GuardFiles:
    """The settings of the same names."""

    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None

    def read(self) -> Guard:
        """Raises ConfigError for what cannot be read, and for a half of what belongs together."""
        certificate = self.tls_certificate
        for name in ("tls_key", "tls_client_ca"):
            if getattr(self, name) is not None and certificate is None:
                raise ConfigError(
                    f"setting {name} is of no use without tls_certificate", "set both or neither"
                )
        context = None
        if certificate is not None:
            context = server_context(certificate, self.tls_key, self.tls_client_ca)
        return Guard(context, None if self.token_file is None else read_token(self.token_file))


@dataclass(frozen=True)
class Guard:
    """Whom TCP lets in: see :class:`GuardFiles`. Its token is shown nowhere."""

    context: ssl.SSLContext | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return f"Guard(tls={self.context is not None}, token={self.token is not None})"

    @property
    def complete(self) -> bool:
        """Whether other machines may be let near it."""
        return self.context is not None and self.token is not None

    @property
    def asks(self) -> bool:
        return self.context is not None or self.token is not None

    def receive(self, sock: socket.socket) -> socket.socket:
        """Return the encrypted form of a connection that was accepted. Raises OSError."""
        if self.context is None:
            return sock
        return self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def check_size(self, frame: Frame) -> None:
        """Refuse a first frame before anything is received of it. Raises PermissionDenied."""
        if frame.op != Op.HELLO or frame.payload_bytes or frame.meta_bytes > STRANGER_BYTES:
            raise _refused("the first frame is no small HELLO with the token")

    def check_token(self, told: dict[str, object]) -> None:
        """Raises PermissionDenied unless HELLO brought the token."""
        given = told.get("token")
        if not isinstance(given, str):
            raise _refused("HELLO came without a token")
        # In a time that does not depend on where the two differ.
        if not hmac.compare_digest(given.encode(errors="replace"), str(self.token).encode()):
            raise _refused("the token is wrong")


def _refused(what: str) -> PermissionDenied:
    return PermissionDenied(
        what, "give the client the daemon's token, for example by KVSTORE_TOKEN_FILE"
    )

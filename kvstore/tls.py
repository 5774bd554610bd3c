"""TCP between machines: encrypted, each side sure of the other.

TLS 1.3 only, as Python's ssl makes it. Standard library only: model servers import this module.
"""

from __future__ import annotations

import select
import socket
import ssl
from typing import TYPE_CHECKING, Any

from kvstore import errors
from kvstore.credentials import check_secret, open_file, reason_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.credentials import Credentials


def encrypt(sock: socket.socket, credentials: Credentials, host: str) -> Encrypted:
    """Return the encrypted form of a client's connection: the daemon must have a certificate for
    ``host``. The handshake comes next. Raises ConfigError, OSError."""
    context = _new_context(ssl.PROTOCOL_TLS_CLIENT)
    if credentials.ca_file is None:
        context.load_default_certs()
    else:
        _trust(context, credentials.ca_file)
    if credentials.certificate is not None:
        _show(context, credentials.certificate, credentials.key)
    encrypted = context.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=host)
    assert isinstance(encrypted, Encrypted)
    return encrypted


def server_context(
    certificate: str | Path, key: str | Path | None, client_ca: str | Path | None
) -> ssl.SSLContext:
    """Return what a daemon offers: its certificate (PEM; ``key`` None: in the same
    file), to anybody or only to clients whose certificate comes from ``client_ca``.

    Raises ConfigError.
    """
    context = _new_context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody resumes a session
    _show(context, certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, client_ca)
    return context


def _new_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = Encrypted
    return context


def _show(context: ssl.SSLContext, certificate: str | Path, key: str | Path | None) -> None:
    """Load a certificate and its private key, which nobody else may read. Raises ConfigError."""
    holder = certificate if key is None else key
    with open_file(holder) as file:
        check_secret(file.fileno(), holder)
    try:
        # The empty password: nobody is there to be asked for one.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise errors.ConfigError(
            f"certificate {certificate} with the private key in {holder} cannot be used: "
            f"{reason_of(error)}",
            "give both as PEM, the key without a password",
        ) from None


def _trust(context: ssl.SSLContext, ca_file: str | Path) -> None:
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise errors.ConfigError(
            f"certificates {ca_file} cannot be read: {reason_of(error)}", "give a file of PEM"
        ) from None


# -- the socket -----------------------------------------------------------------------------------


NotTrusted = ssl.SSLCertVerificationError


class Encrypted(ssl.SSLSocket):
    """An encrypted stream that behaves as a plain non-blocking one: what would block raises
    BlockingIOError. Of one thread at a time.

    A client may ask for new keys (RFC 8446, 4.6.3) while it takes no answers: reading would then
    wait until something can be sent. It is told as "nothing there": the answer goes out with the
    next bytes either way, and a client that stalls itself so runs into its time limit.
    """

    def advance(self) -> int:
        """Go on with the handshake; return what to wait for (of select.poll), 0 when it is over."""
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        return 0

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:  # noqa: ANN401
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recvmsg_into(self, *args: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        return self.recv_into(args[0][0]), [], 0, None

    def sendmsg(self, buffers: Any, *_: Any) -> int:  # type: ignore[override]  # noqa: ANN401
        """Send something of the first buffer. Unsent bytes of it may have been encrypted by then:
        after BlockingIOError the same buffer must be offered again, or nothing at all."""
        try:
            return self.send(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        # ssl's own also ends the encryption: later bytes would go out, and come in, as plain text.
        socket.socket.shutdown(self, how)

"""The sockets on which the daemon waits for clients: made by us, or handed over by systemd."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.credentials import is_loopback
from kvstore.errors import ConfigError, KVStoreError, PermissionDenied, StoreLocked

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

log = logging.getLogger(__name__)

_BACKLOG = 128
_FIRST_DESCRIPTOR = 3
"""Where systemd's descriptors begin: sd_listen_fds(3)."""
_LOCALHOST = "localhost"
ADMIN = "admin"
"""FileDescriptorName= of a socket on which monitoring asks."""


class Doors:
    """Where clients come in, and monitoring. Raises what :func:`unix_listener` does, and others.

    ``guarded``: TCP is encrypted and asks for a token, so other machines may come.

    What systemd hands over stands for the Unix socket, or for ``admin``: an address like
    ``listen``, or the path of a Unix socket.
    """

    def __init__(
        self,
        environ: MutableMapping[str, str],
        path: Path,
        group: int | None,
        listen: str | None,
        admin: str | None,
        *,
        guarded: bool = False,
    ) -> None:
        self._made: list[Path] = []
        given = inherited_listeners(environ, guarded=guarded)
        self.clients = [sock for name, sock in given if name != ADMIN]
        self.admin = next((sock for name, sock in given if name == ADMIN), None)
        if not self.clients:
            self.clients.append(self._unix(path, group))
        if listen is not None:
            self.clients.append(tcp_listener(listen, guarded=guarded))
        if self.admin is None and admin is not None:
            local = admin.startswith("/")
            self.admin = self._unix(Path(admin), group) if local else _admin_port(admin)
        for listener in self.clients:
            log.info("listening on %s", listener.getsockname())
        if self.admin is not None:
            log.info("answering monitoring on %s", self.admin.getsockname())

    def _unix(self, path: Path, group: int | None) -> socket.socket:
        listener = unix_listener(path, group)
        self._made.append(path)
        return listener

    def remove_names(self) -> None:
        """Remove the sockets that we made, so that nobody waits there."""
        while self._made:
            self._made.pop().unlink(missing_ok=True)

    def close(self) -> None:
        self.remove_names()
        for listener in self.clients:
            listener.close()


def _admin_port(address: str) -> socket.socket:
    tcp_address(address, setting=ADMIN)
    return tcp_listener(address)


def unix_listener(path: Path, group: int | None = None) -> socket.socket:
    """Return a listening Unix socket at ``path``, mode 0600, or 0660 for members of ``group``.

    A socket that nobody listens on any more is replaced; anything else in the way is an error.
    Raises StoreLocked when another daemon answers there, ConfigError, PermissionDenied.
    """
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # The mode must be right when the name appears, or somebody may connect in between; no other
    # thread makes files at this point. The group comes after: until we listen nobody can connect.
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
        if group is not None:
            # A service may be forbidden to change owners, even where nothing would change.
            if path.stat().st_gid != group:
                os.chown(path, -1, group)
            path.chmod(0o660)
    except OSError as error:
        sock.close()
        raise _bind_error(path, error) from error
    finally:
        os.umask(mask)
    return _listening(sock)


def _listening(sock: socket.socket) -> socket.socket:
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def _clear(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _bind_error(path, error) from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way of the socket", "remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A stopped daemon whose backlog is full would keep us here for ever.
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise _bind_error(path, error) from error
        else:
            raise StoreLocked(
                f"another daemon listens on {path}", "stop it, or use --socket with another path"
            )


def _bind_error(path: Path, error: OSError) -> KVStoreError:
    if isinstance(error, PermissionError):
        return PermissionDenied(f"no permission to make the socket {path}", "use --socket")
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"the directory of the socket {path} does not exist", "make it first")
    return ConfigError(f"cannot listen on {path}: {error.strerror or error}", "use --socket")


# -- TCP ------------------------------------------------------------------------------------------


def tcp_listener(address: str, *, guarded: bool = False) -> socket.socket:
    """Return a socket that listens on ``tcp://HOST:PORT``; see :func:`tcp_address`.

    Raises ConfigError.
    """
    host, port = tcp_address(address, guarded=guarded)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}", "choose another port"
        ) from error
    return _listening(sock)


def tcp_address(address: str, *, guarded: bool = False, setting: str = "listen") -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``, HOST a loopback address unless ``guarded``.

    Raises ConfigError, which calls the setting by its name. There is no way around it: on a network
    blocks are read by whoever listens, and written by whoever likes.
    """
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path:
        raise ConfigError(
            f"setting {setting} is {address!r}",
            "write tcp://HOST:PORT, for example tcp://[::1]:7700",
        )
    host = "127.0.0.1" if parts.hostname == _LOCALHOST else parts.hostname
    if not _is_address(host):
        raise ConfigError(
            f"setting {setting} names {parts.hostname!r}, which is no address",
            "write one of this machine's, for example 127.0.0.1",
        )
    if not guarded and not is_loopback(host):
        raise ConfigError(
            f"setting {setting} names {parts.hostname}, which other machines may reach, without "
            "encryption or without a token",
            "set tls_certificate and token_file too, or listen on 127.0.0.1, ::1 or localhost",
        )
    return host, port


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


# -- systemd --------------------------------------------------------------------------------------


def handed_over(environ: Mapping[str, str]) -> bool:
    """Whether systemd opened sockets for us: whoever knocks there starts us, again and again.

    A daemon that ended because its store is being checked would be started until systemd gives up
    and closes the socket for good. So it must wait instead.
    """
    ours = environ.get("LISTEN_PID") == str(os.getpid())
    return ours and environ.get("LISTEN_FDS", "").isdecimal()


def inherited_listeners(
    environ: MutableMapping[str, str], *, guarded: bool = False
) -> list[tuple[str, socket.socket]]:
    """Return the listening sockets that systemd opened for us (LISTEN_FDS) with their names
    (FileDescriptorName=, else empty), and forget them there.

    Raises ConfigError for one that is no listening stream socket of this machine.
    """
    ours = handed_over(environ)
    _, count, named = [environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")]
    if not ours:
        return []
    names = itertools.chain(named.split(":"), itertools.repeat(""))
    numbers = range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))
    return [
        # Monitoring speaks plain HTTP, so it stays on this machine whatever guards the clients.
        (name, _adopt(number, guarded=guarded and name != ADMIN))
        for number, name in zip(numbers, names, strict=False)
    ]


def _adopt(descriptor: int, *, guarded: bool) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(
            f"descriptor {descriptor} of LISTEN_FDS is no socket: {error.strerror}",
            "correct the socket unit",
        ) from None
    if sock.type != socket.SOCK_STREAM or not listening or not (guarded or _is_ours(sock)):
        raise ConfigError(
            f"descriptor {descriptor} of LISTEN_FDS is no stream socket of this machine",
            "use ListenStream= with a path or a loopback address; clients on other machines need "
            "tls_certificate and token_file",
        )
    sock.setblocking(False)
    return sock


def _is_ours(sock: socket.socket) -> bool:
    return sock.family == socket.AF_UNIX or is_loopback(str(sock.getsockname()[0]))

"""Files by which a client and a daemon on different machines know each other.

Named by :class:`Credentials`, or by the environment::

    KVSTORE_TOKEN_FILE           the token that the daemon asks for
    KVSTORE_CA_FILE              certificates (PEM) that the daemon's must come from
    KVSTORE_CLIENT_CERTIFICATE   the client's own, for a daemon that asks for one
    KVSTORE_CLIENT_KEY           its private key, if it is in another file

Standard library only: model servers import this module.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NamedTuple

from kvstore import errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VARIABLES = {
    "token_file": "KVSTORE_TOKEN_FILE",
    "ca_file": "KVSTORE_CA_FILE",
    "certificate": "KVSTORE_CLIENT_CERTIFICATE",
    "key": "KVSTORE_CLIENT_KEY",
}
LEAST_TOKEN, MOST_TOKEN = 16, 1024
"""Bytes of a token: too long to be guessed, short enough for the first frame."""
_OTHERS = 0o027
"""Modes of a secret file that are too open: written by the group, anything by everybody else."""


class Credentials(NamedTuple):
    """Files by which a client and a daemon know each other; None where there is none."""

    token_file: str | None = None
    ca_file: str | None = None
    """None: the certificates that this machine trusts anyway."""
    certificate: str | None = None
    key: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Credentials:
        return cls(**{name: environ.get(variable) or None for name, variable in VARIABLES.items()})


def read_token(path: str | Path) -> str:
    """Return the token in a file: one line of ASCII that is private to us or a group of ours.

    Raises ConfigError, which never tells the token.
    """
    with open_file(path) as file:
        check_secret(file.fileno(), path)
        data = file.read(MOST_TOKEN + 2).strip()
    if not LEAST_TOKEN <= len(data) <= MOST_TOKEN or not data.isascii() or len(data.split()) != 1:
        raise errors.ConfigError(
            f"token file {path} holds no line of {LEAST_TOKEN} to {MOST_TOKEN} characters",
            f"make one: (umask 077; openssl rand -hex 32 > {path})",
        )
    return data.decode()


def open_file(path: str | Path) -> IO[bytes]:
    """Open a file: it may be a link, as secrets often are, but no pipe that keeps us waiting."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    try:
        return open(path, "rb", opener=opener)
    except (OSError, ValueError) as error:
        raise errors.ConfigError(
            f"{path} cannot be read: {reason_of(error)}", "check path and permissions"
        ) from None


def check_secret(descriptor: int, path: str | Path) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise errors.ConfigError(f"{path} is no file", "name a file")
    if found.st_uid not in (0, os.geteuid()):
        raise errors.ConfigError(
            f"secret file {path} belongs to user {found.st_uid}", "give it to root or to this user"
        )
    if found.st_mode & _OTHERS:
        raise errors.ConfigError(
            f"secret file {path} has mode {stat.S_IMODE(found.st_mode):04o}: others may read it, "
            "or its group write it",
            f"run chmod 600 {path}",
        )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine is reached by ``host``, an address or ``localhost``."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def reason_of(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)

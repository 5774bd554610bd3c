"""Who is at the other end of a connection, and what it may ask for.

On a Unix socket the kernel says it: SO_PEERCRED holds process, user and group at the moment of
``connect``, SO_PEERGROUPS the further groups. Root, the daemon's own user and the members of
``admin_group`` are administrators; everybody else who got through the mode of the socket, and
everybody who comes by TCP, is an ordinary peer.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, PermissionDenied
from kvstore.namespaces import OWNER, is_private
from kvstore.protocol import Op

if TYPE_CHECKING:
    from kvstore.keys import NamespaceRecord
    from kvstore.namespaces import Namespace

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
_GROUPS_BYTES = 1024
"""The most that Python's getsockopt returns: 256 groups."""

ADMINISTRATIVE = frozenset({Op.DELETE})
"""Operations for administrators only; of ADMIN, everybody may ask for the status."""
PUBLIC_ACTIONS = frozenset({"status"})


@dataclass(frozen=True, slots=True)
class Peer:
    """One client. ``uid`` is None where the kernel does not know it (TCP): there, ``address``."""

    uid: int | None = None
    pid: int = 0
    administrator: bool = False
    address: str = ""

    def check(self, op: int) -> None:
        """Raises PermissionDenied for an operation that this peer may not ask for."""
        if op in ADMINISTRATIVE and not self.administrator:
            raise _denied(Op(op).name.lower())

    def check_action(self, action: object) -> None:
        """The same for one of the actions of ADMIN."""
        if action not in PUBLIC_ACTIONS and not self.administrator:
            raise _denied(str(action)[:40])

    def may_open(self, namespace: Namespace) -> bool:
        """Tell whether the namespace exists for this peer."""
        if not is_private(namespace.record or {}) or self.administrator:
            return True
        return self.uid is not None and namespace.owner == self.uid

    def own(self, record: NamespaceRecord, *, create: bool) -> dict[str, object]:
        """Return the record under which the namespace that this peer means is kept: a private one
        names its owner, who is this peer unless the record says otherwise.

        Raises PermissionDenied for a network peer that wants to make one, whether others have or
        not.
        """
        if not is_private(record) or OWNER in record:
            return dict(record)
        if self.uid is None and create:
            raise PermissionDenied(
                "a private namespace belongs to a user, and a network peer is none",
                "use the Unix socket",
            )
        return dict(record) if self.uid is None else {**record, OWNER: self.uid}

    def may_own(self, record: NamespaceRecord) -> bool:
        """Tell whether this peer may make a namespace of this record."""
        mine = self.uid is not None and record.get(OWNER) == self.uid
        return not is_private(record) or self.administrator or mine


def peer_of(sock: socket.socket, admin_gid: int | None) -> Peer:
    """Ask the kernel who connected to ``sock``."""
    if sock.family != socket.AF_UNIX:
        return Peer(address=str(sock.getpeername()[0]))
    pid, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    administrator = uid in (0, os.geteuid()) or (
        admin_gid is not None and (gid == admin_gid or admin_gid in _groups(sock))
    )
    return Peer(uid, pid, administrator)


def _groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # more groups than fit, or a kernel before 4.13
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)


def group_id(name: str | None, setting: str) -> int | None:
    """Return the number of a group of this machine, None for no name. Raises ConfigError."""
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"setting {setting}: this machine has no group {name!r}", "make it, or name another"
        ) from None


def _denied(what: str) -> PermissionDenied:
    return PermissionDenied(
        f"{what} is for administrators", "ask as root, as the daemon's user or in admin_group"
    )


def own_pidfd() -> int | None:
    """Return a descriptor of this process for clients to watch; None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(os.getpid())
    return None

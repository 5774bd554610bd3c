"""Where clients come in: accepted while there is room, known, counted, and seen out.

Strangers (:mod:`kvstore.guard`) have few places of their own: however many of them knock on a port,
those who are known find room.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from kvstore.connection import Connection
from kvstore.guard import STRANGERS
from kvstore.peers import peer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.guard import Guard
    from kvstore.server import Server

log = logging.getLogger(__name__)

_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # answers are short and somebody waits for them
    # A machine that was switched off never says so: ask after a minute, give up after two.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)


class Reception:
    """The clients of a daemon. ``guard`` is asked about those who come by TCP; of those who come by
    a Unix socket, members of the group ``admin_gid`` are administrators."""

    def __init__(self, server: Server, guard: Guard) -> None:
        self.admin_gid: int | None = None
        self._server = server
        self._guard = guard
        self._clients: dict[Connection, asyncio.Task[None]] = {}
        self._accepting: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._clients)

    def open(self, listeners: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(one)) for one in listeners]

    def close(self) -> None:
        for task in self._accepting:
            task.cancel()

    async def let_finish(self) -> None:
        """Idle clients are dropped at once, those with a request under way after its answer."""
        for connection in self._clients:
            connection.drain()
        if self._clients:
            await asyncio.wait(set(self._clients.values()))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept a client: %s", error)
                await asyncio.sleep(0.1)
                continue
            try:
                sock.setblocking(False)
                self._receive(sock)
            except OSError as error:  # it has gone already
                log.debug("client gone: %s", error)
                sock.close()

    def _receive(self, sock: socket.socket) -> None:
        network = sock.family != socket.AF_UNIX
        guard = self._guard if network and self._guard.asks else None
        if not self._has_room(stranger=guard is not None):
            sock.close()
            return
        peer = peer_of(sock, self.admin_gid)
        if network:
            for option in _TCP_OPTIONS:
                sock.setsockopt(*option)
        if guard is not None:
            sock = guard.receive(sock)
        connection = Connection(self._server, sock, peer, guard)
        task = asyncio.get_running_loop().create_task(connection.serve())
        self._clients[connection] = task
        task.add_done_callback(lambda _: self._clients.pop(connection))

    def _has_room(self, *, stranger: bool) -> bool:
        most = self._server.settings.max_clients
        if len(self._clients) >= most:
            log.warning("refusing a client: %d are connected", len(self._clients))
            return False
        if not stranger:
            return True
        strangers = sum(connection.stranger for connection in self._clients)
        if strangers >= min(STRANGERS, max(1, most // 4)):
            log.warning("refusing a client: %d have not shown a token yet", strangers)
            return False
        return True

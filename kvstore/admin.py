"""What monitoring asks over HTTP: /metrics, /healthz, /readyz, /status, and a page for people.

Threads of their own answer, from what the event loop published last: so they answer while the loop
is stuck, and say so. Nothing can be changed here, and nobody learns what a plain client would not:
totals. Off unless the setting ``admin`` says where, or systemd hands over a socket named ``admin``.
"""

from __future__ import annotations

import html
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST

from kvstore.exposition import expose

if TYPE_CHECKING:
    from collections.abc import Mapping

STUCK_SECONDS = 10.0
"""An event loop not heard of for so long is taken for stuck; it is heard of twice a second."""
MOST_AT_A_TIME = 8
CLIENT_SECONDS = 5.0
_TEXT, _JSON, _HTML = "text/plain; charset=utf-8", "application/json", "text/html; charset=utf-8"


class Admin:
    """Answers on ``listener`` from the first :meth:`publish` to :meth:`close`."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(True)
        self._status: Mapping[str, Any] = {"state": "starting", "problems": []}
        self._heard = time.monotonic()
        self._http = _Http(listener, self)
        self._thread = threading.Thread(target=self._http.serve_forever, name="admin", daemon=True)
        self._thread.start()

    def publish(self, status: Mapping[str, Any]) -> None:
        """Take the state of this moment; the mapping must not change any more."""
        self._status = {name: value for name, value in status.items() if name != "notes"}
        self._heard = time.monotonic()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status code, content type and body for a path."""
        status, age = self._status, time.monotonic() - self._heard
        stuck = f"the event loop has not been heard of for {age:.1f} s\n"
        match path:
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, expose(status, age)
            case "/healthz":
                alive = age < STUCK_SECONDS
                return (200, _TEXT, b"ok\n") if alive else (503, _TEXT, stuck.encode())
            case "/readyz":
                reason = stuck if age >= STUCK_SECONDS else _unready(status)
                return (503 if reason else 200), _TEXT, (reason or "ready\n").encode()
            case "/status":
                return 200, _JSON, json.dumps(status).encode() + b"\n"
            case "/":
                return 200, _HTML, _page(status).encode()
        return 404, _TEXT, b"try /metrics, /healthz, /readyz, /status\n"


def _unready(status: Mapping[str, Any]) -> str:
    """Return why clients should not be sent here; empty if they may."""
    if status["state"] not in ("ready", "degraded"):
        return f"{status['state']}\n"
    refusing = [text for text in status["problems"] if text.startswith("read-only")]
    return f"{refusing[0]}\n" if refusing else ""


def _page(status: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(str(value))}"
        for name, value in status.items()
        if not name.endswith("_buckets")
    )
    state = html.escape(str(status["state"]))
    return f"<!doctype html><title>kvstore: {state}</title><h1>kvstore: {state}</h1><table>{rows}"


class _Http(ThreadingHTTPServer):
    """A few threads over a socket that listens already; whoever comes when all are busy is sent
    away."""

    daemon_threads = True
    address_family = socket.AF_UNIX  # of the socket that is made first: others may be forbidden

    def __init__(self, listener: socket.socket, admin: Admin) -> None:
        super().__init__(("", 0), _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.admin = admin
        self._free = threading.BoundedSemaphore(MOST_AT_A_TIME)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Nothing to tell: the client has gone or is too slow."""


class _Answer(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS
    server: _Http
    server_version = "kvstore"
    sys_version = ""

    def do_GET(self) -> None:
        code, kind, body = self.server.admin.answer(self.path.partition("?")[0])
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing of each request: monitoring asks all the time."""

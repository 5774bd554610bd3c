"""The short form of ``make fuzz``, see :mod:`tests.fuzz_socket`, and what it has found."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvstore import protocol
from kvstore.protocol import Frame, Op
from tests.fuzz_socket import fuzz
from tests.stores import MIB, block, key
from tests.talk import Shared, Talker, bare, descriptors_of, eventually, head, put_parts


@pytest.mark.slow
def test_clients_that_misbehave_harm_nobody_else(tmp_path: Path) -> None:
    seed, frames = 20_261_203, 3000
    print(f"seed {seed}")
    print(fuzz(tmp_path, frames, seed).summary())


def test_requests_before_a_spoiled_frame_hold_nothing(tmp_path: Path) -> None:
    """Their tasks were cancelled before the first step and kept descriptor and memory for ever."""
    meta, payload = put_parts([key(1)], [block(1, 20 * MIB)])
    size = {"meta_bytes": len(meta), "payload_bytes": len(payload)}
    put = Frame(Op.PUT, request=1, **size, **head([key(1)])).pack() + meta + payload
    meta = protocol.dump({"bytes": MIB})
    register = Frame(Op.REGISTER, request=1, meta_bytes=len(meta)).pack() + meta
    spoiled = b"no frame" * 5
    with bare(tmp_path, memory=0) as daemon, Talker(daemon.socket) as talker, Shared(MIB) as shared:
        talker.status()
        before = descriptors_of(daemon)
        for frame, descriptors in [(put, []), (register, [shared.descriptor])] * 8:
            with Talker(daemon.socket) as spoiler:
                sent = socket.send_fds(spoiler.sock, [frame + spoiled], descriptors)
                spoiler.sock.sendall((frame + spoiled)[sent:])
                assert spoiler.ended()
        assert eventually(lambda: descriptors_of(daemon) == before)
        assert talker.put([key(2)], [block(2, 60 * MIB)], deadline_ms=3000).meta == b"\0"
        assert "Traceback" not in daemon.log

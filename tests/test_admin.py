"""What monitoring asks over HTTP, and what dashboards and alert rules take for granted."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import admin
from kvstore.admin import Admin
from kvstore.client import Client
from kvstore.exposition import METRICS, OTHERS, expose
from kvstore.metrics import Durations
from kvstore.sockets import Doors
from tests.command import Daemon, run_command
from tests.stores import Local, block, key

GRAFANA = Path(__file__).parent.parent / "grafana"
STATUS = {"state": "ready", "problems": [], "notes": ["secret path"], "blocks": 7, "version": "<1>"}


class UnixHTTP(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(self._path))


def ask(path: Path, what: str, method: str = "GET") -> tuple[int, str]:
    connection = UnixHTTP(path)
    try:
        connection.request(method, what)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and label values."""
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@pytest.fixture
def answering(place: Path) -> Iterator[Admin]:
    doors = Doors({}, place.with_name("kv.sock"), None, None, str(place))
    assert doors.admin is not None
    assert place.stat().st_mode & 0o777 == 0o600
    opened = Admin(doors.admin)
    yield opened
    opened.close()
    doors.close()
    assert not place.exists()


def test_before_the_first_state_nobody_is_sent_here(answering: Admin, place: Path) -> None:
    assert ask(place, "/healthz") == (200, "ok\n")
    assert ask(place, "/readyz") == (503, "starting\n")
    assert ask(place, "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("state", "problems", "code"),
    [
        ("ready", [], 200),
        ("degraded", ["2 damaged blocks found"], 200),
        ("degraded", ["read-only: the disk is full"], 503),
        ("recovering", [], 503),
        ("draining", [], 503),
    ],
)
def test_who_is_ready(
    answering: Admin, place: Path, state: str, problems: list[str], code: int
) -> None:
    answering.publish({**STATUS, "state": state, "problems": problems})
    assert ask(place, "/readyz")[0] == code
    assert samples(ask(place, "/metrics")[1])["kvstore_state", state] == 1
    assert ask(place, "/healthz")[0] == 200


def test_a_loop_that_is_stuck_is_told(
    answering: Admin, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering.publish(STATUS)
    monkeypatch.setattr(admin, "STUCK_SECONDS", 0.05)
    time.sleep(0.1)
    assert ask(place, "/healthz")[0] == ask(place, "/readyz")[0] == 503
    assert samples(ask(place, "/metrics")[1])["kvstore_loop_age_seconds", ""] > 0.05


def test_pages(answering: Admin, place: Path) -> None:
    answering.publish(STATUS)
    assert json.loads(ask(place, "/status?x=1")[1])["blocks"] == 7
    code, page = ask(place, "/")
    assert (code, "&lt;1&gt;" in page, "<1>" in page) == (200, True, False)
    assert ask(place, "/metrics", "HEAD")[1] == ""
    assert ask(place, "/other")[0] == 404
    assert ask(place, "/metrics", "POST")[0] == 501
    for what in ("/status", "/", "/metrics"):
        assert "secret" not in ask(place, what)[1]


def test_slow_clients_do_not_keep_others_out_for_long(
    answering: Admin, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin._Answer, "timeout", 0.5)
    idle = [socket.socket(socket.AF_UNIX) for _ in range(admin.MOST_AT_A_TIME)]
    for one in idle:
        one.connect(str(place))
    limit = time.monotonic() + 10
    while True:
        try:
            assert ask(place, "/healthz")[0] == 200
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < limit
            time.sleep(0.1)
    for one in idle:
        one.close()


def test_metrics_are_the_figures_of_the_status(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", memory_bytes=1 << 20)
    local.put([key(1), key(2)], [block(1), block(2)])
    local.get([key(1), key(9)])
    took = Durations()
    for seconds in (0.0000015, 0.003, 0.003, 5000.0):
        took.note(seconds)
    more = {"get_us_buckets": took.buckets, "put_us_buckets": took.buckets, "version": "1"}
    status = {**local.store.status(), "clients": 0, "region_bytes": 0, "failed_requests": 0, **more}
    found = samples(expose(status, 0.25).decode())
    local.kill()
    assert found["kvstore_blocks", "disk"] == 2
    assert found["kvstore_lookup_blocks_total", "memory"] == 1
    assert found["kvstore_lookup_blocks_total", "disk"] == 0
    assert found["kvstore_lookup_blocks_total", "miss"] == 1
    assert found["kvstore_put_blocks_total", "stored"] == 2
    assert found["kvstore_build_info", "filesystem,1"] == 1
    assert found["kvstore_request_seconds_bucket", "2e-06,get"] == 1
    assert found["kvstore_request_seconds_bucket", "0.004096,get"] == 3
    assert found["kvstore_request_seconds_bucket", "+Inf,get"] == 4
    # Every metric is there, but the time of a scrub that never was.
    told = {name.removesuffix("_bucket") for name, _ in found}
    assert {*(metric.name for metric in METRICS), *OTHERS} - told == {
        "kvstore_scrub_finished_timestamp_seconds"
    }


@pytest.mark.parametrize("name", ["kvstore.json", "alerts.yml"])
def test_dashboards_and_alerts_ask_for_what_there_is(name: str) -> None:
    text = (GRAFANA / name).read_text()
    asked = set(re.findall(r"\bkvstore_\w+", text))
    known = {*(metric.name for metric in METRICS), *OTHERS, "kvstore_request_seconds_bucket"}
    assert len(asked) >= 5
    assert asked <= known
    if name.endswith("json"):
        assert json.loads(text)["title"] == "kvstore"


def test_the_daemon_is_watched(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    place = tmp_path / "admin.sock"
    daemon.start("--admin", str(place))
    with Client(str(daemon.socket)) as client:
        client.put(key(1), block(1), ack="written")
        client.get(key(1))
    time.sleep(1.2)
    assert ask(place, "/readyz")[0] == 200
    assert samples(ask(place, "/metrics")[1])["kvstore_lookup_blocks_total", "memory"] == 1
    assert json.loads(ask(place, "/status")[1])["pid"] == daemon.pid
    assert daemon.stop() == 0
    assert not place.exists()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:9470", "tcp://[2001:db8::1]:1", "here", "tcp:"])
def test_monitoring_is_local(address: str) -> None:
    ran = run_command("serve", "--check-only", "--admin", address)
    assert ran.code == 13
    assert "admin" in ran.stderr

"""Settings: precedence, origins, sizes and durations, and every way to get them wrong."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest

from kvstore import config, node
from kvstore.commands.daemon import serve
from kvstore.config import MIB, Source
from kvstore.errors import ConfigError
from kvstore.guard import GuardFiles
from kvstore.quantities import parse_duration, parse_size
from kvstore.regions import DEFAULT_REGION_BYTES
from kvstore.server import ServerOptions


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("10B", 10),
        ("64KiB", 64 << 10),
        ("64 kib", 64 << 10),
        ("256MiB", 256 << 20),
        ("1.5GiB", 3 << 29),
        (" 2TiB ", 2 << 40),
    ],
)
def test_size_is_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1GB", "say GiB"),
        ("64k", "say KiB"),
        ("5M", "say MiB"),
        ("12XB", "unknown unit 'xb'"),
        ("", "not a number"),
        ("-1", "not a number"),
        (-1, "negative"),
        ("1e9", "not a number"),
        ("1.0001KiB", "whole number"),
        ("9000000TiB", "below 8 EiB"),
        ("1 2MiB", "not a number"),
        ("٣MiB", "not a number"),
        ("nan", "not a number"),
        (True, "not a number"),
    ],
)
def test_bad_size_is_refused(text: str | int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("5s", 5),
        ("5", 5),
        (2.5, 2.5),
        ("2 min", 120),
        ("2m", 120),
        ("1h", 3600),
        ("1d", 86400),
    ],
)
def test_duration_is_read(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5 parsecs", "-1s", -1, float("nan"), float("inf"), False, "1000000d"]
)
def test_bad_duration_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_duration(text)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('capacity = "1GiB"\nmemory = "2GiB"\nworkers = 3\n[log]\nlevel = "debug"\n')
    loaded = config.load(
        {"config": str(file), "capacity": "3GiB"},
        {"KVSTORE_CAPACITY": "2GiB", "KVSTORE_MEMORY": "128MiB", "KVSTORE_IO": ""},
    )
    assert (loaded.settings.capacity, loaded.origins["capacity"]) == (
        3 << 30,
        ("flag", "--capacity"),
    )
    assert (loaded.settings.memory, loaded.origins["memory"]) == (
        128 * MIB,
        ("environment", "KVSTORE_MEMORY"),
    )
    assert (loaded.settings.workers, loaded.origins["workers"]) == (3, ("file", str(file)))
    assert loaded.settings.log_level == "debug"
    assert loaded.settings.io == "auto"
    assert loaded.origins["io"].source is Source.DEFAULT
    assert loaded.file == file


def test_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('engine = "memory"')
    assert config.load({}, {"KVSTORE_CONFIG": str(file)}).settings.engine == "memory"


def test_settings_are_frozen() -> None:
    settings = config.load({}, {}).settings
    with pytest.raises(AttributeError):
        settings.workers = 9  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(
            {"store": "a", "socket": "b", "unknown": 1}, config.Settings, dec_hook=lambda t, v: t(v)
        )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('capcity = "1GiB"', "'capcity'", "did you mean 'capacity'?"),
        ("zzz = 1", "'zzz'", "known are"),
        ('[log]\nlevl = "info"', "'log.levl'", "did you mean 'log.level'?"),
        ("[log.level]\nx = 1", "'log.level.x'", "log.level"),
        ('capacity = "1GB"', "setting capacity", "64GiB"),
        ("capacity = 1.5", "setting capacity", "64GiB"),
        ("capacity = true", "setting capacity", "64GiB"),
        ('capacity = "10MiB"', "less than 64 MiB", "64MiB"),
        ('io = "fast"', "setting io", "choose one of: auto, direct, buffered"),
        ('max_client_bytes = "1000KiB"', "less than 1 MiB", "max_client_bytes to at least 1MiB"),
        ('max_client_regions = "63MiB"', "less than 64 MiB", "at least 64MiB"),
        ("max_regions = 0", "less than 64 MiB", "at least 64MiB"),
        ("max_requests = 0", "setting max_requests", "correct it"),
        ('token_file = "token"', "setting token_file", "absolute"),
        ("listen = 7700", "setting listen", "correct it"),
        ("workers = 0", "setting workers", "correct it"),
        ('workers = "many"', "setting workers", "correct it"),
        ('store = "relative/path"', "relative", "absolute"),
        ('store = ""', "setting store", "write a path"),
        ("store = 3", "setting store", "write a path"),
        ('request_timeout = "0s"', "setting request_timeout", "above 0"),
        ('drain_timeout = "soon"', "setting drain_timeout", "250ms"),
        ("= broken", "not valid TOML", "correct it"),
    ],
)
def test_bad_file_is_named_with_key_and_advice(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load({"config": str(file)}, {})
    assert message in caught.value.message
    assert str(file) in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 13


def test_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_bytes(b'engine = "\xff"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load({"config": str(file)}, {})


def test_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        config.load({"config": str(tmp_path / "nowhere.toml")}, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load({"config": str(tmp_path)}, {})
    assert config.load({}, {"CONFIGURATION_DIRECTORY": str(tmp_path)}).file is None


def test_misspelt_variable_is_refused_and_a_stranger_is_reported() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_CAPACTY"):
        config.load({}, {"KVSTORE_CAPACTY": "1GiB"})
    # Kubernetes sets these for a service of our name.
    loaded = config.load(
        {}, {"KVSTORE_PORT": "tcp://10.0.0.1:80", "KVSTORE_SERVICE_HOST": "10.0.0.1"}
    )
    assert loaded.ignored == ("KVSTORE_PORT", "KVSTORE_SERVICE_HOST")


def test_bad_value_names_flag_or_variable() -> None:
    with pytest.raises(ConfigError, match=r"setting memory \(--memory\)"):
        config.load({"memory": "lots"}, {})
    with pytest.raises(ConfigError, match=r"setting log.format \(KVSTORE_LOG_FORMAT\)"):
        config.load({}, {"KVSTORE_LOG_FORMAT": "xml"})


def test_defaults_of_root_and_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root = config.load({}, {}).settings
    assert str(root.store) == "/var/lib/kvstore"
    assert str(root.socket) == "/run/kvstore/kvstore.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    user = config.load({}, {"XDG_DATA_HOME": "/d", "XDG_RUNTIME_DIR": "/r"}).settings
    assert str(user.store) == "/d/kvstore"
    assert str(user.socket) == "/r/kvstore/kvstore.sock"
    bare = config.load({}, {"HOME": "/h", "XDG_DATA_HOME": "relative"}).settings
    assert bare.store == Path.home() / ".local/share/kvstore"
    assert str(bare.socket) == "/run/user/1234/kvstore/kvstore.sock"


def test_unit_directories_come_before_the_defaults() -> None:
    loaded = config.load({}, {"STATE_DIRECTORY": "/s:/t", "RUNTIME_DIRECTORY": "/r"})
    assert str(loaded.settings.store) == "/s"
    assert str(loaded.origins["store"]) == "$STATE_DIRECTORY"
    assert str(loaded.settings.socket) == "/r/kvstore.sock"


def test_socket_path_must_fit_the_kernel() -> None:
    with pytest.raises(ConfigError, match="path of 108 bytes"):
        config.load({"socket": "/" + "a" * 107}, {})
    assert config.load({"socket": "/" + "a" * 106}, {})


def test_one_path_is_found_in_spite_of_other_bad_settings(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('socket = "/run/a.sock"\nunknown = 1\nmemory = "??"\n')
    flags = {"config": str(file)}
    assert str(config.load_path("socket", flags, {})) == "/run/a.sock"
    file.write_text("= broken")
    # Not even opened when the flag says it all.
    assert str(config.load_path("socket", {**flags, "socket": "x.sock"}, {})) == "x.sock"
    with pytest.raises(ConfigError):
        config.load_path("socket", flags, {})


def test_memory_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "memory_limit", lambda: (1 << 30, "the memory"))
    config.check_memory(config.load({"memory": "819MiB"}, {}))
    with pytest.raises(ConfigError, match="above 80 % of the memory") as caught:
        config.check_memory(config.load({"memory": "820MiB"}, {}))
    assert "819MiB" in caught.value.hint


def test_memory_limit_is_at_most_what_the_machine_has() -> None:
    limit, where = node.memory_limit()
    assert 0 < limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert where


def test_filesystem_is_found_for_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert node.filesystem_bytes(tmp_path / "a" / "b") == found.f_blocks * found.f_frsize > 0
    (tmp_path / "file").touch()
    assert node.filesystem_bytes(tmp_path / "file" / "below") >= 0


def test_the_server_has_the_same_defaults() -> None:
    own = {field.name: field.default for field in dataclasses.fields(ServerOptions)}
    settings = config.load({}, {}).settings
    for name in own.keys() - {"socket", "store", "options", "guard"}:
        assert getattr(settings, name) == own[name], name
    guard = dataclasses.asdict(GuardFiles())
    assert guard == {name: getattr(settings, name) for name in guard}
    assert config._LEAST["max_regions"] == config._LEAST["max_client_regions"]
    assert config._LEAST["max_client_regions"] == DEFAULT_REGION_BYTES


def test_every_setting_is_described_with_its_origin() -> None:
    described = config.describe(config.load({"capacity": "1GiB"}, {}))
    assert ("capacity", 1 << 30, (Source.FLAG, "--capacity")) in described
    assert ("log.level", "info", (Source.DEFAULT, "default")) in described
    assert len(described) == len(config.Settings.__struct_fields__)


def test_every_setting_has_a_flag() -> None:
    given = {option for parameter in serve.params for option in parameter.opts}
    missing = {config.flag(name) for name in config._ATTRIBUTES} - given
    assert missing == set()

"""Frozen settings: flag > environment > file > default, and where each one came from.

One setting has one name in three forms: ``log.level`` in the TOML file (``[log]`` ``level =``),
``KVSTORE_LOG_LEVEL`` in the environment, ``--log-level`` on the command line. Sizes are bytes,
durations seconds. Whatever is wrong with a setting is a ConfigError (exit code 13) that names the
setting and where it came from. Rooms below this one get plain values and read no environment.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import typing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from kvstore import credentials, node
from kvstore.errors import ConfigError
from kvstore.quantities import Duration, Size, parse_duration, parse_size
from kvstore.space import MIN_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MIB = 1 << 20
GIB = 1 << 30
MAX_SOCKET_PATH = 107
MEMORY_SHARE = 0.8
DEFAULT_ENGINE = "filesystem"

_LEAST = {
    "capacity": MIN_CAPACITY,
    "max_client_bytes": MIB,
    # Our clients share no less at a time (regions.py); with less room they would miss everything.
    "max_client_regions": 64 * MIB,
    "max_regions": 64 * MIB,
}
"""Bytes that these settings have at least."""

_PATHS = ("store", "socket", "tls_certificate", "tls_key", "tls_client_ca", "token_file")
LIVE = frozenset({
    "capacity", "min_free", "max_dirty_age", "when_full", "scrub_rate",
    "max_clients", "max_requests", "max_client_bytes", "max_client_regions", "max_regions",
    "request_timeout", "drain_timeout", "admin_group", "log_level", "log_format",
})  # fmt: skip
"""Attributes that a daemon takes over while it serves; all others wait for a restart."""


class Source(StrEnum):
    """Where a setting came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class Origin(NamedTuple):
    """Source of a setting and its exact place: ``--capacity``, ``KVSTORE_CAPACITY``, a path."""

    source: Source
    place: str

    def __str__(self) -> str:
        return self.place


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings. None means: decided by the store (what STORE.json says, else computed)."""

    store: Path
    socket: Path
    engine: str | None = None
    """Default: what STORE.json says; ``filesystem`` for a new store."""
    parity: Literal["off", "xor"] | None = None
    """Default: what STORE.json says; ``off`` for a new store."""
    capacity: Size | None = None
    """Default: what STORE.json says; half of the filesystem for a new store."""
    memory: Size = Size(GIB)
    min_free: Size | None = None
    """Default: 5 % of the filesystem, at least 10 GiB, never more than 10 % of it."""
    create: Literal["auto", "never"] = "auto"
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    io: Literal["auto", "direct", "buffered", "mmap"] = "auto"
    write: Literal["through", "late"] = "through"
    max_dirty_age: Duration = Duration(300)
    """With ``write = late``: longest time that an accepted block is in memory only."""
    policy: Literal["adaptive", "fifo", "lru", "s3fifo"] = "lru"
    """Which blocks leave first; docs/eviction.md helps to choose."""
    when_full: Literal["evict", "read-only"] = "evict"
    """``read-only``: nothing is evicted, puts are answered that the store is full."""
    namespace_quota: Size | None = None
    """Bytes that a namespace may take that has no quota of its own. Default: no limit."""
    scrub_rate: Size = Size(64 * MIB)
    """Bytes a second that ``kvstore scrub`` reads; 0 = as fast as one worker can."""
    max_clients: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    """Requests of one client under way; it is held back when it has that many."""
    max_client_bytes: Size = Size(128 * MIB)
    """Bytes of frames and memory of one client's requests under way; one request always may."""
    max_client_regions: Size = Size(GIB)
    """Bytes of memory that one client shares with the daemon."""
    max_regions: Size = Size(8 * GIB)
    """The same for all clients together."""
    request_timeout: Duration = Duration(30)
    """Longest time a request may wait for the store, and a client may stall one."""
    drain_timeout: Duration = Duration(60)
    """Longest time between SIGTERM and the end."""
    listen: str | None = None
    """``tcp://HOST:PORT``, of this machine only unless encrypted and with a token. Default: off."""
    tls_certificate: Path | None = None
    """PEM file, for TCP. Default: no encryption, for loopback addresses only."""
    tls_key: Path | None = None
    """PEM file with its private key. Default: in the file of the certificate."""
    tls_client_ca: Path | None = None
    """PEM file; clients by TCP must have a certificate from there. Default: they need none."""
    token_file: Path | None = None
    """File with what clients by TCP must know. Default: nothing, for loopback addresses only."""
    admin: str | None = None
    """``tcp://127.0.0.1:PORT`` or the path of a Unix socket for monitoring. Default: off."""
    socket_group: str | None = None
    """Group whose members may connect. Default: the daemon's user and root only."""
    admin_group: str | None = None
    """Group whose members may do everything. Default: the daemon's user and root only."""
    log_level: Literal["debug", "info", "warning", "error"] = msgspec.field(
        default="info", name="log.level"
    )
    log_format: Literal["text", "json"] = msgspec.field(default="text", name="log.format")


class Loaded(NamedTuple):
    """Settings, the origin of each by attribute, the file that was read, variables nobody reads."""

    settings: Settings
    origins: dict[str, Origin]
    file: Path | None
    ignored: tuple[str, ...]


class _Found(NamedTuple):
    value: object
    origin: Origin


_FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
_ATTRIBUTES = {field.encode_name: field.name for field in _FIELDS.values()}


def load(flags: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Loaded:
    """Return every setting, checked. ``flags`` holds attributes of Settings (None = not given)
    and ``config``, the path of the file.

    Raises ConfigError for an unknown setting, a bad value, an unreadable file.
    """
    environ = os.environ if environ is None else environ
    path, required = file_path(flags, environ)
    table = _read_file(path, required)
    found = {
        name: _find(name, flags, environ, path, table or {}) or _default(name, environ)
        for name in _FIELDS
    }
    for error in _unknown(table or {}, path):
        raise error
    settings = Settings(**{name: _convert(name, *item) for name, item in found.items()})
    origins = {name: item.origin for name, item in found.items()}
    _check(settings, origins)
    settings = msgspec.structs.replace(settings, store=settings.store.absolute())
    return Loaded(settings, origins, None if table is None else path, _unread(environ))


def problems(
    flags: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> list[ConfigError]:
    """Return all that :func:`load` would refuse, one by one."""
    environ = os.environ if environ is None else environ
    found: list[ConfigError] = []
    try:
        path, required = file_path(flags, environ)
        table = _read_file(path, required) or {}
    except ConfigError as error:
        return [error]
    for name in _FIELDS:
        try:
            item = _find(name, flags, environ, path, table) or _default(name, environ)
            _convert(name, *item)
        except ConfigError as error:
            found.append(error)
    found += _unknown(table, path)
    if not found:
        try:
            load(flags, environ)
        except ConfigError as error:
            found.append(error)
    return found


def load_path(
    name: Literal["store", "socket"],
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
) -> Path:
    """Return one setting that is a path, without judging the others.

    A client must reach a daemon whose configuration file has been spoiled since it started.
    """
    environ = os.environ if environ is None else environ
    item = _find(name, flags, environ, Path(), {})
    if item is None:
        path, required = file_path(flags, environ)
        item = _find(name, {}, {}, path, _read_file(path, required) or {})
    item = item or _default(name, environ)
    value: Path = _convert(name, *item)
    if name == "socket":
        _check_socket(value, item.origin)
        return value
    return value.absolute()


def check_memory(loaded: Loaded) -> None:
    """Refuse a memory tier above 80 % of the machine's or the control group's memory (13)."""
    limit, where = node.memory_limit()
    memory = loaded.settings.memory
    if memory > limit * MEMORY_SHARE:
        raise ConfigError(
            f"setting memory ({loaded.origins['memory']}) is {memory} bytes, "
            f"above 80 % of {where} ({limit} bytes)",
            f"set memory to at most {int(limit * MEMORY_SHARE) // MIB}MiB",
        )


def variable(name: str) -> str:
    """Return the environment variable of a setting: ``log.level`` -> ``KVSTORE_LOG_LEVEL``."""
    return "KVSTORE_" + name.upper().replace(".", "_")


def flag(name: str) -> str:
    """Return the command-line flag of a setting: ``log.level`` -> ``--log-level``."""
    return "--" + name.replace(".", "-").replace("_", "-")


def name_of(attribute: str) -> str:
    """Return the name of a setting: ``log_level`` -> ``log.level``."""
    return _FIELDS[attribute].encode_name


def describe(loaded: Loaded) -> list[tuple[str, object, Origin]]:
    """Return name, value and origin of each setting."""
    return [
        (field.encode_name, getattr(loaded.settings, attribute), loaded.origins[attribute])
        for attribute, field in _FIELDS.items()
    ]


def file_path(flags: Mapping[str, object], environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the configuration file, and whether it must exist."""
    named = flags.get("config") or environ.get("KVSTORE_CONFIG")
    if named:
        return Path(str(named)).expanduser(), True
    if environ.get("CONFIGURATION_DIRECTORY"):
        folder = Path(environ["CONFIGURATION_DIRECTORY"].split(":")[0])
    elif os.geteuid() == 0:
        folder = Path("/etc/kvstore")
    else:
        folder = _home(environ, "XDG_CONFIG_HOME", ".config") / "kvstore"
    return folder / "kvstore.toml", False


def _read_file(path: Path, required: bool) -> dict[str, object] | None:
    """Return the file's settings by dotted name; None if it is absent and may be."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return None
        raise ConfigError(
            f"configuration file {path} does not exist", "create it or leave out --config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} is not valid TOML: {error}", "correct it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {error.strerror}", "check its permissions"
        ) from None
    return dict(_flatten(table, ""))


def _flatten(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _find(
    attribute: str,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    path: Path,
    table: Mapping[str, object],
) -> _Found | None:
    name = _FIELDS[attribute].encode_name
    if flags.get(attribute) is not None:
        return _Found(flags[attribute], Origin(Source.FLAG, flag(name)))
    if environ.get(variable(name)):
        return _Found(environ[variable(name)], Origin(Source.ENVIRONMENT, variable(name)))
    if name in table:
        return _Found(table[name], Origin(Source.FILE, str(path)))
    return None


def _default(attribute: str, environ: Mapping[str, str]) -> _Found:
    origin = Origin(Source.DEFAULT, "default")
    root = os.geteuid() == 0
    if attribute == "store":
        if environ.get("STATE_DIRECTORY"):
            folder = environ["STATE_DIRECTORY"].split(":")[0]
            return _Found(folder, Origin(Source.DEFAULT, "$STATE_DIRECTORY"))
        if root:
            return _Found("/var/lib/kvstore", origin)
        return _Found(_home(environ, "XDG_DATA_HOME", ".local/share") / "kvstore", origin)
    if attribute == "socket":
        if environ.get("RUNTIME_DIRECTORY"):
            folder = environ["RUNTIME_DIRECTORY"].split(":")[0]
            return _Found(f"{folder}/kvstore.sock", Origin(Source.DEFAULT, "$RUNTIME_DIRECTORY"))
        if root:
            return _Found("/run/kvstore/kvstore.sock", origin)
        # Never under /tmp: anybody could wait there in our place.
        runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
        return _Found(f"{runtime}/kvstore/kvstore.sock", origin)
    return _Found(_FIELDS[attribute].default, origin)


def _home(environ: Mapping[str, str], name: str, otherwise: str) -> Path:
    value = environ.get(name, "")
    # The XDG specification says to ignore relative paths.
    return Path(value) if value.startswith("/") else Path.home() / otherwise


def _convert(attribute: str, value: object, origin: Origin) -> Any:  # noqa: ANN401
    field = _FIELDS[attribute]
    if origin.source is Source.DEFAULT and not isinstance(value, str):
        return value
    try:
        return msgspec.convert(value, field.type, strict=False, dec_hook=_read)
    except UnicodeEncodeError:
        raise ConfigError(
            f"setting {field.encode_name} ({origin}) is {value!r}: not UTF-8", _advice(field.type)
        ) from None
    except (msgspec.ValidationError, RuntimeError) as error:
        raise ConfigError(
            f"setting {field.encode_name} ({origin}) is {value!r}: {_plain(str(error))}",
            _advice(field.type),
        ) from None


def _read(kind: type, value: object) -> object:
    if issubclass(kind, Size) and isinstance(value, (str, int)):
        return parse_size(value)
    if issubclass(kind, Duration) and isinstance(value, (str, int, float)):
        return parse_duration(value)
    if issubclass(kind, Path) and isinstance(value, (str, Path)):
        return _read_path(str(value))
    raise ValueError(f"a {type(value).__name__} makes no sense here")


def _read_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("not a path")
    return Path(text).expanduser()


def _plain(message: str) -> str:
    message = message.replace("`", "")
    return (
        message[:1].lower() + message[1:]
        if message.startswith(("Expected", "Invalid"))
        else message
    )


def _advice(kind: object) -> str:
    kinds = {kind, *typing.get_args(kind)}
    if Size in kinds:
        return "write a size like 64GiB or 256MiB, or plain bytes"
    if Duration in kinds:
        return "write a duration like 250ms, 5s or 2h, or plain seconds"
    if kind is bool:
        return "write true or false"
    if typing.get_origin(kind) is Literal:
        return f"choose one of: {', '.join(typing.get_args(kind))}"
    return "write a path" if Path in kinds else "correct it"


def _check(settings: Settings, origins: Mapping[str, Origin]) -> None:
    for name, least in _LEAST.items():
        size = getattr(settings, name)
        if size is not None and size < least:
            raise ConfigError(
                f"setting {name} ({origins[name]}) is {size} bytes, less than {least // MIB} MiB",
                f"set {name} to at least {least // MIB}MiB",
            )
    for name in ("request_timeout", "drain_timeout", "max_dirty_age"):
        if getattr(settings, name) <= 0:
            raise ConfigError(f"setting {name} ({origins[name]}) is 0", "set it above 0")
    for name in _PATHS:
        path = getattr(settings, name)
        if origins[name].source is Source.FILE and path is not None and not path.is_absolute():
            raise ConfigError(
                f"setting {name} ({origins[name]}) is the relative path {str(path)!r}",
                "write an absolute path in a configuration file",
            )
    _check_socket(settings.socket, origins["socket"])


def _check_socket(path: Path, origin: Origin) -> None:
    if ":/" in str(path):  # what is left of :// in a path
        raise ConfigError(
            f"setting socket ({origin}) is the address {str(path)!r}",
            "name a path here; setting listen is for tcp://HOST:PORT",
        )
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"setting socket ({origin}) is a path of {length} bytes",
            f"choose one of at most {MAX_SOCKET_PATH} bytes, for example by a relative path",
        )


def _unknown(table: Mapping[str, object], path: Path) -> Iterator[ConfigError]:
    for name in table:
        if name not in _ATTRIBUTES:
            near = difflib.get_close_matches(name, _ATTRIBUTES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_ATTRIBUTES)}"
            yield ConfigError(f"setting {name!r} in {path} is unknown", hint)


def _unread(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the KVSTORE_* variables that no setting reads; refuse those that look misspelt.

    Not all are refused: Kubernetes sets KVSTORE_PORT and more for a service named kvstore.
    """
    known = [*map(variable, _ATTRIBUTES), "KVSTORE_CONFIG", *credentials.VARIABLES.values()]
    unread = tuple(n for n in environ if n.startswith("KVSTORE_") and n not in known)
    for name in unread:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
        if near:
            raise ConfigError(f"environment variable {name} is unknown", f"did you mean {near[0]}?")
    return unread

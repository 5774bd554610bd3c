"""Commands about a whole store: serve it, make it."""

from __future__ import annotations

import logging
import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, Option, store_option
from kvstore.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.config import Loaded
    from kvstore.guard import GuardFiles
    from kvstore.layout import StoreRecord
    from kvstore.opening import Options
    from kvstore.reload import Change
    from kvstore.server import ServerOptions

LEFT_TO_THE_STORE = ("engine", "parity", "capacity", "min_free")

NEW_STORE = {"engine": "filesystem", "parity": "off"}
"""What is chosen when a store is made, and stays."""

log = logging.getLogger("kvstore")


ACCESS = "Who may connect"
LIMITS = "Limits"
LOG = "Log"


def _setting(name: str, metavar: str, text: str, section: str = "Options") -> Callable[..., Any]:
    # Values stay text here: config judges them, whatever source they come from.
    return click.option(f"--{name}", cls=Option, metavar=metavar, help=text, section=section)


@click.command(
    cls=Command,
    example="kvstore serve\nkvstore --socket ./kv.sock serve --store /mnt/kv --capacity 512GiB",
    exits={
        0: "stopped by SIGTERM after everything was written",
        1: "failed, or blocks were lost because the time for stopping ran out",
        2: "",
        5: "",
        10: "the store does not exist and create is never",
        11: "",
        13: "",
        14: "",
        15: "",
        130: "interrupted before it served, or a second time while it stopped",
    },
    answers=False,
)
@_setting("store", "DIR", "Directory of the store.")
@_setting("engine", "NAME", "How blocks are kept on disk, chosen at creation.")
@_setting("parity", "off|xor", "A parity chunk for each block, chosen at creation.")
@_setting("capacity", "SIZE", "Bytes the store may take on disk.")
@_setting("memory", "SIZE", "Bytes of the memory tier.")
@_setting("min-free", "SIZE", "Bytes of the filesystem that stay free.")
@_setting("create", "auto|never", "Whether a missing store is made.")
@_setting("workers", "N", "Threads for disk and hashing.")
@_setting("io", "auto|direct|buffered|mmap", "How block files are read and written.")
@_setting("write", "through|late", "When accepted blocks are written.")
@_setting("max-dirty-age", "TIME", "Longest time until then, with --write late.")
@_setting("policy", "lru|adaptive|s3fifo|fifo", "Which blocks leave first.")
@_setting("when-full", "evict|read-only", "What gives way when there is no room.")
@_setting("namespace-quota", "SIZE", "Bytes a namespace may take, if quota says nothing else.")
@_setting("scrub-rate", "SIZE", "Bytes a second that a scrub reads; 0 for no limit.")
@click.option("--check-only", is_flag=True, help="Check the settings and stop.")
@_setting("socket-group", "GROUP", "Its members may connect.", ACCESS)
@_setting("admin-group", "GROUP", "Its members may do everything.", ACCESS)
@_setting(
    "listen",
    "tcp://HOST:PORT",
    "Serve TCP too; beyond this machine only with TLS and a token.",
    ACCESS,
)
@_setting("admin", "tcp://HOST:PORT|PATH", "Answer monitoring over HTTP, to this machine.", ACCESS)
@_setting("tls-certificate", "FILE", "Encrypt TCP, with this certificate (PEM).", ACCESS)
@_setting("tls-key", "FILE", "Its private key, if in another file.", ACCESS)
@_setting("tls-client-ca", "FILE", "Clients by TCP need a certificate from there.", ACCESS)
@_setting("token-file", "FILE", "Clients by TCP must know what it holds.", ACCESS)
@_setting("max-clients", "N", "Connections at a time.", LIMITS)
@_setting("max-requests", "N", "Requests of a client at a time.", LIMITS)
@_setting("max-client-bytes", "SIZE", "Memory of a client's requests.", LIMITS)
@_setting("max-client-regions", "SIZE", "Memory that a client shares.", LIMITS)
@_setting("max-regions", "SIZE", "Memory that all clients share.", LIMITS)
@_setting("request-timeout", "TIME", "Longest wait of a request.", LIMITS)
@_setting("drain-timeout", "TIME", "Longest time from SIGTERM to the end.", LIMITS)
@_setting("log-level", "LEVEL", "debug, info, warning or error.", LOG)
@_setting("log-format", "text|json", "Form of the log lines on stderr.", LOG)
@click.pass_obj
def serve(call: Call, /, check_only: bool, **flags: str | bool | None) -> int:
    """Run the daemon in the foreground until SIGTERM.

    The configuration file is read again on SIGHUP, and when it was changed and then left alone for
    a second. If anything in it is wrong, all settings stay, and "kvstore status" tells what it is.

    With -q it logs warnings and errors only.
    """
    from kvstore import config, logs

    if flags["log_level"] is None and (call.output.verbose or call.output.quiet):
        flags["log_level"] = "debug" if call.output.verbose else "warning"
    loaded = config.load(call.flags(**flags))
    config.check_memory(loaded)
    check_access(loaded)
    if check_only:
        call.output.result({"settings": "valid"}, ["settings are valid"])
        return 0
    logs.start_logging(loaded.settings.log_level, loaded.settings.log_format)
    if not call.output.quiet:
        _log_settings(loaded)
    warning = _too_much(loaded)
    if warning:
        log.warning("%s", warning)
    from kvstore.server import serve as run_daemon

    _make_socket_folder(loaded)
    _make_default_parent(loaded)
    options = _server_options(loaded)
    return run_daemon(options, Configuration(call.flags(**flags), loaded, options))


class Configuration:
    """The settings of a daemon, read again while it serves; see :mod:`kvstore.reload`.

    Made of what it was started with: ``flags`` count as before, ``loaded`` and ``options`` are in
    force. The log is ours, so its settings are taken over here.
    """

    def __init__(self, flags: Mapping[str, object], loaded: Loaded, options: ServerOptions) -> None:
        from kvstore import config

        self.file, _ = config.file_path(flags, os.environ)
        self._flags, self._loaded, self._options = flags, loaded, options
        self._was_there = loaded.file is not None

    def read(self) -> Change:
        """Read all settings, and judge them as a start would. Raises ConfigError."""
        from kvstore import config, logs
        from kvstore.reload import Change

        new = config.load(self._flags)
        if self._was_there and new.file is None:
            raise ConfigError(
                f"the configuration file {self.file} is gone", "put it back, an empty one will do"
            )
        config.check_memory(new)
        check_access(new)
        changed = _changed(self._loaded, new)
        told = {name: (config.name_of(name), _told(new, name)) for name in changed}
        taken = dict(told[name] for name in changed if name in config.LIVE)
        waiting = dict(told[name] for name in changed if name not in config.LIVE)
        self._take(new)
        logs.start_logging(self._loaded.settings.log_level, self._loaded.settings.log_format)
        return Change(self._options, taken, waiting)

    def _take(self, new: Loaded) -> None:
        from msgspec import structs

        from kvstore import config

        live = {name: getattr(new.settings, name) for name in config.LIVE}
        settings = structs.replace(self._loaded.settings, **live)
        origins = self._loaded.origins | {name: new.origins[name] for name in live}
        self._loaded = self._loaded._replace(settings=settings, origins=origins)
        inner = _of(live, self._options.options)
        outer = _of(live, self._options)
        self._options = replace(
            self._options, options=replace(self._options.options, **inner), **outer
        )
        self._was_there = new.file is not None


def _changed(old: Loaded, new: Loaded) -> list[str]:
    """Return the attributes of settings that differ."""
    return [
        name for name in old.origins if getattr(old.settings, name) != getattr(new.settings, name)
    ]


def _of(values: Mapping[str, Any], options: Options | ServerOptions) -> dict[str, Any]:
    """Return those of the values that the options have a field for."""
    return {field.name: values[field.name] for field in fields(options) if field.name in values}


def check_access(loaded: Loaded) -> None:
    """Refuse groups and addresses that this machine cannot have, and certificates and tokens that
    cannot be used, before anything is begun."""
    from kvstore.peers import group_id
    from kvstore.sockets import tcp_address

    settings, origins = loaded.settings, loaded.origins
    for name in ("socket_group", "admin_group"):
        group_id(getattr(settings, name), f"{name} ({origins[name]})")
    guard = _guard_files(loaded).read()
    if settings.listen is not None:
        where = f"listen ({origins['listen']})"
        tcp_address(settings.listen, guarded=guard.complete, setting=where)
    if settings.admin is not None and not settings.admin.startswith("/"):
        tcp_address(settings.admin, setting=f"admin ({origins['admin']})")


def _guard_files(loaded: Loaded) -> GuardFiles:
    from kvstore.guard import GuardFiles

    settings = loaded.settings
    return GuardFiles(
        settings.tls_certificate, settings.tls_key, settings.tls_client_ca, settings.token_file
    )


def _make_socket_folder(loaded: Loaded) -> None:
    """Make the default folder of the socket; the members of socket_group must get through it."""
    from kvstore.peers import group_id

    settings, origin = loaded.settings, loaded.origins["socket"]
    if origin.source != "default":
        return
    settings.socket.parent.mkdir(mode=0o700, exist_ok=True)
    group = group_id(settings.socket_group, "socket_group")
    if group is not None and origin.place == "default":  # else systemd made it, as its unit says
        os.chown(settings.socket.parent, -1, group)
        settings.socket.parent.chmod(0o710)


def _make_default_parent(loaded: Loaded) -> None:
    """Make what a store at the default place needs; a place that somebody named must be there."""
    if loaded.origins["store"].source == "default":
        loaded.settings.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def _log_settings(loaded: Loaded) -> None:
    for name in loaded.origins:
        log.info(_told(loaded, name))
    for name in loaded.ignored:
        log.info("environment variable %s is not a setting; ignored", name)


def _told(loaded: Loaded, attribute: str) -> str:
    """Return a setting in a line, with where it came from; what nobody set as it will be."""
    from kvstore import config

    found: tuple[object, object]
    found = getattr(loaded.settings, attribute), loaded.origins[attribute]
    if found[0] is None and attribute in LEFT_TO_THE_STORE:
        found = _left_to_the_store(loaded, attribute)
    return f"{config.name_of(attribute)} = {shown(found[0])} ({found[1]})"


def _left_to_the_store(loaded: Loaded, name: str) -> tuple[object, object]:
    """Return what a setting will be that nobody set, and why."""
    from kvstore import layout, node
    from kvstore.errors import KVStoreError
    from kvstore.opening import CAPACITY_SHARE
    from kvstore.quantities import Size
    from kvstore.space import default_floor

    store = loaded.settings.store
    total = node.filesystem_bytes(store)
    if name == "min_free":
        return Size(default_floor(total)), "default for this filesystem"
    try:
        record = layout.read(store)
    except KVStoreError:  # none yet, or the opening will tell what is wrong with it
        if name in NEW_STORE:
            return NEW_STORE[name], "default for a new store"
        return Size(int(total * CAPACITY_SHARE)), "half of the filesystem, for a new store"
    fixed = name in NEW_STORE
    found = _of_store(record, name) if fixed else Size(record.capacity_bytes)
    return found, str(store / layout.STORE_FILE)


def _too_much(loaded: Loaded) -> str:
    """Return a warning if the capacity asked for is more than there can ever be; else nothing."""
    from kvstore import node, render

    capacity, total = loaded.settings.capacity, node.filesystem_bytes(loaded.settings.store)
    if capacity is None or not 0 < total < capacity:
        return ""
    return (
        f"capacity ({loaded.origins['capacity']}) is {render.size(capacity)}, but the filesystem "
        f"of {loaded.settings.store} has {render.size(total)}: min_free will be the limit"
    )


def _server_options(loaded: Loaded) -> ServerOptions:
    from kvstore.opening import Options
    from kvstore.server import ServerOptions

    settings = loaded.settings
    return ServerOptions(
        socket=settings.socket,
        store=settings.store,
        options=Options(
            engine=_fixed(loaded, "engine"),
            parity=_fixed(loaded, "parity"),
            capacity=settings.capacity,
            min_free=settings.min_free,
            create=settings.create,
            io=settings.io,
            memory_bytes=settings.memory,
            write=settings.write,
            max_dirty_age=settings.max_dirty_age,
            policy=settings.policy,
            when_full=settings.when_full,
            scrub_rate=settings.scrub_rate,
            namespace_quota=settings.namespace_quota,
        ),
        workers=settings.workers,
        max_clients=settings.max_clients,
        request_timeout=settings.request_timeout,
        drain_timeout=settings.drain_timeout,
        listen=settings.listen,
        admin=settings.admin,
        guard=_guard_files(loaded),
        socket_group=settings.socket_group,
        admin_group=settings.admin_group,
        max_requests=settings.max_requests,
        max_client_bytes=settings.max_client_bytes,
        max_client_regions=settings.max_client_regions,
        max_regions=settings.max_regions,
    )


def _fixed(loaded: Loaded, name: str) -> str | None:
    """Return what was asked for of what is chosen when a store is made; in the file or environment
    it gives way to the store's own."""
    from kvstore import backends, layout
    from kvstore.errors import StoreNotFound

    wanted: str | None = getattr(loaded.settings, name)
    origin = loaded.origins[name]
    if wanted is None or origin.source == "flag":
        return wanted
    try:
        has = _of_store(layout.read(loaded.settings.store), name)
    except StoreNotFound:
        return wanted
    if has == backends.plain_name(wanted):
        return wanted
    log.warning("%s = %s (%s) is ignored: the store has %s", name, wanted, origin, has)
    return None


def _of_store(record: StoreRecord, name: str) -> str:
    from kvstore import parity

    return record.engine if name == "engine" else parity.KINDS[record.parity]


def shown(value: object) -> str:
    from kvstore import render
    from kvstore.quantities import Duration, Size

    if isinstance(value, Size):
        return render.size(value)
    if isinstance(value, Duration):
        return render.duration(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@click.command(
    cls=Command,
    example="kvstore create /mnt/nvme/kv --capacity 512GiB",
    exits={
        0: "",
        1: "something is already there, or failed",
        2: "",
        10: "the directory to make it in does not exist",
        11: "",
        13: "",
        14: "",
        130: "",
        141: "",
    },
)
@store_option
@_setting("engine", "NAME", "How blocks are kept on disk.")
@_setting("parity", "off|xor", "A parity chunk for each block, to bring back a damaged one.")
@_setting("capacity", "SIZE", "Bytes the store may take on disk.")
@click.pass_obj
def create(call: Call, /, argument: str | None, store: str | None, **flags: str | None) -> None:
    """Make an empty store at STORE, else where the settings say."""
    from kvstore import config, node, render
    from kvstore.opening import Options, create_store

    loaded = config.load(call.flags(store=chosen_store(argument, store), **flags))
    settings = loaded.settings
    _make_default_parent(loaded)
    options = Options(settings.engine, settings.capacity, parity=settings.parity)
    record = create_store(settings.store, options)
    warning = _too_much(loaded)
    if warning:
        call.output.note(f"warning: {warning}")
    capacity = record.capacity_bytes
    mount = node.mount_of(settings.store)
    document = {
        "store": settings.store,
        "uuid": record.uuid,
        "engine": record.engine,
        "parity": _of_store(record, "parity"),
        "capacity_bytes": capacity,
        "device": mount.device,
        "mount_point": mount.point,
    }
    origin = "" if loaded.origins["store"].source == "flag" else f" ({loaded.origins['store']})"
    line = (
        f"made a store at {settings.store}{origin}: engine {record.engine}, capacity "
        f"{render.size(capacity)}, on {mount.device} mounted at {mount.point}"
    )
    call.output.result(document, [line])


def chosen_store(argument: str | None, option: str | None) -> str | None:
    """Return the store that a command line names, if any. Raises UsageError."""
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two stores are named, {argument} and {option}", "name one")
    return option if argument is None else argument

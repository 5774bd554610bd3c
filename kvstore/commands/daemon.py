"""Commands about a whole store: serve it, make it, look at it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, become_owner, online, store_option
from kvstore.errors import CorruptStore, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvstore.config import Loaded
    from kvstore.server import ServerOptions
    from kvstore.summary import Summary

DEGRADED = 1

log = logging.getLogger("kvstore")


def _setting(name: str, metavar: str, help_text: str) -> Callable[..., Any]:
    # Values stay text here: config judges them, whatever source they come from.
    return click.option(f"--{name}", metavar=metavar, help=help_text)


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
    },
)
@_setting("store", "DIR", "Directory of the store.")
@_setting("engine", "NAME", "How blocks are kept on disk, chosen at creation.")
@_setting("capacity", "SIZE", "Bytes the store may take on disk.")
@_setting("memory", "SIZE", "Bytes of the memory tier.")
@_setting("min-free", "SIZE", "Bytes of the filesystem that stay free.")
@_setting("create", "auto|never", "Whether a missing store is made.")
@_setting("workers", "N", "Threads for disk and hashing.")
@_setting("io", "auto|direct|buffered", "How block files are read and written.")
@_setting("max-clients", "N", "Connections at a time.")
@_setting("request-timeout", "TIME", "Longest wait of a request.")
@_setting("drain-timeout", "TIME", "Longest time from SIGTERM to the end.")
@_setting("log-level", "LEVEL", "debug, info, warning or error.")
@_setting("log-format", "text|json", "Form of the log lines on stderr.")
@click.option("--check-only", is_flag=True, help="Check the settings and stop.")
@click.pass_obj
def serve(call: Call, /, check_only: bool, **flags: str | None) -> int:
    """Run the daemon in the foreground until SIGTERM."""
    from kvstore import config, render

    if flags["log_level"] is None and call.output.verbose:
        flags["log_level"] = "debug"
    loaded = config.load(call.flags(**flags))
    config.check_memory(loaded)
    if check_only:
        call.output.result({"settings": "valid"}, ["settings are valid"])
        return 0
    render.start_logging(loaded.settings.log_level, loaded.settings.log_format)
    for name, value, origin in config.describe(loaded):
        log.info("%s = %s (%s)", name, _shown(value), origin)
    for name in loaded.ignored:
        log.info("environment variable %s is not a setting; ignored", name)
    from kvstore.server import serve as run_daemon

    _make_default_folders(loaded)
    return run_daemon(_server_options(loaded))


def _make_default_folders(loaded: Loaded) -> None:
    """Make what a bare ``kvstore serve`` needs; a place that somebody named must be there."""
    settings = loaded.settings
    if loaded.origins["socket"].source == "default":
        settings.socket.parent.mkdir(mode=0o700, exist_ok=True)
    if loaded.origins["store"].source == "default":
        settings.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def _server_options(loaded: Loaded) -> ServerOptions:
    from kvstore.opening import Options
    from kvstore.server import ServerOptions

    settings = loaded.settings
    return ServerOptions(
        socket=settings.socket,
        store=settings.store,
        options=Options(
            engine=_engine(loaded),
            capacity=settings.capacity,
            min_free=settings.min_free,
            create=settings.create,
            io=settings.io,
            memory_bytes=settings.memory,
        ),
        workers=settings.workers,
        max_clients=settings.max_clients,
        request_timeout=settings.request_timeout,
        drain_timeout=settings.drain_timeout,
    )


def _engine(loaded: Loaded) -> str | None:
    """Return the engine asked for; one in the file or environment gives way to the store's own."""
    from kvstore import layout
    from kvstore.errors import StoreNotFound

    wanted, origin = loaded.settings.engine, loaded.origins["engine"]
    if wanted is None or origin.source == "flag":
        return wanted
    try:
        engine = layout.read(loaded.settings.store).engine
    except StoreNotFound:
        return wanted
    if engine != wanted:
        log.warning("engine = %s (%s) is ignored: the store uses %s", wanted, origin, engine)
    return None


def _shown(value: object) -> str:
    from kvstore import config, render

    if isinstance(value, config.Size):
        return render.size(value)
    if isinstance(value, config.Duration):
        return render.duration(value)
    return "left to the store" if value is None else str(value)


@click.command(
    cls=Command,
    example="kvstore status\nkvstore status --json | jq .state",
    exits=online(e0="healthy", e1="degraded, or failed"),
)
@click.pass_obj
def status(call: Call) -> int:
    """Show how the daemon and its store are doing."""
    with call.client() as client:
        found = client.status()
    call.output.result(found, _status_lines(call, found))
    return DEGRADED if found.get("state") == "degraded" else 0


def _status_lines(call: Call, found: Mapping[str, Any]) -> Iterator[str]:
    from kvstore import render

    def number(name: str) -> int:
        return int(found.get(name) or 0)

    capacity, live = number("capacity_bytes"), number("live_bytes")
    asked = number("hits") + number("misses")
    share = f" ({100 * number('used_bytes') / capacity:.0f} %)" if capacity else ""
    ratio = f" ({100 * number('hits') / asked:.1f} % hits)" if asked else ""
    yield from render.fields(
        [
            ("state", call.output.state(str(found.get("state")))),
            ("store", found.get("store")),
            ("engine", f"{found.get('engine')}, io {found.get('io')}"),
            ("version", found.get("version")),
            ("blocks", number("blocks")),
            ("live", render.size(live)),
            ("on disk", f"{render.size(number('used_bytes'))} of {render.size(capacity)}{share}"),
            ("memory", render.size(number("memory_bytes"))),
            ("dirty", f"{number('dirty_blocks'):,} blocks, {render.size(number('dirty_bytes'))}"),
            ("reads", f"{number('hits'):,} hits, {number('misses'):,} misses{ratio}"),
            ("evictions", number("evictions")),
            ("corrupt", number("corrupt_blocks")),
            ("index", f"{float(found.get('index_bytes_per_block') or 0):.1f} B per block"),
        ]
    )
    for kind in ("problems", "notes"):
        for text in found.get(kind) or ():
            yield f"{kind[:-1]}: {text}"


@click.command(
    cls=Command,
    example="kvstore create /mnt/nvme/kv --capacity 512GiB",
    exits={0: "", 1: "something is already there, or failed", 2: "", 11: "", 13: "", 14: ""},
)
@store_option
@_setting("engine", "NAME", "How blocks are kept on disk.")
@_setting("capacity", "SIZE", "Bytes the store may take on disk.")
@click.pass_obj
def create(call: Call, /, argument: str | None, store: str | None, **flags: str | None) -> None:
    """Make an empty store."""
    from kvstore import config, render
    from kvstore.opening import Options, create_store

    settings = config.load(call.flags(store=_chosen(argument, store), **flags)).settings
    record = create_store(settings.store, Options(settings.engine, settings.capacity))
    capacity = record.capacity_bytes
    document = {
        "store": settings.store,
        "uuid": record.uuid,
        "engine": record.engine,
        "capacity_bytes": capacity,
    }
    line = f"made {settings.store}: engine {record.engine}, capacity {render.size(capacity)}"
    call.output.result(document, [line])


@click.command(
    cls=Command,
    example="kvstore inspect\nkvstore inspect /mnt/nvme/kv --json",
    exits={
        0: "",
        1: "",
        2: "",
        5: "the journal or another file of the store is damaged",
        10: "",
        11: "",
        13: "",
        15: "",
    },
)
@store_option
@click.pass_obj
def inspect(call: Call, argument: str | None, store: str | None) -> int:
    """Show what a store holds, without a daemon; nothing is written."""
    from kvstore.summary import summarize

    path = call.path("store", _chosen(argument, store))
    become_owner(path)
    summary = summarize(path)
    call.output.result(summary.document(), _summary_lines(summary))
    return CorruptStore.exit_code if summary.damage else 0


def _summary_lines(summary: Summary) -> Iterator[str]:
    from kvstore import render

    found, used = summary.record, render.size(summary.used_bytes)
    yield from render.fields(
        [
            ("store", summary.store),
            ("uuid", found.uuid.hex()),
            ("engine", found.engine),
            ("created", found.created),
            ("opened", _openings(summary)),
            ("blocks", summary.blocks),
            ("live", render.size(summary.live_bytes)),
            ("on disk", f"{used} of {render.size(found.capacity_bytes)}"),
            ("journal", render.size(summary.journal_bytes)),
            ("quarantine", render.size(summary.quarantine_bytes)),
        ]
    )
    yield from render.table(
        ["namespace", "blocks", "live", "key bytes", "record"],
        [
            (
                share.id,
                share.blocks,
                render.size(share.live_bytes),
                share.key_length or "any",
                render.compact(share.record),
            )
            for share in summary.namespaces
        ],
    )
    for text in summary.damage:
        yield f"damage: {text}"


def _openings(summary: Summary) -> str:
    from kvstore import render

    if not summary.record.opens:
        return "never"
    ending = "stopped cleanly" if summary.clean else "not stopped cleanly"
    return f"{render.count(summary.record.opens, 'time')}, {ending}"


def _chosen(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two stores are named, {argument} and {option}", "name one")
    return option if argument is None else argument

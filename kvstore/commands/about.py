"""Commands about the program itself: engines, config, completion, version."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kvstore import __version__
from kvstore.commands.daemon import check_access, chosen_store, serve, shown
from kvstore.commands.frame import Call, Command, Group, store_option
from kvstore.errors import ConfigError, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.config import Loaded

SHELLS = ("bash", "zsh", "fish")
OFFLINE = (0, 1, 2, 130, 141)
STATES = ("ok", "warn", "fail", "unknown")


# -- engines --------------------------------------------------------------------------------------


@click.command(cls=Command, example="kvstore engines\nkvstore engines --json", exits=OFFLINE)
@click.pass_obj
def engines(call: Call) -> None:
    """List the engines: ways to keep blocks on disk."""
    from kvstore import backends, render

    found = [_engine(name) for name in sorted([*backends.engine_names(), *backends.ALIASES])]
    rows = [
        (
            one["name"],
            one["package"],
            one["version"],
            "yes" if one["usable"] else f"no: {one['problem']}",
            _abilities(one["capabilities"]),
        )
        for one in found
    ]
    head = ["engine", "package", "version", "usable", "capabilities"]
    call.output.result({"engines": found}, render.table(head, rows))


def _engine(name: str) -> dict[str, Any]:
    from dataclasses import asdict

    from kvstore import backends

    package, version = backends.engine_package(name)
    told: dict[str, Any] = {"name": name, "package": package, "version": version}
    try:
        capabilities = asdict(backends.engine_class(name).capabilities)
    except KVStoreError as error:
        return {**told, "usable": False, "problem": str(error), "capabilities": None}
    return {**told, "usable": True, "problem": "", "capabilities": capabilities}


def _abilities(capabilities: Mapping[str, object] | None) -> str:
    if capabilities is None:
        return ""
    yes = [name.replace("_", " ") for name, value in capabilities.items() if value is True]
    return ", ".join([*yes, f"space factor {capabilities['space_factor']}"])


# -- doctor ---------------------------------------------------------------------------------------


@click.command(
    cls=Command,
    example="kvstore doctor\nkvstore doctor /mnt/nvme/kv --json\nkvstore doctor vllm",
    exits={0: "nothing fails", 1: "something does", 2: "", 13: "", 130: "", 141: ""},
)
@store_option
@click.pass_obj
def doctor(call: Call, argument: str | None, store: str | None) -> int:
    """Tell what is wrong with this node, and what to do.

    Filesystem, free space, permissions, limits, memory, clock: nothing is written. A line for each
    check: ok, warn, fail or unknown. "doctor vllm" looks at what a vLLM on this node needs; a STORE
    of that name is written ./vllm.
    """
    from kvstore import config, doctor, render
    from kvstore.commands import vllm

    about_vllm = argument == "vllm"
    chosen = chosen_store(None if about_vllm else argument, store)
    settings = config.load(call.flags(store=chosen)).settings
    subject = doctor.Subject(settings.store, settings.memory, settings.min_free, settings.socket)
    checks = list(doctor.examine(subject, vllm.CHECKS if about_vllm else None))
    count = {state: sum(found.state == state for _, found in checks) for state in STATES}
    shown = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    rows = [(found.state, name, found.message) for name, found in checks]
    lines = []
    for line, (_, found) in zip(render.table(["", "check", ""], rows)[1:], checks, strict=True):
        lines += [line, f"         {found.fix}"] if found.fix else [line]
    document = {"checks": [{"id": name, **found._asdict()} for name, found in checks], **count}
    call.output.result(document, [*lines, shown])
    return 1 if count["fail"] else 0


# -- config ---------------------------------------------------------------------------------------


@click.group(
    cls=Group,
    example="kvstore config check\nkvstore config show --origin\nkvstore config example",
    exits=(0, 1, 2, 13, 130, 141),
)
def config() -> None:
    """Check, show or begin a configuration."""


@config.command(
    cls=Command,
    example="kvstore config check\nkvstore --config ./kvstore.toml config check --json",
    exits={0: "every setting is valid", 1: "", 2: "", 13: "not all are", 130: "", 141: ""},
)
@click.pass_obj
def check(call: Call) -> int:
    """Judge all settings as serve would, and name each problem."""
    from kvstore import config as settings
    from kvstore import render

    found = settings.problems(call.flags())
    if not found:
        loaded = settings.load(call.flags())
        try:
            settings.check_memory(loaded)
            check_access(loaded)
        except ConfigError as error:
            found = [error]
    problems = [{"message": error.message, "hint": error.hint} for error in found]
    lines = [f"problem: {render.sentences(error.message, error.hint)}" for error in found] or [
        "settings are valid"
    ]
    call.output.result({"valid": not found, "problems": problems}, lines)
    return ConfigError.exit_code if found else 0


@config.command(
    cls=Command,
    example="kvstore config show\nkvstore config show --origin --json",
    exits=(0, 1, 2, 13, 130, 141),
)
@click.option("--origin", is_flag=True, help="Tell where each one comes from.")
@click.pass_obj
def show(call: Call, origin: bool) -> None:
    """Show every setting as serve would have it.

    With --origin also whether a change takes effect while the daemon serves (live, see kvstore
    serve) or needs a restart.

    What is not set is "none", and null with --json; engine, capacity and min_free then depend on
    the store and its filesystem.
    """
    from kvstore import config as settings
    from kvstore import render

    found = settings.describe(settings.load(call.flags()))
    listed = [
        {
            "name": name,
            "value": value,
            "origin": str(place),
            "source": str(place.source),
            "change": _change(name),
        }
        for name, value, place in found
    ]
    rows = [(name, shown(value), _change(name), str(place)) for name, value, place in found]
    if origin:
        lines = render.table(["setting", "value", "change", "origin"], rows)
    else:
        lines = render.fields([(name, value) for name, value, _, _ in rows])
    call.output.result({"settings": listed}, lines)


def _change(name: str) -> str:
    """Return what a daemon that serves needs to take a change over: ``live`` or ``restart``."""
    from kvstore import config as settings

    return "live" if name.replace(".", "_") in settings.LIVE else "restart"


SAMPLES = {
    "engine": '"filesystem"',
    "parity": '"xor"',
    "capacity": '"512GiB"',
    "min_free": '"10GiB"',
    "namespace_quota": '"100GiB"',
    "listen": '"tcp://127.0.0.1:7700"',
    "tls_certificate": '"/etc/kvstore/daemon.pem"',
    "tls_key": '"/etc/kvstore/daemon.key"',
    "tls_client_ca": '"/etc/kvstore/clients.pem"',
    "token_file": '"/etc/kvstore/token"',
    "admin": '"tcp://127.0.0.1:9470"',
    "socket_group": '"kvstore"',
    "admin_group": '"kvstore-admin"',
}
"""What the example shows for settings that have no value unless somebody gives one."""


@config.command(
    cls=Command,
    example="kvstore config example > kvstore.toml",
    exits=(0, 1, 2, 13, 130, 141),
)
@click.pass_obj
def example(call: Call) -> None:
    """Print a configuration file with every setting explained."""
    from kvstore import config as settings

    text = "\n".join(_example(settings.load({"config": "/dev/null"}, {})))
    call.output.result({"example": text}, [text])


def _example(loaded: Loaded) -> Iterator[str]:
    from kvstore import config as settings

    yield "# kvstore.toml: every setting, commented out, with its default."
    yield "# Sizes are written 64GiB, times 250ms or 5min. kvstore config check judges this file."
    helps = {one.name: _described(one) for one in serve.params if isinstance(one, click.Option)}
    section = ""
    for name, value, _ in settings.describe(loaded):
        table, _, key = name.rpartition(".")
        if table != section:
            section = table
            yield f"\n[{table}]"
        text = helps.get(name.replace(".", "_")) or "Unix socket of the daemon."
        left = name in SAMPLES
        yield f"\n# {text}{' Not set by default.' if left else ''}"
        yield f"# {key or name} = {SAMPLES[name] if left else _toml(value)}"


def _described(option: click.Option) -> str:
    """Return the help of a setting, with the words that it may be."""
    text, words = option.help or "", (option.metavar or "").split("|")
    if len(words) == 1:
        return text
    return f"{text.rstrip('.')}: {', '.join(words[:-1])} or {words[-1]}."


def _toml(value: object) -> str:
    from kvstore.quantities import Duration, Size

    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Size):
        return f'"{shown(value).replace(" ", "")}"'
    if isinstance(value, Duration):
        return f'"{value:g}s"'
    return str(value) if isinstance(value, int) else f'"{value}"'


# -- completion and version -----------------------------------------------------------------------


@click.command(
    cls=Command,
    example='eval "$(kvstore completion bash)"\nkvstore completion fish > kvstore.fish',
    exits=OFFLINE,
)
@click.argument("shell", metavar="|".join(SHELLS), type=click.Choice(SHELLS))
@click.pass_obj
def completion(call: Call, shell: str) -> None:
    """Print the script by which a shell completes commands."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    script = kind(root, {}, "kvstore", "_KVSTORE_COMPLETE").source()
    call.output.result({"shell": shell, "script": script}, [script])


@click.command(cls=Command, example="kvstore version\nkvstore version --json", exits=OFFLINE)
@click.pass_obj
def version(call: Call) -> None:
    """Show the version of program, protocol and store format."""
    from kvstore import layout, protocol

    python = ".".join(map(str, sys.version_info[:3]))
    document = {
        "version": __version__,
        "protocol": protocol.VERSION,
        "store_format": layout.FORMAT,
        "python": python,
    }
    line = f"kvstore {__version__} (protocol {protocol.VERSION}, store format {layout.FORMAT}, "
    call.output.result(document, [f"{line}Python {python})"])

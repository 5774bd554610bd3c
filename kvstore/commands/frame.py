"""What all commands share: global flags before and after the command, help, exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvstore import __version__
from kvstore.render import Output

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import Client

PARTLY = 3
INTERRUPTED = 130
READER_GONE = 141
"""What a shell reports of a program that SIGPIPE ended, as it ends ``ls`` in ``ls | head``."""

EXIT_STATUS = {
    0: "done, or yes",
    1: "failed for a reason that has no code of its own; the message says which",
    2: "wrong usage",
    3: "partly done: some blocks failed",
    4: "not found, or no",
    5: "damage found and left",
    10: "the store does not exist",
    11: "the store is locked by another process",
    12: "the daemon is unreachable or timed out",
    13: "a setting is invalid",
    14: "no space",
    15: "the store's format is newer than this program",
    INTERRUPTED: "interrupted (Ctrl-C)",
    READER_GONE: "whoever read the output left early, as head does",
}
ONLINE = (1, 2, 12, 13, INTERRUPTED, READER_GONE)
"""Exit codes that every command which talks to the daemon may end with."""

CLIENT_TIMEOUT = 30.0
OFFLINE = ("kvstore.lookup", "kvstore.mend", "kvstore.summary", "tqdm")
"""What commands import that work on a store by themselves."""


class ReaderGone(Exception):
    """Whoever read our output has had enough."""


@dataclass
class Call:
    """One run of the command: its global flags."""

    config: str | None = None
    socket: str | None = None
    output: Output = field(default_factory=Output)

    def flags(self, **settings: object) -> dict[str, object]:
        """Return flags for ``config.load``: the global ones and those of the command."""
        return {"config": self.config, "socket": self.socket, **settings}

    def store(self, value: str | None = None) -> Path:
        """Return the setting ``store``, which may be given, without judging the other settings."""
        from kvstore import config

        return config.load_path("store", self.flags() if value is None else self.flags(store=value))

    def new_client(self) -> Client:
        """Return a client of the daemon: at its socket, or at an address like tls://HOST:PORT in
        its place, which flag and environment may name."""
        from kvstore import config
        from kvstore.client import Client

        named = self.socket or os.environ.get(config.variable("socket")) or ""
        address = named if "://" in named else str(config.load_path("socket", self.flags()))
        return Client(address, timeout=CLIENT_TIMEOUT)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Connect to the daemon. Raises DaemonUnavailable."""
        with self.new_client() as client:
            yield client


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:  # noqa: ANN401
    """Keep a global flag. Given before and after the command, the later one wins; -v adds up."""
    call = context.find_object(Call)
    if call is None or value is None or value is False or value == 0:
        return
    name = parameter.name or ""
    if name in ("config", "socket"):
        setattr(call, name, value)
    elif name == "verbose":
        call.output.verbose += value
    else:
        setattr(call.output, name, value)


def _show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        _show(context, f"kvstore {__version__}")


def _show_help(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        _show(context, context.get_help())


def _show(context: click.Context, text: str) -> NoReturn:
    (context.find_object(Call) or Call()).output.text(text)
    context.exit()


def global_options() -> list[click.Parameter]:
    """Return the options that are accepted before and after every command."""

    def option(*names: str, **how: Any) -> click.Option:  # noqa: ANN401
        return click.Option(names, expose_value=False, callback=_remember, **how)

    return [
        option("--config", metavar="PATH", help="Configuration file (TOML)."),
        option("--socket", metavar="PATH", help="Socket of the daemon, or tls://HOST:PORT."),
        option("--json", is_flag=True, help="Results and errors as JSON."),
        option(
            "-q",
            "--quiet",
            is_flag=True,
            help="Only errors, blocks and JSON; the exit code tells the rest.",
        ),
        option("-v", "--verbose", count=True, help="Say more; -vv shows where errors come from."),
        option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            help="Colour; auto means a terminal and NO_COLOR unset.",
        ),
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version.",
        ),
    ]


class Option(click.Option):
    """An option that the help shows under a title of its own."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.section = section


class Help(click.Command):
    """A command whose help ends with an example and the exit codes it may return.

    ``answers``: it ends with a result on stdout, so it does nothing while stdout is closed.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        example: str,
        exits: Sequence[int] | Mapping[int, str],
        answers: bool = True,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **kwargs)
        self.example = example
        self.answers = answers
        own = dict(exits) if isinstance(exits, Mapping) else dict.fromkeys(exits, "")
        self.exits = {code: own[code] or EXIT_STATUS[code] for code in sorted(own)}
        self.shared = global_options()
        self.params = [*self.params, *self.shared]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help  # click's own takes a closed stdout for a success
        return option

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        call = ctx.find_object(Call)
        if call is not None and self.answers and not isinstance(self, click.Group):
            call.output.check_stdout()
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # click would make it a success.
            raise ReaderGone from error

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        options = [p for p in self.params if isinstance(p, click.Option)]
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in options:
            record = option.get_help_record(context)
            if record and option not in self.shared:
                title = getattr(option, "section", "Options")
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(context, formatter)
        shared = [*self.shared, *filter(None, [self.get_help_option(context)])]
        rest = [record for p in shared if (record := p.get_help_record(context))]
        with formatter.section("Global options"):
            if context.parent is None:
                formatter.write_dl(rest)
            else:
                names = [record[0].split(",")[0].split()[0] for record in rest]
                formatter.write_text(f"{' '.join(names)} (kvstore --help explains them)")

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write("".join(f"  {line}\n" for line in self.example.splitlines()))
        with formatter.section("EXIT STATUS"):
            formatter.write_dl([(str(code), text) for code, text in self.exits.items()])


class Command(Help):
    """A command of kvstore."""


class Group(Help, click.Group):
    """A command with commands below it."""

    command_class = Command


def online(**own: str) -> dict[int, str]:
    """Return the exit codes of a command that talks to the daemon; ``e4="absent"`` adds one."""
    codes = dict.fromkeys((0, *ONLINE), "")
    return codes | {int(name[1:]): text for name, text in own.items()}


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def namespace_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --namespace and --shard to a command that names keys."""
    function = click.option(
        "--shard", type=int, default=0, show_default=True, help="Number of the parallel rank."
    )(function)
    return click.option(
        "--namespace",
        metavar="NAME|@FILE|ID",
        default="default",
        show_default=True,
        help="Its name, @FILE with its record as JSON, or (administrators) its id.",
    )(function)


def store_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let an offline command take STORE as argument or as --store."""
    function = click.argument("argument", metavar="[STORE]", required=False)(function)
    return click.option("--store", metavar="DIR", help="Directory of the store.")(function)


def become_owner(path: Path) -> None:
    """As root, take on the store's owner before touching it: whoever owns it may plant links.

    Where the owner cannot reach our Python (one below /root, say) all that may be needed is loaded
    first, and being root is put aside, for nothing but starting children: they do the same.
    """
    if os.geteuid() != 0:
        return
    from kvstore import isolate

    try:
        owner = path.stat()
    except OSError:
        return
    if owner.st_uid:
        apart = not isolate.reachable(owner.st_uid, owner.st_gid)
        if apart:
            isolate.load(*OFFLINE)
        os.setgroups([])
        os.setresgid(owner.st_gid, owner.st_gid, owner.st_gid)
        os.setresuid(owner.st_uid, owner.st_uid, 0 if apart else owner.st_uid)

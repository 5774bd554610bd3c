"""The command ``kvstore``: its tree, and what becomes of errors: one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from kvstore.commands.frame import INTERRUPTED, READER_GONE, Call, Group, ReaderGone
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIMILAR = 0.75
"""How much of a word must be right before the right one is suggested: --foo is not --color."""


class Place(NamedTuple):
    """Where a command is found, and what it is for: the first sentence of its help."""

    module: str
    name: str
    summary: str


PLACES = {
    "bench": Place("measure", "bench", "Measure on this machine."),
    "completion": Place(
        "about", "completion", "Print the script by which a shell completes commands."
    ),
    "config": Place("about", "config", "Check, show or begin a configuration."),
    "contains": Place("blocks", "contains", "Tell which blocks are there."),
    "create": Place(
        "daemon", "create", "Make an empty store at STORE, else where the settings say."
    ),
    "delete": Place("blocks", "delete", "Remove blocks by name, for good."),
    "doctor": Place("about", "doctor", "Tell what is wrong with this node, and what to do."),
    "engines": Place("about", "engines", "List the engines: ways to keep blocks on disk."),
    "evict": Place("leave", "evict", "Make blocks leave the store, those unused longest first."),
    "flush": Place("pins", "flush", "Wait until all that was put before survives a power loss."),
    "fsck": Place("check", "fsck", "Check a store that no daemon has; repair it."),
    "get": Place("blocks", "get", "Write the block under KEY to a file or, without -o, to a pipe."),
    "inspect": Place("look", "inspect", "Show what a store holds, or one block."),
    "list": Place("blocks", "list_blocks", "List blocks, one a line: NAMESPACE-ID SHARD KEY."),
    "migrate": Place(
        "migrating", "migrate", "Change the engine of a store, or bring blocks in from elsewhere."
    ),
    "pin": Place("pins", "pin", "Keep blocks from being evicted for a time."),
    "pins": Place("pins", "pins", "List pinned blocks."),
    "put": Place("blocks", "put", "Store one block under KEY (hexadecimal, 1 to 64 bytes)."),
    "quota": Place("quotas", "quota", "Limit what the blocks of a namespace may take."),
    "recover": Place(
        "recover",
        "recover",
        "Make a store that is damaged open again, with every block that is whole.",
    ),
    "replay": Place("replaying", "replay", "Tell how many blocks of a trace would have been hits."),
    "scrub": Place("scrubbing", "scrub", "Have the daemon verify what is on disk."),
    "serve": Place("daemon", "serve", "Run the daemon in the foreground until SIGTERM."),
    "status": Place("watch", "status", "Show how the daemon and its store are doing."),
    "top": Place("watch", "top", "Show what the daemon does, line by line."),
    "trace": Place("traces", "trace", "Make traces for kvstore replay."),
    "unpin": Place("pins", "unpin", "Let blocks be evicted again."),
    "version": Place("about", "version", "Show the version of program, protocol and store format."),
    "warm": Place("warming", "warm", "Bring blocks into the daemon's memory ahead of their use."),
}


class Commands(Mapping[str, click.Command]):
    """The commands by name, each imported when it is looked at: a call needs one of them."""

    def __getitem__(self, name: str) -> click.Command:
        place = PLACES[name]
        module = importlib.import_module(f"kvstore.commands.{place.module}")
        command: click.Command = getattr(module, place.name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


class Tree(Group):
    """The command at the top; its help imports none of those below."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, PLACES[name].summary) for name in self.list_commands(ctx)])


@click.group(
    cls=Tree,
    example="kvstore serve\nkvstore put 00ff -i block.bin\nkvstore get 00ff -o copy.bin",
    exits=(0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, INTERRUPTED, READER_GONE),
)
def kvstore() -> None:
    """Keep the KV-cache blocks of LLM inference on local disk."""


kvstore.commands = cast("dict[str, click.Command]", Commands())


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; whatever goes wrong is told in one line."""
    call = Call()
    # A usage error may come before the flag itself has been parsed.
    call.output.json = "--json" in arguments
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        code = kvstore.main(list(arguments), prog_name="kvstore", standalone_mode=False, obj=call)
        call.output.flush()
    except KVStoreError as error:
        call.output.trace()
        call.output.error(type(error).__name__, error.exit_code, error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        return _tell_usage(call, error)
    except (click.Abort, KeyboardInterrupt):
        call.output.error("Interrupted", INTERRUPTED, "interrupted")
        return INTERRUPTED
    except (ReaderGone, BrokenPipeError):
        call.output.abandon()
        return READER_GONE
    except OSError as error:
        return _tell_system(call, error)
    except Exception as error:
        call.output.trace()
        what = f"internal error: {type(error).__name__}: {error}"
        call.output.error(type(error).__name__, 1, what, "run it again with -vv and report it")
        return 1
    return code if isinstance(code, int) else 0


def _tell_usage(call: Call, error: click.ClickException) -> int:
    import difflib

    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    near = getattr(error, "possibilities", None)
    if near:
        word = getattr(error, "option_name", None) or getattr(error, "command_name", "")
        near[:] = difflib.get_close_matches(word, near, cutoff=SIMILAR)
    # click lists choices one a line, and several similar words in brackets.
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message.replace("(Did you mean", "Did you mean").replace("?)", "?")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "kvstore"
    message = message[:1].lower() + message[1:]
    call.output.error(type(error).__name__, error.exit_code, message, f"see '{path} --help'")
    return error.exit_code


def _tell_system(call: Call, error: OSError) -> int:
    call.output.trace()
    call.output.abandon()  # else the end of the process would try the same bytes again, and fail
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f"{error.filename}: " if error.filename else ""
    hint = "free some space there, or choose another place" if full else "check the path and its"
    message = f"{where}{error.strerror or error}"
    call.output.error(
        type(error).__name__, 14 if full else 1, message, hint if full else f"{hint} permissions"
    )
    return 14 if full else 1

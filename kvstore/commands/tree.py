"""The command ``kvstore``: its tree, and what becomes of errors: one line and an exit code."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING

import click

from kvstore.commands.about import completion, config, engines, version
from kvstore.commands.blocks import contains, delete, get, list_blocks, put
from kvstore.commands.daemon import create, serve
from kvstore.commands.frame import INTERRUPTED, READER_GONE, Call, Group, ReaderGone
from kvstore.commands.leave import evict
from kvstore.commands.look import inspect
from kvstore.commands.measure import bench
from kvstore.commands.pins import flush, pin, pins, unpin
from kvstore.commands.warming import warm
from kvstore.commands.watch import status, top
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

SIMILAR = 0.75
"""How much of a word must be right before the right one is suggested: --foo is not --color."""


@click.group(
    cls=Group,
    example="kvstore serve\nkvstore put 00ff -i block.bin\nkvstore get 00ff -o copy.bin",
    exits=(0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, INTERRUPTED, READER_GONE),
)
def kvstore() -> None:
    """Keep the KV-cache blocks of LLM inference on local disk."""


COMMANDS = (
    *(serve, create, status, top),
    *(put, get, contains, list_blocks, delete, inspect),
    *(evict, warm, pin, unpin, pins, flush),
    *(bench, engines, config, completion, version),
)
for _command in COMMANDS:
    kvstore.add_command(_command)


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

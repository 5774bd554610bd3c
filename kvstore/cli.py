"""The command ``kvstore``: parse, call one function, render. The only room that ends the process.

The commands themselves lie in ``commands/``, one module a subject.
"""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from kvstore.commands.blocks import contains, delete, get, list_blocks, put
from kvstore.commands.daemon import create, inspect, serve, status
from kvstore.commands.frame import Call, Group, ReaderGone
from kvstore.commands.measure import bench
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130


@click.group(
    cls=Group,
    example="kvstore serve\nkvstore put 00ff -i block.bin\nkvstore get 00ff -o copy.bin",
    exits=(0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, INTERRUPTED),
)
def kvstore() -> None:
    """Keep the KV-cache blocks of LLM inference on local disk."""


for _command in (serve, create, status, put, get, contains, list_blocks, delete, inspect, bench):
    kvstore.add_command(_command)


def main() -> NoReturn:
    """Run the command line of this process and end with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; whatever goes wrong is told in one line."""
    call = Call()
    # A usage error may come before the flag itself has been parsed.
    call.output.json = "--json" in arguments
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = kvstore.main(list(arguments), prog_name="kvstore", standalone_mode=False, obj=call)
        sys.stdout.flush()
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
        return 1
    except OSError as error:
        return _tell_system(call, error)
    except Exception as error:
        call.output.trace()
        what = f"internal error: {type(error).__name__}: {error}"
        call.output.error(type(error).__name__, 1, what, "run it again with -vv and report it")
        return 1
    return code if isinstance(code, int) else 0


def _tell_usage(call: Call, error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    message = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "kvstore"
    message = message[:1].lower() + message[1:]
    call.output.error(type(error).__name__, error.exit_code, message, f"see '{path} --help'")
    return error.exit_code


def _tell_system(call: Call, error: OSError) -> int:
    call.output.trace()
    code = 14 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    where = f"{error.filename}: " if error.filename else ""
    message = f"{where}{error.strerror or error}"
    call.output.error(type(error).__name__, code, message, "check the path and its permissions")
    return code

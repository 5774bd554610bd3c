"""docs/cli.md, docs/json.md, docs/metrics.md: ``python -m kvstore.commands.reference`` makes them
from the commands and what they use.

``make docs`` runs it; a test compares what is there with what would be written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore import findings
from kvstore.commands import documents, shapes
from kvstore.commands.frame import Help
from kvstore.commands.tree import kvstore

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 78
"""Of help that goes to no terminal."""
DOCS = Path(__file__).parents[2] / "docs"

CLI_HEAD = """\
# The command line

The help of every command, as `kvstore COMMAND --help` prints it. Made by `make docs`.

Exit codes are the same everywhere; each command lists those that it may end with. A script should
take a code that it does not know for a failure."""

JSON_HEAD = """\
# What --json prints

One JSON document on stdout; for `top` and `status --watch` one a line, each with `type`, the last
of type `summary`. Sizes are integers of bytes, times numbers of seconds, ids and keys lower-case
hex. Fields are only ever added, never renamed or given another kind. Made by `make docs` from
`kvstore/commands/documents.py`; a test compares what the commands print. `kvstore bench` prints its
measurements, whose fields are no promise.

A command that fails prints one line on stderr; stdout then has nothing, or what had been done."""

METRICS_HEAD = """\
# Metrics

What `/metrics` tells where the setting `admin` says, in the format of Prometheus. Counters begin
anew with the daemon. No label holds a key or the name of a namespace. Made by `make docs` from
`kvstore/exposition.py`. `grafana/kvstore.json` is a dashboard, `grafana/alerts.yml` has rules."""


def commands(words: tuple[str, ...], command: Help) -> Iterator[tuple[tuple[str, ...], Help]]:
    """Yield a command and all below it, with the words that call them."""
    yield words, command
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            assert isinstance(below, Help)
            yield from commands((*words, name), below)


def cli_page() -> str:
    """Return docs/cli.md."""
    parts = [CLI_HEAD]
    for words, command in commands(("kvstore",), kvstore):
        parts += [f"## {' '.join(words)}", f"```text\n{help_of(words, command)}\n```"]
    return "\n\n".join(parts) + "\n"


def help_of(words: tuple[str, ...], command: Help) -> str:
    """Return the help as the command prints it."""
    context: click.Context | None = None
    for number, word in enumerate(words):
        named = command if number == len(words) - 1 else kvstore
        context = click.Context(
            named, context, word, terminal_width=WIDTH, max_content_width=WIDTH, color=False
        )
    assert context is not None
    context.help_option_names = ["-h", "--help"]
    return command.get_help(context).rstrip()


def json_page() -> str:
    """Return docs/json.md."""
    parts = [JSON_HEAD, *_section("An error", documents.ERROR)]
    for name, fields in documents.DOCUMENTS.items():
        parts += _section(f"kvstore {name}", fields)
        if name == "status":
            text = "While the store is being opened there are fewer fields:"
            parts += [text, _table(documents.RECOVERING)]
    for name, kinds in documents.LINES.items():
        parts.append(f"## kvstore {name}")
        for fields in kinds:
            parts += [f"A line of type `{fields['type'][1]}`:", _table(fields)]
    parts.append("## Shapes")
    for name, fields in shapes.SHAPES.items():
        parts += [f"### {name}", _table(fields)]
    return "\n\n".join(parts) + "\n"


def _section(title: str, fields: shapes.Fields) -> list[str]:
    return [f"## {title}", _table(fields)]


def _table(fields: shapes.Fields) -> str:
    rows = [f"| `{name}` | {kind} | {text} |" for name, (kind, text) in fields.items()]
    return "\n".join(["| field | kind | meaning |", "|---|---|---|", *rows])


def fsck_page() -> str:
    """Return docs/fsck.md, of which the table at the end is made."""
    head, mark, _ = (DOCS / "fsck.md").read_text().partition("## Findings\n")
    text = "An id never changes its meaning. This table is made from `kvstore/findings.py`."
    return f"{head}{mark}\n{text}\n\n" + "\n".join(findings.table()) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md."""
    from kvstore.exposition import METRICS, OTHERS

    rows = [f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in OTHERS.items()]
    for metric in METRICS:
        labels = f"; label: {metric.label} ({', '.join(metric.samples)})" if metric.label else ""
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.meaning}{labels} |")
    table = ["| metric | kind | meaning |", "|---|---|---|", *rows]
    return f"{METRICS_HEAD}\n\n" + "\n".join(table) + "\n"


PAGES = {"cli.md": cli_page, "json.md": json_page, "metrics.md": metrics_page, "fsck.md": fsck_page}


def write() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    write()

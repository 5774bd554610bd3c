"""The tables as text and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import render
from kvstore.bench import environment, published
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

HEAD = (
    *("subject", "operation", "s", "drain s", "x copy", "best", "drained", "published"),
    *("written", "missed", "from memory", "CPU s"),
)
LEGEND = (
    "s, drain s: seconds of the 512 moves, and then until all of it is on the device",
    "x copy: s divided by that of the same moves in memory by one thread; best: of the best rounds",
    "drained: both together, as a multiple of the copy; written: what was written by then",
    "published: the source's figure, divided by its own copy",
    "from memory: how many of 512; a block read cold is in memory when a later task reads it again",
    "CPU s: of client and daemon together",
)


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Return a document of :func:`kvstore.bench.tables.run` as text."""
    where = ", in this process without a daemon" if result["local"] else ""
    yield f"table {result['table']}: the workload wde-512{where}"
    yield from environment.lines(result["environment"])
    flaws: dict[str, int] = {}
    for model in result["models"]:
        size, total = model["block_bytes"], model["blocks"] * model["block_bytes"]
        yield ""
        yield (
            f"{model['model']} ({model['id']}): {model['blocks']} moves of {render.size(size)} "
            f"({render.size(total)}), median of {render.count(model['rounds'], 'round')}"
        )
        yield from _table([_cells(row, flaws) for row in model["rows"]])
        yield from (f"note: {note}" for note in model["notes"])
    yield ""
    if result["not_measured"]:
        yield f"not measured, for the time was over: {', '.join(result['not_measured'])}"
    yield from LEGEND
    yield from (f"[{number}] {flaw}" for flaw, number in flaws.items())
    yield from (f"FAILED: {fault}" for fault in result["faults"])


def _table(rows: list[list[str]]) -> list[str]:
    """Lay rows out under :data:`HEAD`: figures to the right, also where some rows have none."""
    columns = list(zip(HEAD, *rows, strict=True))
    for at, column in enumerate(columns[2:], 2):
        width = max(map(len, column))
        columns[at] = tuple(cell.rjust(width) for cell in column)
    head, *body = zip(*columns, strict=True)
    return render.table(head, body)


def _cells(row: Mapping[str, Any], flaws: dict[str, int]) -> list[str]:
    known = row["published_times_copy"]
    claim = ""
    if known is not None:
        flaw = published.flaw(row["subject"].split(" ")[0], row["operation"])
        claim = f"{known:.1f} [{flaws.setdefault(flaw, len(flaws) + 1)}]"
    cpu = row["client_cpu_seconds"] + (row["daemon_cpu_seconds"] or 0.0)
    hits = row["memory_hits"]
    return [
        row["subject"],
        ", ".join(part for part in (row["operation"], row["state"]) if part),
        f"{row['median_seconds']:.3f}",
        _number(row["drain_seconds"], ".3f"),
        f"{row['times_copy']:.1f}",
        f"{row['best_times_copy']:.1f}",
        _number(row["drained_times_copy"], ".1f"),
        claim,
        "" if row["written_bytes"] is None else _written(row),
        str(row["missed"]),
        "" if hits is None else str(hits),
        f"{cpu:.2f}",
    ]


def _written(row: Mapping[str, Any]) -> str:
    return f"{row['written_blocks']} = {render.size(row['written_bytes'])}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def check_plot() -> None:
    """Raises UsageError where no picture can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed", "pip install 'kvstore[plot]'"
        ) from None


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw how many copies in memory each row takes, beside what was published."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = result["models"]
    figure, axes = pyplot.subplots(
        len(models), squeeze=False, figsize=(9, 1 + 0.35 * sum(len(m["rows"]) for m in models))
    )
    for model, axis in zip(models, axes[:, 0], strict=True):
        rows = model["rows"][::-1]
        names = [row["name"] for row in rows]
        axis.barh(names, [row["times_copy"] for row in rows], label="measured")
        claims = [(row["published_times_copy"], row["name"]) for row in rows]
        known = [(value, name) for value, name in claims if value is not None]
        if known:
            axis.plot(*zip(*known, strict=True), "k|", markersize=12, label="published")
        axis.set_title(f"{model['model']}: blocks of {render.size(model['block_bytes'])}")
        axis.set_xlabel("times a copy in memory")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)

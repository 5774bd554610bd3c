"""Hit ratio over capacity as a picture; needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.replay.result import Document
    from kvstore.replay.trace import Trace


def need_matplotlib() -> Any:  # noqa: ANN401
    """Return matplotlib. Raises UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed", "pip install 'kvstore[plot]'"
        ) from None
    matplotlib.use("Agg")
    return matplotlib


def plot(trace: Trace, found: Sequence[Document], path: Path) -> None:
    """Draw a line per policy, and the optimum where it is known. Raises UsageError."""
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(one["policy"] for one in found):
        _line(axes, str(name), [one for one in found if one["policy"] == name], "hits")
    if found and found[0]["optimum"] is not None:
        first = [one for one in found if one["policy"] == found[0]["policy"]]
        _line(axes, "optimum", first, "optimum", color="black", linestyle="--")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("blocks on disk")
    axes.set_ylabel("hits, % of blocks asked for")
    axes.set_title(f"{trace.name}: {trace.requests:,} requests, {trace.blocks:,} blocks")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}", "name a PNG file") from None


def _line(axes: Any, name: str, found: Sequence[Document], field: str, **how: Any) -> None:  # noqa: ANN401
    hits = [100 * float(str(one[field])) / max(int(str(one["refs"])), 1) for one in found]
    axes.plot([one["ssd_blocks"] for one in found], hits, marker="o", label=name, **how)

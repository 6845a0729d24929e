"""Read the losses of the runs, compare them, print a table, and draw the curves.

This file trains nothing. The numbers come from the CSV files that Lightning wrote.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

__all__ = ["Losses", "comparison_table", "draw", "largest_difference", "read_losses"]


@dataclass(frozen=True)
class Losses:
    """The losses of one run, by the number of steps done before (training) or after (validation)."""

    train: Mapping[int, float]
    val: Mapping[int, float]


def read_losses(path: Path) -> Losses:
    """Read the files of Lightning's CSVLogger."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Losses(train=_column(rows, "train_loss"), val=_column(rows, "val_loss"))


def _column(rows: Sequence[Mapping[str, str]], name: str) -> dict[int, float]:
    return {int(row["step"]) + 1: float(row[name]) for row in rows if row.get(name)}


def largest_difference(reference: Losses, *resumed: Losses) -> float:
    """The largest absolute difference of any training or validation loss; NaN if one is not a number.

    Raises:
        ValueError: A resumed run has no steps, or one that the reference lacks.

    Example:
        >>> largest_difference(Losses({1: 5.0, 2: 4.0}, {2: 3.0}), Losses({2: 4.5}, {2: 3.0}))
        0.5
    """
    differences = [difference for run in resumed for difference in _differences(reference, run)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _differences(reference: Losses, resumed: Losses) -> list[float]:
    missing = sorted(resumed.train.keys() - reference.train.keys())
    if not resumed.train or missing:
        raise ValueError(
            f"cannot compare: the resumed run has {len(resumed.train)} steps, of which the uninterrupted one "
            f"lacks {missing}. Give both runs the same number of steps."
        )
    train = [abs(loss - reference.train[step]) for step, loss in resumed.train.items()]
    return train + [abs(loss - reference.val[step]) for step, loss in resumed.val.items()]


def comparison_table(reference: Losses, resumed: Mapping[str, Losses], *, rows: int = 10) -> Table:
    """Some of the steps after the resume, every validation, and the largest difference over all steps."""
    table = Table(title="Losses after the resume (val: on held-out text)", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("uninterrupted", justify="right")
    for name in resumed:
        table.add_column(name, justify="right")
        table.add_column("differs", justify="right")
    steps = _common([losses.train for losses in resumed.values()])
    stride = max(1, -(-len(steps) // rows))
    for step in sorted({*steps[::stride], *steps[-1:]}):
        table.add_row(
            str(step), *_cells(reference.train[step], [run.train[step] for run in resumed.values()])
        )
    table.add_section()
    for step in _common([losses.val for losses in resumed.values()]):
        values = [run.val[step] for run in resumed.values()]
        table.add_row(f"{step} val", *_cells(reference.val[step], values))
    table.add_section()
    summary = [f"{len(steps)} steps", ""]
    for losses in resumed.values():
        summary += ["largest", f"{largest_difference(reference, losses):.1e}"]
    table.add_row(*summary, style="bold")
    return table


def _common(series: Sequence[Mapping[int, float]]) -> list[int]:
    return sorted(set.intersection(*(set(one) for one in series)))


def _cells(reference: float, values: Sequence[float]) -> list[str]:
    cells = [f"{reference:.7f}"]
    for value in values:
        cells += [f"{value:.7f}", f"{abs(value - reference):.1e}"]
    return cells


def draw(path: Path, reference: Losses, resumed: Mapping[str, Losses], *, reference_name: str) -> None:
    """Draw all curves on one pair of axes, the resumed ones as marks upon the uninterrupted line."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(*_points(reference.train), color="0.35", linewidth=1.2, label=reference_name)
        axes.plot(*_points(reference.val), "D", color="black", markersize=5, label="validation loss")
        for (name, losses), mark in zip(resumed.items(), ("o", "x", "+", "s"), strict=False):
            every = max(1, len(losses.train) // 25)
            points = _points(losses.train)
            axes.plot(*points, mark, markersize=5, fillstyle="none", markevery=every, label=name)
        first = min(step for losses in resumed.values() for step in losses.train)
        axes.axvline(first - 0.5, color="0.7", linestyle=":", linewidth=1)
        axes.set(
            xlabel="step", ylabel="loss per byte (nats)", title="One training, resumed at other world sizes"
        )
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)


def _points(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(losses.keys()), list(losses.values())

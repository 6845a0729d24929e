"""Draw the timeline of a plan: memory of a rank over one step by kind, against its budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nnx_colossalai.plan.cost import Memory
from nnx_colossalai.plan.document import size_text
from nnx_colossalai.plan.spec import RankResources
from nnx_core.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_COLORS = {
    "weights": "#4c72b0", "masters": "#8172b3", "optimizer": "#64b5cd", "gradients": "#dd8452",
    "gathered": "#55a868", "staging": "#ccb974", "activations": "#c44e52", "other": "#8c8c8c",
}  # fmt: skip


_GIB = 2**30


_MOST_LABELS = 24


def draw_timeline(memory: Memory, resources: RankResources, path: str | Path, *, title: str = "") -> None:
    """Draw the memory over one step to a PNG file.

    Args:
        memory: The planned memory.
        resources: The resources with the budget.
        path: The path of the file.
        title: The title above the picture.

    Raises:
        PlanError: The file cannot be written.
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"cannot draw {str(path)!r}: matplotlib is not installed.",
            remedy="Run `pip install matplotlib`.",
        ) from error

    moments = memory.timeline
    figure = Figure(figsize=(max(8.0, min(16.0, 0.18 * len(moments) + 4)), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _stack(axes, memory)
    _budget(axes, memory, resources)
    _label(axes, memory)
    host = f"host {size_text(memory.host)} of {size_text(resources.host_bytes)}"
    peak = f"device {size_text(memory.device)} of {size_text(resources.device_bytes)}"
    axes.set_title(f"{title}\n{peak}, {host}".strip())
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, fontsize="small")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise PlanError(
            f"the drawing {str(path)!r} cannot be written: {error.strerror or error}.",
            remedy="Choose another path.",
        ) from error


def _stack(axes: Axes, memory: Memory) -> None:
    """Draw the kinds stacked upon each other, with one step of the line for each moment."""
    count = len(memory.timeline)
    edges = [at - 0.5 for at in range(count + 1)]
    below = [0.0] * count
    for kind, color in _COLORS.items():
        above = [
            one + moment.by_kind[kind] / _GIB for one, moment in zip(below, memory.timeline, strict=True)
        ]
        if above != below:
            axes.stairs(above, edges, baseline=below, fill=True, color=color, label=kind, linewidth=0)
        below = above


def _budget(axes: Axes, memory: Memory, resources: RankResources) -> None:
    """Draw the budget as a line, unless it is so high that it would flatten the rest."""
    budget, peak = resources.device_bytes / _GIB, max(memory.device, 1) / _GIB
    if budget <= 4 * peak:
        axes.axhline(budget, color="black", linestyle="--", linewidth=1.2, label="budget")
    axes.set_ylim(0, 1.08 * (max(budget, peak) if budget <= 4 * peak else peak))


def _label(axes: Axes, memory: Memory) -> None:
    moments = memory.timeline
    every = -(-len(moments) // _MOST_LABELS)
    axes.set_xlim(-0.5, len(moments) - 0.5)
    shown = [at for at in range(len(moments)) if at % every == 0]
    shown = [at for at in shown if at + every <= len(moments)] + [len(moments) - 1]
    names = [moments[at].group or ("step" if moments[at].phase == "step" else "(root)") for at in shown]
    axes.set_xticks(shown, names, rotation=60, ha="right", fontsize=7)
    for at in range(1, len(moments)):
        if moments[at].phase != moments[at - 1].phase:
            axes.axvline(at - 0.5, color="black", linewidth=0.6)
    top = axes.get_ylim()[1] * 0.99
    for phase in dict.fromkeys(moment.phase for moment in moments):
        own = [at for at, moment in enumerate(moments) if moment.phase == phase]
        # The step is a single moment, which has the label already.
        if phase != "step":
            axes.text(sum(own) / len(own), top, phase, ha="center", va="top", fontsize=8)
    axes.set_ylabel("device memory, GiB")

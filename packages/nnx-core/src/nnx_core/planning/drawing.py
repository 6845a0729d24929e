"""Draw the memory of a rank over a step, by kind, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.planning.estimate import KINDS, World
from nnx_core.planning.model import Model

__all__ = ["draw"]

_HEIGHT = 2.2


def draw(model: Model, world: World, strategies: Sequence[str], path: Path) -> None:
    """Draw a panel for each strategy into a file.

    Args:
        model: The model.
        world: The ranks.
        strategies: Strategies with an estimator.
        path: The file; its suffix is the format, such as ``.png`` or ``.svg``.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OptionError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"cannot draw '{path}': matplotlib is not installed.",
            remedy="Run `pip install 'nnx-core[plot]'`, or leave out --plot.",
        ) from error
    figure = Figure(figsize=(9, _HEIGHT * len(strategies) + 0.6), layout="constrained")
    panels = figure.subplots(len(strategies), squeeze=False, sharey=True)[:, 0]
    for panel, name in zip(panels, strategies, strict=True):
        replay = model.replay(name, world)
        assert replay is not None  # the plan has an estimate of it
        history: list[tuple[str, tuple[int, ...]]] = []
        replay.memory.history = history
        replay.run()
        history = [change for change in history if change[0]]  # of a phase, not before the step
        columns = zip(*(kinds for _, kinds in history), strict=True)
        sizes = [[nbytes / 2**30 for nbytes in column] for column in columns]
        panel.stackplot(range(len(history)), sizes, labels=KINDS, step="post")
        start = 0
        for phase, events in groupby(phase for phase, _ in history):
            panel.axvline(start, color="black", linewidth=0.5)
            panel.text(start, 1, f" {phase}", transform=panel.get_xaxis_transform(), va="bottom", fontsize=8)
            start += len(list(events))
        if world.memory is not None:
            panel.axhline(world.memory / 2**30, color="red", linestyle="--", linewidth=1)
        panel.set_ylabel("GiB")
        panel.set_xticks([])
        panel.set_title(name, loc="left", fontsize=9, pad=16)
        panel.margins(x=0)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), fontsize=8
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise OptionError(
            f"cannot write the plot '{path}': {error}.",
            remedy="Choose a name that ends in .png, .svg or .pdf, in a writable directory.",
        ) from error

"""Statistics that modules share over ranks: over units, whose ranks see the same data.

torchmetrics' metrics and `torch.nn.SyncBatchNorm` ask all ranks of the world. The ranks of a unit would
be counted several times, so while a module is laid out they ask one rank of each unit. What the user has
set on them is left alone. It owns nothing else of these modules.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nnx_nnscaler.axes import Axes


class StatisticsOverUnits:
    """The modules of a tree whose statistics were changed to be shared over units. Collective.

    Args:
        module: The root of the tree.
        axes: This rank's groups.
    """

    def __init__(self, module: nn.Module, axes: Axes) -> None:
        self._changed: list[tuple[Any, str]] = []
        if axes.unit_size == 1:
            return
        torchmetrics = sys.modules.get("torchmetrics")  # no metric has been made without it
        for submodule in module.modules():
            if torchmetrics is not None and isinstance(submodule, torchmetrics.Metric):
                if submodule.dist_sync_fn is None and submodule.process_group is None:
                    self._change(submodule, "dist_sync_fn", _GatherOverUnits(axes.outer))
            elif isinstance(submodule, nn.SyncBatchNorm) and submodule.process_group is None:
                self._change(submodule, "process_group", axes.outer or _alone())

    def _change(self, module: Any, name: str, value: Any) -> None:
        setattr(module, name, value)
        self._changed.append((module, name))

    def undo(self) -> None:
        """Let them share over all ranks again."""
        for module, name in self._changed:
            setattr(module, name, None)
        self._changed.clear()


class _GatherOverUnits:
    """Gathers the states of other ranks for a metric. A copy of the metric shares it; a file does not.

    Args:
        group: One rank of each unit; None where there is one unit.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        if self._group is None:
            return [state]
        from torchmetrics.utilities.distributed import gather_all_tensors

        states: list[Tensor] = gather_all_tensors(state, group=group or self._group)
        return states

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOverUnits:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _alone() -> dist.ProcessGroup | None:
    """A group of this rank only."""
    group, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    return group  # type: ignore[no-any-return]

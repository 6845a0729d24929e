"""Share statistics of modules over units, because the ranks of a unit see the same data.

torchmetrics' metrics and `torch.nn.SyncBatchNorm` reduce over all ranks of the world, and would count the
ranks of a unit several times. During training they reduce over one rank of each unit. The user's own settings
stay.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nnx_nnscaler.axes import Axes


class StatisticsOverUnits:
    """The modules of a tree whose statistics are shared over units. Collective.

    Args:
        module: The root of the tree.
        axes: This rank's process groups.
    """

    def __init__(self, module: nn.Module, axes: Axes) -> None:
        self._changed: list[tuple[Any, str]] = []
        if axes.unit_size == 1:
            return
        torchmetrics = sys.modules.get("torchmetrics")  # without the import, no metric exists
        for submodule in module.modules():
            if torchmetrics is not None and isinstance(submodule, torchmetrics.Metric):
                if submodule.dist_sync_fn is None and submodule.process_group is None:
                    self._change(submodule, "dist_sync_fn", _GatherOverUnits(axes.outer))
            elif isinstance(submodule, nn.SyncBatchNorm) and submodule.process_group is None:
                self._change(submodule, "process_group", axes.outer or _group_of_this_rank())

    def _change(self, module: Any, name: str, value: Any) -> None:
        setattr(module, name, value)
        self._changed.append((module, name))

    def undo(self) -> None:
        """Share statistics over all ranks again."""
        for module, name in self._changed:
            setattr(module, name, None)
        self._changed.clear()


class _GatherOverUnits:
    """Gathers the states of other ranks for a metric. A copy of the metric shares it; a pickle does not.

    Args:
        group: One rank of each unit; None for a single unit.
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


def _group_of_this_rank() -> dist.ProcessGroup | None:
    """Return a group of this rank only."""
    group, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    return group  # type: ignore[no-any-return]

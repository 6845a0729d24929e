"""Name the cheapest cure for a strategy that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nnx_core.names.registry import StrategyRegistry
from nnx_core.planning.estimate import World
from nnx_core.planning.fakes import repeated_layers
from nnx_core.planning.model import Model
from nnx_core.planning.table import Row

__all__ = ["Advisor"]

_MOST_DEVICES = 4096


class Advisor:
    """Finds a cure for each row that does not fit: a smaller batch first, more devices last.

    Args:
        model: The model.
        world: The ranks.
        rows: The rows without advice.
    """

    def __init__(self, model: Model, world: World, rows: Sequence[Row]) -> None:
        self._model, self._world, self._rows = model, world, rows

    def advised(self) -> list[Row]:
        """Return the rows, with a cure where one is needed."""
        return [replace(row, cure=self._cure(row)) if row.fits == "no" else row for row in self._rows]

    def _cure(self, row: Row) -> str:
        return (
            self._smaller_batch(row)
            or self._recompute(row)
            or self._other_strategy(row)
            or self._more_devices(row)
            or "no cure was found: use smaller layers, or devices with more memory"
        )

    def _smaller_batch(self, row: Row) -> str:
        if not row.largest_batch:
            return ""
        size = self._model.trace().batch_size
        steps = -(-size // row.largest_batch)
        return f"batch {row.largest_batch} a device, with accumulate_grad_batches={steps}"

    def _recompute(self, row: Row) -> str:
        layers = repeated_layers(self._model.trace().module)
        classes = tuple(dict.fromkeys(type(layer).__name__ for layer in layers))
        if not classes or self._world.memory is None:
            return ""
        estimate = self._model.estimate(row.strategy, self._world, recompute=classes)
        if estimate is None or estimate.peak > self._world.memory:
            return ""
        names = ",".join(classes)
        if row.strategy in StrategyRegistry:
            spec = StrategyRegistry.get(row.strategy)
            if spec.capabilities.activation_checkpointing:
                return f"recompute activations: activation_checkpointing={names}"
        return f"recompute activations: torch.utils.checkpoint around each {names}"

    def _other_strategy(self, row: Row) -> str:
        fitting = [other for other in self._rows if other.fits in ("yes", "tight")]
        if not fitting:
            return ""
        names = [other.strategy for other in fitting]
        preferred = [name for name in ("fsdp_auto", "nnscaler_zero", "colossalai") if name in names]
        return f"another strategy fits: {(preferred or names)[0]}"

    def _more_devices(self, row: Row) -> str:
        world = self._world
        size = world.size
        before = row.estimate.peak if row.estimate is not None else 0
        while size < _MOST_DEVICES and world.memory is not None:
            size *= 2
            larger = replace(world, size=size, nodes=max(world.nodes * size // world.size, 1))
            estimate = self._model.estimate(row.strategy, larger)
            if estimate is None or estimate.peak >= before:
                return ""
            if estimate.peak <= world.memory:
                return f"{size} devices"
            before = estimate.peak
        return ""

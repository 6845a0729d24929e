"""Plan a run: trace a model once, replay the step under every strategy, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nnx_core.errors import NnxError, OptionError
from nnx_core.names.catalog import known
from nnx_core.names.registry import StrategyRegistry
from nnx_core.options import bytes_of
from nnx_core.planning.advice import Advisor
from nnx_core.planning.drawing import draw
from nnx_core.planning.estimate import World
from nnx_core.planning.fakes import PRECISIONS, default_batch
from nnx_core.planning.model import Model
from nnx_core.planning.plain import LIGHTNING
from nnx_core.planning.table import Plan, Row

__all__ = ["plan"]

_ALLOCATED = "the model's weights are allocated already; the plan did not need them."


def plan(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any = None,
    *,
    devices: int = 8,
    nodes: int = 1,
    memory: int | float | str | None = None,
    host_memory: int | float | str | None = None,
    precision: str = "32-true",
    accelerator: str = "cuda",
    optimizer: str = "AdamW",
    strategies: Iterable[str] | None = None,
    options: Mapping[str, Any] | None = None,
    plot: Path | str | None = None,
) -> Plan:
    """Predict the memory of a rank under every strategy. No weight is allocated, and no device is needed.

    Args:
        module: A module, or a function that makes one. Its weights may be allocated; nothing changes them.
        batch: The batch of one device: what ``training_step`` or the forward gets, or a function from the
            module to it. By default ``example_input_array``, or the first batch of ``train_dataloader``.
        devices: The number of devices of a node.
        nodes: The number of nodes.
        memory: The memory of a device, such as ``"80GiB"``; None only counts.
        host_memory: The host memory of a node, for strategies that offload.
        precision: Lightning's precision string.
        accelerator: ``"cuda"`` or ``"cpu"``.
        optimizer: The class of ``torch.optim`` if the module has no ``configure_optimizers``.
        strategies: The names of strategies; by default all that are installed, and the catalog's.
        options: Options of these strategies, such as ``{"activation_checkpointing": Block}``.
        plot: A file to draw the memory over a step into, with a panel for each strategy.

    Raises:
        OptionError: A size, a number, or the batch is invalid.
        StrategyNotFoundError: A strategy is unknown.
        UnsupportedError: A plot is wanted, and matplotlib is not installed.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> found = plan(model, torch.zeros(4, 64), devices=2, accelerator="cpu", strategies=["ddp"])
        >>> found.rows[0].estimate.peak
        699712
    """
    _check_precision(precision)
    world = _world(devices, nodes, memory, host_memory, accelerator)
    names = _names(strategies)
    model = Model(
        module,
        default_batch if batch is None else batch,
        precision=precision,
        accelerator=accelerator,
        optimizer=optimizer,
        options=options,
    )
    rows = [_row(name, model, world) for name in names]
    if plot is not None:
        draw(model, world, [row.strategy for row in rows if row.estimate is not None], Path(plot))
    notes = () if not _has_weights(module) else (_ALLOCATED,)
    return _compared(model, world, rows, precision, notes)


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise OptionError(
            f"precision={precision!r} is unknown.", remedy=f"Use one of {', '.join(PRECISIONS)}."
        )


def _has_weights(module: object) -> bool:
    return isinstance(module, nn.Module) and any(not p.is_meta and p.numel() for p in module.parameters())


def _compared(model: Model, world: World, rows: list[Row], precision: str, notes: tuple[str, ...]) -> Plan:
    """Return the plan of rows, with advice."""
    trace = model.trace()
    return Plan(
        rows=tuple(Advisor(model, world, rows).advised()),
        world=world,
        parameters=sum(p.numel for p in trace.parameters.values()),
        batch_size=trace.batch_size,
        precision=precision,
        optimizer=trace.optimizer_name,
        source=trace.source,
        notes=(*trace.notes, *notes),
    )


def _world(
    devices: int,
    nodes: int,
    memory: int | float | str | None,
    host_memory: int | float | str | None,
    accelerator: str,
) -> World:
    """Return the ranks of a plan.

    Raises:
        OptionError: A number, a size or the accelerator is invalid.
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if not isinstance(value, int) or value < 1:
            raise OptionError(
                f"{name}={value!r} is not a positive number.", remedy=f"Pass {name}=8, for example."
            )
    if accelerator not in ("cuda", "cpu"):
        raise OptionError(f"accelerator={accelerator!r} is unknown.", remedy="Use 'cuda' or 'cpu'.")
    host = bytes_of(host_memory, name="host_memory")
    return World(
        size=devices * nodes,
        nodes=nodes,
        memory=bytes_of(memory, name="memory"),
        host=None if host is None else host // devices,
        accelerator=accelerator,
    )


def _names(strategies: Iterable[str] | None) -> list[str]:
    """Return the strategies to plan, also those of the catalog.

    Raises:
        StrategyNotFoundError: A strategy is unknown.
    """
    if strategies is None:
        return [
            *LIGHTNING,
            *StrategyRegistry,
            *sorted(name for name in known() if name not in StrategyRegistry),
        ]
    names = list(strategies)
    for name in names:
        if name not in LIGHTNING and name not in StrategyRegistry and name not in known():
            raise StrategyRegistry.explain(name)
    return names


def _row(name: str, model: Model, world: World) -> Row:
    """Return the row of a strategy, without advice."""
    if name not in LIGHTNING and name not in StrategyRegistry:
        return Row(strategy=name, status="not installed", cure=known()[name].install)
    try:
        estimate = model.estimate(name, world)
        fits = estimate is None or world.memory is None or estimate.peak <= world.memory
        has_smaller_batch = model.trace().batch_size > 1
        larger = model.estimate(name, world, factor=2) if fits or has_smaller_batch else estimate
    except OptionError:
        raise
    except NnxError as error:  # such as a planner that finds no plan
        return Row(strategy=name, status="no plan", cure=str(error))
    if estimate is None or larger is None:
        return Row(strategy=name, status="no estimate", cure="its plugin has no estimator")
    return Row.of(name, estimate, larger, model.trace().batch_size, world.memory)

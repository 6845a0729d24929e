"""Plan a run: trace a model once, replay the step under every strategy, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from nnx_core.errors import NnxError, OptionError
from nnx_core.names.catalog import known
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import import_reference
from nnx_core.options import bytes_of
from nnx_core.planning.advice import Advisor
from nnx_core.planning.estimate import Estimate, World
from nnx_core.planning.models import (
    DTYPES,
    PRECISIONS,
    batch_size,
    convert,
    converted_batch,
    default_batch,
    fake_batch,
    fake_module,
    loss_of,
    optimizers_of,
    recomputing,
    scaled_batch,
)
from nnx_core.planning.plain import LIGHTNING
from nnx_core.planning.replay import Replay
from nnx_core.planning.table import Plan, Row
from nnx_core.planning.trace import Trace
from nnx_core.planning.tracing import Step, fake_mode, formula_trace, reason_of, trace_step

__all__ = ["Model", "estimator", "plan", "trace_module"]


def trace_module(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    precision: str = "32-true",
    accelerator: str = "cuda",
    optimizer: str = "AdamW",
    factor: int = 1,
    repeat: bool = True,
    recompute: bool = False,
) -> Trace:
    """Trace one step of a module, without memory for its weights.

    Args:
        module: A module, or a function that makes one.
        batch: A batch of its ``training_step`` or forward, or a function from the module to one.
        precision: Lightning's precision string.
        accelerator: ``"cuda"`` or ``"cpu"``: on cuda optimizers update lists of tensors.
        optimizer: The class of ``torch.optim`` if the module has no ``configure_optimizers``.
        factor: The factor of the batch size.
        repeat: True to trace four of many equal layers.
        recompute: True to recompute the activations of equal layers in backward.
    """
    with fake_mode() as mode:
        made = fake_module(mode, module)
        fake = fake_batch(mode, batch(made) if callable(batch) else batch)
        if precision in DTYPES:
            convert(made, DTYPES[precision])
            fake = converted_batch(fake, DTYPES[precision])
        if factor != 1:
            fake = scaled_batch(fake, factor)
        step = Step(
            module=made,
            loss=loss_of(made),
            optimizers=lambda: optimizers_of(made, lists=accelerator == "cuda", default=optimizer),
            batch=fake,
            batch_size=batch_size(fake),
            precision=precision,
        )
        with recomputing(made, recompute):
            try:
                return trace_step(step, repeat=repeat)
            except NnxError:
                raise
            except Exception as error:
                return formula_trace(step, reason_of(error))


class Model:
    """A model to plan, with a trace for each batch size that is asked for.

    Args:
        module: A module, or a function that makes one.
        batch: The batch of `trace_module`.
        settings: Further arguments of `trace_module`.
    """

    def __init__(self, module: nn.Module | Callable[[], nn.Module], batch: Any, **settings: Any) -> None:
        self._module, self._batch, self._settings = module, batch, settings
        self._traces: dict[tuple[int, bool, str], Trace] = {}

    def trace(self, *, factor: int = 1, recompute: bool = False, precision: str = "") -> Trace:
        """Return the trace for a factor of the batch size."""
        key = factor, recompute, precision or self._settings.get("precision", "32-true")
        if key not in self._traces:
            settings = {**self._settings, "precision": key[2]}
            self._traces[key] = trace_module(
                self._module, self._batch, factor=factor, recompute=recompute, **settings
            )
        return self._traces[key]

    def estimate(
        self,
        strategy: str,
        world: World,
        *,
        factor: int = 1,
        recompute: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Estimate | None:
        """Return the estimate of a strategy; None if its plugin has no estimator."""
        found = estimator(strategy)
        if found is None:
            return None
        own = dict(StrategyRegistry.get(strategy).init_params) if strategy in StrategyRegistry else {}
        precision = found.traced_precision(self._settings.get("precision", "32-true"))
        trace = self.trace(factor=factor, recompute=recompute, precision=precision)
        return found(trace, world, {**own, **(options or {})}).run()


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

    Raises:
        OptionError: A size, a number, or the batch is invalid.
        StrategyNotFoundError: A strategy is unknown.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> found = plan(model, torch.zeros(4, 64), devices=2, accelerator="cpu", strategies=["ddp"])
        >>> found.rows[0].estimate.peak
        662576
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if not isinstance(value, int) or value < 1:
            raise OptionError(
                f"{name}={value!r} is not a positive number.", remedy=f"Pass {name}=8, for example."
            )
    if precision not in PRECISIONS:
        raise OptionError(
            f"precision={precision!r} is unknown.", remedy=f"Use one of {', '.join(PRECISIONS)}."
        )
    if accelerator not in ("cuda", "cpu"):
        raise OptionError(f"accelerator={accelerator!r} is unknown.", remedy="Use 'cuda' or 'cpu'.")
    host = bytes_of(host_memory, name="host_memory")
    world = World(
        size=devices * nodes,
        nodes=nodes,
        memory=bytes_of(memory, name="memory"),
        host=None if host is None else host // devices,
        accelerator=accelerator,
    )
    names = [*LIGHTNING, *StrategyRegistry] if strategies is None else list(strategies)
    for name in names:
        if name not in LIGHTNING and name not in StrategyRegistry and name not in known():
            raise StrategyRegistry.explain(name)
    model = Model(
        module,
        default_batch if batch is None else batch,
        precision=precision,
        accelerator=accelerator,
        optimizer=optimizer,
    )
    rows = [
        _row(name, model, world, options) for name in names if name in LIGHTNING or name in StrategyRegistry
    ]
    missing = known() if strategies is None else [name for name in names if name in known()]
    rows += [
        Row(strategy=name, status="not installed", cure=known()[name].install)
        for name in sorted(missing)
        if name not in StrategyRegistry
    ]
    trace = model.trace()
    advised = Advisor(model, world, rows).advised()
    notes = [*trace.notes]
    if isinstance(module, nn.Module) and any(not p.is_meta and p.numel() for p in module.parameters()):
        notes.append("the model's weights are allocated already; the plan did not need them.")
    return Plan(
        rows=tuple(advised),
        world=world,
        parameters=sum(p.numel for p in trace.parameters.values()),
        batch_size=trace.batch_size,
        precision=precision,
        optimizer=trace.optimizer_name,
        source=trace.source,
        notes=tuple(notes),
    )


def _row(name: str, model: Model, world: World, options: Mapping[str, Any] | None) -> Row:
    """Return the row of an installed strategy, without advice."""
    try:
        estimate = model.estimate(name, world, options=options)
        larger = None if estimate is None else model.estimate(name, world, factor=2, options=options)
    except OptionError:
        raise
    except NnxError as error:  # such as a planner that finds no plan
        return Row(strategy=name, status="no plan", cure=str(error))
    if estimate is None or larger is None:
        return Row(strategy=name, status="no estimate", cure="its plugin has no estimator")
    return Row.of(name, estimate, larger, model.trace().batch_size, world.memory)


def estimator(strategy: str) -> type[Replay] | None:
    """Return the estimator of a strategy; None if its plugin has none."""
    if strategy in LIGHTNING:
        return LIGHTNING[strategy]
    spec = StrategyRegistry.get(strategy)
    if not spec.memory:
        return None
    found: type[Replay] = import_reference(spec.memory, what=f"the memory of strategy {strategy!r}")
    return found
